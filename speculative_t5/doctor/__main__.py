"""One check, run in this process for `run_check`; others call that, or the command `doctor`."""

import json
import os
import sys
from dataclasses import asdict

from ..kernels import try_all_on_metal
from . import ALL_CHECKS, Subject

# Whatever else is printed, by a library for example, goes to standard error.
with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
    os.dup2(2, 1)
    try_all_on_metal()
    check = {check.name: check for check in ALL_CHECKS}[sys.argv[1]]
    json.dump(asdict(check.find(Subject(**json.load(sys.stdin)))), output)
