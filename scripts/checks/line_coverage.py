r"""Say which lines of some modules a script runs.

    python scripts/checks/line_coverage.py speculative_t5.documents.marks -- \
        scripts/checks/random_documents.py docx --count 500

It is slower than the script alone, as each line of these modules is seen.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


def _lines_of(code: CodeType) -> Iterator[int]:
    """Yield the lines of a compiled file and of all functions in it."""
    yield from (line for _, _, line in code.co_lines() if line)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _lines_of(inner)


def main(modules: list[str], script: list[str]) -> None:
    places = {find_spec(name).origin: name for name in modules}  # type: ignore[union-attr]
    run: dict[str, set[int]] = {str(place): set() for place in places}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        found = run.get(frame.f_code.co_filename)
        if found is None:
            return None
        found.add(frame.f_lineno)
        return trace

    sys.argv = script
    sys.path.insert(0, str(Path(script[0]).parent))
    sys.settrace(trace)
    try:
        runpy.run_path(script[0], run_name="__main__")
    finally:
        sys.settrace(None)
        for place, name in places.items():
            code = compile(Path(str(place)).read_text(), str(place), "exec")
            lines = {*_lines_of(code)}
            missed = sorted(lines - run[str(place)])
            print(f"{name}: {len(lines) - len(missed)} of {len(lines)} lines; not run: {missed}")


if __name__ == "__main__":
    divider = sys.argv.index("--")
    main(sys.argv[1:divider], sys.argv[divider + 1 :])
