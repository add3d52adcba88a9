"""What a Python is told that cannot run the package: an older one, or one without its dependencies.

An older one has to be able to read this file: no newer syntax here.
"""

import os
import sys

NEEDED = (3, 11)  # as in pyproject.toml, which pip reads; a checkout also runs without pip


def refuse_old() -> None:
    """End a program of this repository with one line; for others, refuse to be imported.

    Raises:
        SystemExit: With code 2, after the line.
        ImportError: In a program, a notebook or an interpreter of the user's own.
    """
    found, needed = ".".join(map(str, sys.version_info[:3])), ".".join(map(str, NEEDED))
    message = (
        f"speculative_t5 needs Python {needed} or newer, and {sys.executable} is {found}: run it "
        "with a newer one, such as that of .venv, which scripts/demo.sh makes (docs/installing.md)"
    )
    if not _is_ours():
        raise ImportError(message)
    _end(message)


def explain_missing(error: ImportError) -> None:
    """End a program of this repository with one line if a dependency is not installed."""
    if _is_ours():
        _end(
            f"{error.name} is not installed for {sys.executable}: run scripts/demo.sh, which makes "
            ".venv, and then . .venv/bin/activate (docs/installing.md)"
        )


def _end(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(2)


def _is_ours() -> bool:
    """Whether the program is `python -m speculative_t5`, its command, or one of a checkout."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        return _is_found_by_runpy()
    if os.path.splitext(os.path.basename(script))[0] == "speculative-t5":
        return True
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not os.path.exists(os.path.join(root, "pyproject.toml")):  # in site-packages, beside others
        return False
    ours = (os.path.join(root, "convert.py"), os.path.join(root, "scripts", ""))
    return bool(os.path.abspath(script).startswith(ours))


def _is_found_by_runpy() -> bool:
    """Whether `python -m` imports the package itself, not a program that imports it in turn."""
    frame = sys._getframe(1)
    own = (__name__, __name__.rpartition(".")[0])
    while True:
        name = frame.f_globals.get("__name__", "")
        if name not in own and not name.startswith("importlib"):
            return bool(name == "runpy")
        if frame.f_back is None:
            return False
        frame = frame.f_back
