"""What `document` has done so far: pieces, and which files are written, in a file of lines."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..errors import count
from ..exchange import recover
from ..files import LineFile, digest, json_line, json_object
from . import terminal
from .targets import OutputOptions, Target
from .terminal import note

PIECE_FIELDS = (  # of a piece
    "line",
    "start",
    "output",
    "reason",
    "refused",
    "retried",
    "surest",
    "written",
)

Header = dict[str, Any]


@dataclass(frozen=True)
class Begun:
    """A file that is about to be replaced in its place, or was when the process was killed."""

    key: str  # digest of the text that was read
    done: str  # and of the one that replaces it
    aside: str  # the name of the file that has the old text, at least for a moment


class PartialFile(LineFile):
    """The pieces done so far, a line of JSON each, in NAME.partial.jsonl, see `partial_file_of`.

    There is one for all files of a run. A file is done if it has the digest that was kept before it
    was written, so that it need not be known which was last when the run was killed. Of a file in
    its place it is also kept when its replacement begins and when that has ended, see `Begun`.

    It is removed when the block (`with`) is done, unless a file was not written (`stays`), or ends
    before any piece was kept; otherwise it stays, and a note says so. Pieces of an earlier run are
    dropped with `force`, and otherwise taken over; a file with another `header` is refused, whose
    names are words for a message.
    """

    def __init__(
        self, path: Path, header: Header, files: OutputOptions, *, mode: int = 0o666
    ) -> None:
        self.path = path
        super().__init__(path, ", or give another --output", mode=mode)
        self._header, self._files = header, files
        self.earlier: dict[str, list[Header]] = {}  # pieces of an earlier run, by file
        self.count = 0  # pieces in the file
        self.stays = False
        self._done: set[str] = set()  # digests of what was written
        self._begun: dict[str, Begun] = {}  # by the name of the file

    def is_done(self, target: Target) -> bool:
        """Whether an earlier run has written a file; refuse to replace another one."""
        if target.output is None or not os.path.isfile(target.output):
            return False
        if digest(Path(target.output).read_bytes()) in self._done:
            return True
        if not (self._files.force or self._files.in_place):
            raise ValueError(
                f"{target.output} exists: use --force to replace it, or give another name"
            )
        return False

    def begin(self, path: Path, aside: Path, key: str, done: str) -> None:
        """Keep that a file in its place is about to be replaced."""
        self._append_begun(self._name_of(path), Begun(key, done, self._name_of(aside)))

    def end(self, path: Path) -> None:
        """Keep that a file in its place was replaced, or stays as it is."""
        self.append_bytes(json_line({"ended": self._name_of(path)}))
        self._begun.pop(self._name_of(path), None)

    def recover(self, target: Target) -> None:
        """Finish what an earlier run has begun with a file in its place, and not ended."""
        path = target.place
        if found := self._begun.get(self._name_of(path)):
            # No other name is believed, as the file of pieces may come from elsewhere.
            asides = {self._name_of(target.aside(backup=keep)): keep for keep in (False, True)}
            if found.aside not in asides:
                raise self._no_piece()
            aside, keep = self.path.parent / found.aside, asides[found.aside]
            recover(path, aside, found.done, found.key, keep=keep)
            self.end(path)

    def _append_begun(self, name: str, begun: Begun) -> None:
        record = {"begins": name, "file": begun.key, "done": begun.done, "aside": begun.aside}
        self.append_bytes(json_line(record), sync=True)

    def _name_of(self, path: Path) -> str:
        return os.path.relpath(path, self.path.parent)

    def opened(self) -> None:
        """Take over the pieces of an earlier run, or write the first line."""
        try:
            self.narrow(self._mode)
            self._take_over()
            if not self.size:
                self.append_bytes(json_line(self._header))
                for name, begun in self._begun.items():  # of a run that is started over
                    self._append_begun(name, begun)
        finally:
            if not self.size:
                self.path.unlink(missing_ok=True)

    def _take_over(self) -> None:
        if self._files.force and not self._files.resume:
            self._read_begun(self.lines())
            self.cut(0)
        lines = self.lines()
        first = next(lines, b"")
        found, end = json_object(first), len(first)
        for name, value in self._header.items():
            if first and found.get(name) != value:
                raise ValueError(
                    f"{self.path} is from a run with another {name}: use the same as that run, or "
                    "--force without --resume to start over"
                )
        for raw in takewhile(lambda raw: raw.endswith(b"\n"), lines):
            self._take(json_object(raw))
            end += len(raw)
        self.cut(end)

    def _take(self, record: Header) -> None:
        """Take over one record."""
        if not _is_text(record):
            raise self._no_piece()
        if record.keys() == {"file", "end", *PIECE_FIELDS} and _is_output(record["written"]):
            self.earlier.setdefault(record["file"], []).append(record)
            self.count += 1
        elif record.keys() == {"file", "done"}:
            self._done.add(record["done"])
        elif not self._take_step(record):
            raise self._no_piece()

    def _no_piece(self) -> ValueError:
        return ValueError(
            f"{self.path} holds a line that is not a piece: use --force without --resume "
            "to start over"
        )

    def _take_step(self, record: Header) -> bool:
        """Take over what was begun or ended; return whether the record is of that."""
        if record.keys() == {"begins", "file", "done", "aside"}:
            names = ("file", "done", "aside")
            self._begun[record["begins"]] = Begun(*(record[name] for name in names))
        elif record.keys() == {"ended"}:
            self._begun.pop(record["ended"], None)
        else:
            return False
        return True

    def _read_begun(self, lines: Iterable[bytes]) -> None:
        """Of a run that is to be started over, find out which files it had begun to replace."""
        for record in filter(_is_text, map(json_object, lines)):
            self._take_step(record)

    def append(self, piece: Header) -> None:
        with terminal.signals_held():
            self.append_bytes(json_line(piece))
            self.count += "start" in piece

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.count or (kind is None and not self.stays):
            self.path.unlink(missing_ok=True)
        else:
            done = count(self.count, "piece")
            note(f"the work so far ({done}) is kept; --resume continues from there")
        super().__exit__(kind)


def _is_text(record: Header) -> bool:
    """Whether names of files and digests in a record are texts."""
    names = ("file", "done", "begins", "ended", "aside")
    return all(isinstance(record.get(name, ""), str) for name in names)


def _is_output(found: Any) -> bool:
    """Whether a record of an output is one, or there is none."""
    kinds = [type(each) for each in found] if isinstance(found, list) else []
    return found is None or kinds == [str, list, list]
