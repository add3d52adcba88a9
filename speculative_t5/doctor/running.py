"""Running a check in a process of its own, which may crash or hang without ending the report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

from .checks import Check
from .findings import Finding, Subject

COMMAND = (sys.executable, "-m", "speculative_t5.doctor")
LAST_LINES = 20  # of standard error, kept with a failure


def run(check: Check, subject: Subject) -> Finding:
    """Run a check in a process, and return its finding, or that of how the process ended.

    The process receives the check's name as its argument and the subject as JSON on standard
    input; it writes the finding as JSON to standard output (see `__main__`).
    """
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [*COMMAND, check.name], input=json.dumps(asdict(subject)), timeout=check.deadline,
            capture_output=True, check=False, encoding="utf-8", errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        stderr = (error.stderr or b"").decode("utf-8", "replace")
        finding = _unfinished(check, f"it did not end within {check.deadline:g} s", stderr)
    else:
        if done.returncode == 0 and done.stdout:
            stored = json.loads(done.stdout)
            finding = Finding(**stored | {"notes": tuple(stored["notes"])})
        else:
            finding = _unfinished(check, _ending(done.returncode), done.stderr)
    return replace(finding, seconds=round(time.perf_counter() - began, 1))


def _ending(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit code {code}"
    return f"the process ended with signal {-code}, {signal.Signals(-code).name}"


def _unfinished(check: Check, ending: str, stderr: str) -> Finding:
    """Return the finding of a process that left none, with the last line that it wrote."""
    lines = [line for line in stderr.splitlines() if line.strip()][-LAST_LINES:]
    reason = f"{ending}: {' '.join(lines[-1].split())}" if lines else ending
    return Finding(check.name, "failed", reason, details={"stderr": lines})
