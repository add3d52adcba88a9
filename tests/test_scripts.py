"""scripts/venv.sh installs again when something that the package is built from has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPOSITORY

FAKE_PYTHON = f"""#!/bin/sh
case "$*" in
    *"pip install"*) echo "$*" >>installations ;;
    *sysconfig*) [ -e headers ] && echo True || echo False ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., int]:
    """Runs venv.sh in a checkout whose pip does nothing; returns how often it was called so far."""
    (tmp_path / "speculative_t5" / "cpu" / "native").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "speculative_t5/cpu/native/products.c"):
        (tmp_path / name).write_text("contents\n")
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts" / "venv.sh", tmp_path / "scripts")
    write_program(tmp_path / ".venv" / "bin" / "python", FAKE_PYTHON)
    packages = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    (packages / "mlx-0.32.4.dist-info").mkdir(parents=True)

    def run(*arguments: str, compiler: str = "gcc 12") -> int:
        write_program(tmp_path / "bin" / "c++", f"#!/bin/sh\necho '{compiler}'\n")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "extra=; . scripts/venv.sh", "demo.sh", *arguments],
            cwd=tmp_path, check=True, capture_output=True, text=True,
            env=os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        )  # fmt: skip
        assert done.stderr in ("", "installing into .venv ...\n")
        return len((tmp_path / "installations").read_text().splitlines())

    return run


def test_a_second_run_installs_nothing(install: Callable[..., int]) -> None:
    assert [install(), install()] == [1, 1]


def test_a_change_of_what_the_package_is_built_from_installs_again(
    install: Callable[..., int], tmp_path: Path
) -> None:
    assert install() == 1
    assert install(compiler="gcc 13") == 2
    (tmp_path / "speculative_t5" / "cpu" / "native" / "products.c").write_text("other contents\n")
    assert install(compiler="gcc 13") == 3
    packages = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    (packages / "mlx-0.32.4.dist-info").rename(packages / "mlx-0.32.5.dist-info")
    assert install(compiler="gcc 13") == 4
    (tmp_path / "headers").touch()
    assert install(compiler="gcc 13") == 5
    shutil.rmtree(packages)
    assert install(compiler="gcc 13") == 6


def test_arguments_of_the_script_are_not_those_of_the_installation(
    install: Callable[..., int], tmp_path: Path
) -> None:
    install("--help")
    assert "help" not in (tmp_path / "installations").read_text()
