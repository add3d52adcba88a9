"""How long a process takes until its first output."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence


def first_token_seconds(arguments: Sequence[str]) -> float:
    """Return the seconds from a process's start to the first byte of its output.

    Args:
        arguments: For `python -m speculative_t5`.

    Raises:
        RuntimeError: If the process fails or prints nothing.
    """
    began = time.perf_counter()
    command = [sys.executable, "-m", "speculative_t5", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.communicate()
    if not first or process.returncode:
        raise RuntimeError(f"{shlex.join(command)} gave no text (exit code {process.returncode})")
    return seconds
