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
    *platform*) echo "{found}" ;;
    "-m venv"*) echo "$0" >chosen; mkdir -p .venv/bin; cp fake .venv/bin/python ;;
esac
"""
SOURCE = Path("speculative_t5", "kernels", "native", "products.c")
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

    def run(*arguments: str, compiler: str = "gcc 12", extra: str = "") -> int:
        write(tmp_path / "bin" / "c++", f"#!/bin/sh\necho '{compiler}'\n")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"extra={extra}; . scripts/venv.sh", "demo.sh",
             *arguments],
            cwd=tmp_path, check=True, capture_output=True, text=True,
            env=os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        )  # fmt: skip
        named = f" (extra: {extra})" if extra else ""
        assert done.stderr in ("", f"installing into .venv{named} ...\n")
        return len((tmp_path / "installations").read_text().splitlines())

    return run


def test_an_extra_adds_packages_without_building_again(
    install: Callable[..., int], tmp_path: Path
) -> None:
    installations = tmp_path / "installations"
    assert install() == 1 and "--editable ." in installations.read_text()
    assert install(extra="serve,word") == 2 == install(extra="serve,word")
    line = installations.read_text().splitlines()[-1]
    assert line.endswith("speculative_t5[serve,word]") and "--editable" not in line
    write(tmp_path / SOURCE, "changed\n")
    assert install(extra="serve,word") == 3, "built again, as the sources have changed"
    assert "--editable .[serve,word]" in installations.read_text().splitlines()[-1]
    assert install() == 3, "an extra has the package, too"


def test_the_demo_refuses_an_extra_that_there_is_not() -> None:
    for extra, found in ((["serv"], "'serv'"), ([], "''"), (["dependencies"], "'dependencies'")):
        done = subprocess.run(
            ["bash", "scripts/demo.sh", "--extra", *extra],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        check_message(done.stderr.strip().removeprefix("error: "), found)
        assert ", serve, " in done.stderr and ", test, " not in done.stderr.partition("serve")[0]


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


@pytest.fixture
def find(tmp_path: Path, install: Callable[..., int]) -> Callable[..., tuple[str, str]]:
    """Runs venv.sh where only some Pythons are; returns the one it chose, and its error."""
    shutil.move(tmp_path / ".venv" / "bin" / "python", tmp_path / "fake")
    shutil.rmtree(tmp_path / ".venv")
    (tmp_path / PACKAGES).mkdir(parents=True)
    bin = tmp_path / "bin"
    for tool in ("bash", "cat", "cp", "find", "head", "mkdir", "sort"):
        (bin / tool).parent.mkdir(exist_ok=True)
        (bin / tool).symlink_to(str(shutil.which(tool)))
    write(bin / "c++", "#!/bin/sh\necho >>compiled\n")
    write(bin / "xcode-select", "#!/bin/sh\nexit 2\n")  # no command line tools are installed

    def run(system: str, found: dict[str, str], named: str = "") -> tuple[str, str]:
        write(bin / "uname", f"#!/bin/sh\necho {system}\n")
        for name, what in found.items():
            write(bin / name, STUB.format(found=what))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "extra=; . scripts/venv.sh"],
            cwd=tmp_path, env={"PATH": str(bin), "PYTHON": named}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode == 0:
            assert done.stderr == "installing into .venv ...\n"
            assert (tmp_path / "compiled").exists() == (system == "Linux")
            return Path((tmp_path / "chosen").read_text().strip()).name, ""
        assert done.returncode == 2 and not (tmp_path / ".venv" / "bin").exists()
        assert not (tmp_path / "compiled").exists()
        (line,) = done.stderr.splitlines()
        return "", line.removeprefix("error: ")

    return run


OLD, ARM, INTEL = "3.9.6 arm64 False", "3.13.1 arm64 True", "3.13.1 x86_64 True"


@pytest.mark.parametrize(
    ("system", "found", "named", "chosen"),
    [
        ("Linux", {"python3": INTEL, "python3.14": INTEL}, "", "python3"),
        ("Linux", {"python3": OLD, "python3.12": INTEL, "python3.11": INTEL}, "", "python3.12"),
        ("Linux", {"python3": ARM, "mine": ARM}, "mine", "mine"),
        ("Linux", {"python3": "", "python3.11": ARM, "mine": OLD}, "mine", "python3.11"),
        ("Darwin", {"python3": INTEL, "python3.11": ARM}, "", "python3.11"),
    ],
)
def test_the_first_python_that_will_do_is_used(
    find: Callable[..., tuple[str, str]],
    system: str,
    found: dict[str, str],
    named: str,
    chosen: str,
) -> None:
    assert find(system, found, named) == (chosen, "")


@pytest.mark.parametrize(
    ("system", "found", "named", "said"),
    [
        ("Linux", {}, "", "found none: install one (apt-get install python3.11-venv)"),
        ("Linux", {"python3": OLD, "python3.11": ""}, "nowhere",
         "found nowhere (not found), python3 (3.9.6), python3.11 (does not run): install"),
        ("Darwin", {"python3": OLD, "python3.13": INTEL}, "/usr/bin/env",
         "Python 3.11 or newer for arm64 is needed, found /usr/bin/env (needs Apple's command line "
         "tools), python3 (3.9.6), python3.13 (3.13.1 for x86_64): install one "
         "(brew install python@3.13, python.org, or uv python install 3.13)"),
    ],
)  # fmt: skip
def test_where_no_python_will_do_the_error_says_why(
    find: Callable[..., tuple[str, str]], system: str, found: dict[str, str], named: str, said: str
) -> None:
    chosen, error = find(system, found, named)
    assert not chosen
    check_message(error, said)
