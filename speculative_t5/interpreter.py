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
    """Whether the program is `python -m speculative_t5`, convert.py or one in scripts."""
    if sys.argv[:1] == ["-m"]:  # while the module to run is looked for
        return True
    script = getattr(sys.modules["__main__"], "__file__", None)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return script is not None and os.path.abspath(script).startswith(os.path.join(root, ""))
