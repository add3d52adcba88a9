"""scripts/venv.sh finds a Python, and installs again if what the package is built from changes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPOSITORY
from messages import check_message

FAKE_PYTHON = f"""#!/bin/sh
case "$*" in
    *"pip install"*) echo "$*" >>installations ;;
    *sysconfig*) [ -e headers ] && echo True || echo False ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
STUB = """#!/bin/sh
case "$*" in
    --version) echo "Python 3.{minor}.1" ;;
    -c*) [ {minor} -ge 11 ] ;;
    "-m venv"*) echo "$0" >chosen; mkdir -p .venv/bin; cp fake .venv/bin/python ;;
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


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ({"python3": 11, "python3.14": 14}, "python3"),
        ({"python3": 9, "python3.12": 12, "python3.11": 11}, "python3.12"),
        ({"python3": 10, "python3.11": 11}, "python3.11"),
        ({"python3": 9}, None),
    ],
)
def test_another_python_on_the_path_is_used_before_giving_up(
    tmp_path: Path, install: Callable[..., int], found: dict[str, int], chosen: str | None
) -> None:
    shutil.move(tmp_path / ".venv" / "bin" / "python", tmp_path / "fake")
    shutil.rmtree(tmp_path / ".venv")
    (tmp_path / PACKAGES).mkdir(parents=True)
    for name in ("python3", *(f"python3.{minor}" for minor in range(11, 15))):
        missing = "#!/bin/sh\nexit 127\n"  # stands before the machine's own
        stub = STUB.format(minor=found[name]) if name in found else missing
        write(tmp_path / "bin" / name, stub)
    if chosen:
        assert install() == 1
        assert Path((tmp_path / "chosen").read_text().strip()) == tmp_path / "bin" / chosen
        return
    with pytest.raises(subprocess.CalledProcessError) as failed:
        install()
    assert failed.value.returncode == 2
    (line,) = failed.value.stderr.splitlines()
    check_message(line.removeprefix("error: "), "3.11 or newer is needed, found Python 3.9.1")
    assert not (tmp_path / ".venv" / "bin").exists()
