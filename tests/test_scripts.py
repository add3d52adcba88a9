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
SOURCE = Path("speculative_t5", "cpu", "native", "products.c")
PACKAGES = Path(".venv", "lib", "python3.11", "site-packages")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., int]:
    """Runs venv.sh in a checkout with a fake pip; returns how often that was called so far."""
    for name in ("pyproject.toml", "setup.py", SOURCE):
        write(tmp_path / name, "contents\n")
    write(tmp_path / "scripts" / "venv.sh", (REPOSITORY / "scripts" / "venv.sh").read_text())
    write(tmp_path / ".venv" / "bin" / "python", FAKE_PYTHON)
    (tmp_path / PACKAGES / "mlx-0.32.4.dist-info").mkdir(parents=True)

    def run(*arguments: str, compiler: str = "gcc 12") -> int:
        write(tmp_path / "bin" / "c++", f"#!/bin/sh\necho '{compiler}'\n")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "extra=; . scripts/venv.sh", "demo.sh", *arguments],
            cwd=tmp_path, check=True, capture_output=True, text=True,
            env=os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        )  # fmt: skip
        assert done.stderr in ("", "installing into .venv ...\n")
        return len((tmp_path / "installations").read_text().splitlines())

    return run


def test_only_a_change_of_what_is_built_from_installs_again(
    install: Callable[..., int], tmp_path: Path
) -> None:
    assert [install("--help"), install()] == [1, 1]
    assert "help" not in (tmp_path / "installations").read_text()  # it is the script's own
    assert install(compiler="gcc 13") == 2
    write(tmp_path / SOURCE, "other contents\n")
    assert install(compiler="gcc 13") == 3
    mlx = tmp_path / PACKAGES / "mlx-0.32.4.dist-info"
    mlx.rename(mlx.with_name("mlx-0.32.5.dist-info"))
    assert install(compiler="gcc 13") == 4
    (tmp_path / "headers").touch()
    assert install(compiler="gcc 13") == 5
    shutil.rmtree(tmp_path / PACKAGES)
    assert install(compiler="gcc 13") == 6
