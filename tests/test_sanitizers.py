"""The C code under gcc's or clang's sanitizers: native_driver.c calls it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

NATIVE = REPOSITORY / "speculative_t5" / "cpu" / "native"
SOURCES = [REPOSITORY / "tests" / "native_driver.c", NATIVE / "products.c", NATIVE / "layers.c"]
# Of "undefined", its other kinds take most of the time to compile, and see what "address" sees.
SANITIZERS = {
    "address": "address,alignment,bounds,shift,signed-integer-overflow",
    "thread": "thread",
}


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The driver built with each sanitizer that there is here, all compiled at the same time."""
    compiler, folder = shutil.which("cc"), tmp_path_factory.mktemp("drivers")
    if compiler is None or not sys.platform.startswith("linux"):
        return {}
    empty = folder / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    building: dict[str, subprocess.Popen[bytes]] = {}
    for name, kinds in SANITIZERS.items():
        command = [compiler, "-std=gnu11", "-O0", f"-fsanitize={kinds}", f"-I{NATIVE}"]
        trial = subprocess.run([*command, empty, "-o", folder / "empty"], capture_output=True)
        if trial.returncode or run(folder / "empty").returncode:
            continue  # its runtime is not installed, or does not work on this system
        building[name] = subprocess.Popen(
            [*command, "-fno-sanitize-recover=all", *SOURCES, "-lm", "-lpthread"]
            + ["-o", str(folder / name)]
        )
    assert all(process.wait() == 0 for process in building.values())
    return {name: folder / name for name in building}


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Leaks are looked for by a means that containers may forbid.
    settings = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [program, *arguments], env=settings, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("name", "checks", "report"),
    [
        ("address", "all", None),
        ("thread", "threads", None),
        ("address", "overrun", "heap-buffer-overflow"),
        ("thread", "race", "data race"),
    ],
)
def test_sanitizers_report_planted_faults_only(
    drivers: dict[str, Path], name: str, checks: str, report: str | None
) -> None:
    if name not in drivers:
        pytest.skip(f"no C compiler, or no {name} sanitizer")
    done = run(drivers[name], checks)
    if report:
        assert done.returncode and report in done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")
