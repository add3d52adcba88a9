"""Where the texts of `document` come from, and where they go: files, folders, streams."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ..documents import (
    DOCUMENT_FORMATS,
    DOCUMENT_SUFFIXES,
    FILE_FORMATS,
    NO_TEXT,
    NOT_READ,
    FormatOptions,
    PlainFile,
    check_read,
    format_of,
    is_document,
    read_file,
    suffix_of,
)
from ..errors import count, escaped
from ..exchange import check_replaceable
from ..files import digest, is_special, open_input, private_mode
from . import terminal
from .options import output_option
from .terminal import note

DEFAULT_AUTHOR = "speculative-t5"  # of tracked changes
STANDARD_OUTPUT = "/dev/stdout"
NOT_FILES = (None, "-", STANDARD_OUTPUT)  # of outputs
PARTIAL_SUFFIX = ".partial.jsonl"
WORD_LOCK_PREFIX = "~$"  # how the names begin of files that Word makes beside open documents
FILE_NAME = re.compile(r"\S+\.[A-Za-z][A-Za-z0-9]{0,7}")  # a word alone that looks like one
MAX_SUFFIXES_NAMED = 5  # suffixes of files that are left alone


@dataclass(frozen=True)
class OutputOptions:
    """Where the texts and their differences go, and what becomes of what is there."""

    output: str | None = output_option(
        None,
        "File to write; of several files, the folder to write them into.",
        shown="standard output",
    )
    format: str | None = output_option(
        None,
        f"Format of FILE, whatever its name ends in: {', '.join(DOCUMENT_FORMATS)}.",
        shown="as FILE ends, or txt",
    )
    attributes: bool = output_option(
        False,
        "Read the attributes of HTML that people see or hear as well: alt, title, placeholder, "
        "aria-label, descriptions of the page.",
    )
    track_changes: bool = output_option(
        False, "Write what changes in documents of Word as tracked changes, to accept or reject."
    )
    author: str | None = output_option(
        None, "With --track-changes, whose changes they are.", shown=DEFAULT_AUTHOR
    )
    in_place: bool = output_option(False, "Write each file in its own place.")
    backup: bool = output_option(
        False, "With --in-place, keep the old file beside it, as FILE.bak."
    )
    check: bool = output_option(
        False, "Write nothing, and end with exit code 1 if a file would be changed."
    )
    review: bool = output_option(
        False, "Ask for each change, and for each that was held back, whether to make it."
    )
    diff: str | None = output_option(
        None, "Also show what changed: html writes a page, terminal prints lines."
    )
    diff_output: str | None = output_option(
        None, "Page to write with --diff html.", shown="OUTPUT.diff.html"
    )
    resume: bool = output_option(False, "Continue a stopped run, keeping the pieces that it did.")
    force: bool = output_option(
        False,
        "Replace OUTPUT, pages and backups; without --resume, drop the pieces of a stopped run.",
    )
    json: bool = output_option(
        False,
        "Print one JSON object for each file: all pieces that were kept or tried again, what they "
        "would have become and why, and the text if there is no OUTPUT.",
    )

    @property
    def reading(self) -> FormatOptions:
        """What is read of files beside their text."""
        author = self.author or DEFAULT_AUTHOR
        return FormatOptions(self.attributes, author if self.track_changes else None)

    def __post_init__(self) -> None:
        self._check_places()
        if self.resume and self.output in NOT_FILES and not self.in_place:
            raise ValueError("--resume continues a file: give its name with --output")
        if self.diff not in (None, "html", "terminal"):
            raise ValueError(f"--diff is {self.diff!r}, expected html or terminal")
        if self.diff != "html" and self.diff_output is not None:
            raise ValueError("--diff-output names a page: use it with --diff html")
        if self.format not in (None, *DOCUMENT_FORMATS):
            raise ValueError(
                f"--format must be one of {', '.join(DOCUMENT_FORMATS)}, got {self.format!r}"
            )
        self._check_author()
        if self.review and not all(map(terminal.is_terminal, (sys.stdin, sys.stdout))):
            raise ValueError(
                "--review asks on a terminal, and standard input or output is none: give --output"
            )

    def as_meant(self) -> Self:
        """Return the options with what they imply: - is no file, and --check shows lines."""
        output = None if self.output in NOT_FILES else self.output
        shows_lines = self.check and self.diff is None and not self.json
        diff = "terminal" if shows_lines else self.diff
        return replace(self, output=output, diff=diff)

    def _check_author(self) -> None:
        if self.author is None:
            return
        if not self.track_changes:
            raise ValueError("--author is of tracked changes: give --track-changes, too")
        if not self.author.strip() or not self.author.isprintable():
            raise ValueError(f"--author must be a name on one line, got {self.author!r}")

    def _check_places(self) -> None:
        """Refuse options that do not go together."""
        places = {
            "--output": self.output is not None,
            "--in-place": self.in_place,
            "--check": self.check,
        }
        given = [name for name, is_set in places.items() if is_set]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} say where the text goes: give one of them")
        if self.backup and not self.in_place:
            raise ValueError("--backup keeps what --in-place replaces: give both, or neither")
        if self.check and (self.review or self.diff == "html"):
            raise ValueError("--check writes nothing: leave out --review and --diff html")


@dataclass(frozen=True)
class Reading:
    """What was read of a file."""

    data: bytes
    found: os.stat_result
    form: PlainFile

    @property
    def key(self) -> str:
        return digest(self.data)


@dataclass(frozen=True)
class Target:
    """A file to read, and what is written for it."""

    source: str
    output: str | None  # None for standard output, or if nothing is written
    page: str | None
    form: str | None = None  # its format, if its name does not say it
    in_place: bool = False
    reading: FormatOptions = FormatOptions()

    @property
    def name(self) -> str:
        """The name to show."""
        return "standard input" if self.source == "-" else escaped(self.source)

    @property
    def place(self) -> Path:
        """The file to replace in its place: what a link leads to."""
        return Path(self.source).resolve()

    @property
    def backup(self) -> Path:
        return Path(f"{self.source}.bak")

    @property
    def has_backup_beside(self) -> bool:
        """Whether the old file can become the backup: a link may lead to another disk."""
        return self.backup.resolve().parent.stat().st_dev == self.place.parent.stat().st_dev

    def aside(self, *, backup: bool) -> Path:
        """Return where the old file is, at least for a moment, when it is replaced in its place."""
        return self.backup if backup else self.place.with_name(f".{self.place.name}.replaced")

    def read(self) -> Reading:
        """Read the file; refuse what is no document, or cannot be replaced where it is to be."""
        if self.source != "-" and Path(self.source).is_dir():  # one that could not be listed
            os.listdir(self.source)
        if self.in_place:
            check_replaceable(self.place)
        with open_input(self.source) as stream:
            data, found = stream.read(), os.fstat(stream.fileno())
        return Reading(data, found, read_file(data, self.name, self.form, self.reading))

    def stat(self) -> os.stat_result:
        """Return what the system says of the file."""
        return stat_of(self.source)

    def mode(self, path: str | Path, found: os.stat_result) -> int:
        """Return the mode of a file that is made of this one."""
        return private_mode(path, [found])


@dataclass(frozen=True)
class TypedText(Target):
    """A text that was typed where names of files may stand, and what is written for it."""

    text: str = ""

    @property
    def name(self) -> str:
        return "the text"

    def read(self) -> Reading:
        data = self.text.encode()
        return Reading(data, self.stat(), PlainFile(data, self.name))

    def stat(self) -> os.stat_result:
        """Return what the system says of a file that everybody may read, as a text has none."""
        return os.stat(os.devnull)


def given_words(words: list[str] | None, command: str) -> list[str]:
    """Return what was given to a command; where that is nothing, - for standard input.

    Raises:
        ValueError: If nothing was given, and standard input is a terminal.
    """
    if words:
        return words
    if terminal.is_terminal(sys.stdin):
        raise ValueError(
            f"{command} was given nothing: give a text in quotation marks, or names of files"
        )
    return ["-"]


def text_of(words: Sequence[str]) -> str | None:
    """Return the text that was typed in the place of names of files; None if they are names.

    Raises:
        ValueError: If some are names of files and others are not, or if one looks like the name of
            a file that is not there.
    """
    here = [word for word in words if word == "-" or os.path.exists(word)]
    others = [word for word in words if word not in here]
    if not others:
        return None
    if here:
        raise ValueError(
            f"{here[0]} is a file or folder here, and {others[0]} is none: give files, or one text "
            "in quotation marks"
        )
    for word in others:
        is_known = is_document(word) or Path(word).suffix.lower() in NOT_READ
        looks_like_one = len(words) == 1 and (FILE_NAME.fullmatch(word) or os.sep in word)
        if (is_known or looks_like_one) and len(word.split()) == 1:
            raise ValueError(f"{word} is no file or folder: check its name, or write it in a text")
    return " ".join(others)


def stat_of(source: str) -> os.stat_result:
    """Return what the system says of a file, or of standard input."""
    if not source:
        raise ValueError("the input must be the name of a file, or -, got ''")
    return os.fstat(0) if source == "-" else os.stat(source)


def partial_file_of(sources: Sequence[str], files: OutputOptions) -> Path | None:
    """Return where pieces are kept: beside the output, or in a folder that is changed in place."""
    name = sources[0] if files.in_place else files.output
    if not name or (is_special(name) and not Path(name).is_dir()):
        if files.resume and name:
            raise ValueError(f"--resume continues a file, which {name} is not: leave it out")
        return None
    place = Path(name).resolve()
    is_inside = files.in_place and Path(name).is_dir()
    found = place / PARTIAL_SUFFIX if is_inside else Path(f"{place}{PARTIAL_SUFFIX}")
    if found.exists() and found.stat().st_size and not (files.resume or files.force):
        raise ValueError(
            f"{found} holds the pieces of an earlier run: use --resume to continue after them, or "
            "--force to start over"
        )
    return found


def find_targets(sources: Sequence[str], files: OutputOptions) -> list[Target]:
    """Find all files, without reading them; refuse what cannot be written where it is to go."""
    left: list[Path] = []
    found = [each for source in sources for each in _found_at(source, files, left)]
    several = is_several(sources, found)
    _check_several_files(len(found), several, files)
    targets: dict[str, Target] = {}
    for source, name in found:
        target = _target_of(source, name, files, several=several)
        place = target.output or source
        if (key := os.path.realpath(place)) in targets:
            raise ValueError(f"{place} would be written twice: give each file once")
        _check_places(target, files)
        targets[key] = target
    _note_others(left)
    return [*targets.values()]


def _note_others(left: Sequence[Path]) -> None:
    """Say how many files of folders are left alone, and what their names end in."""
    others = Counter(sorted(path.suffix.lower() or "no suffix" for path in left))
    if others:
        kinds = ", ".join(suffix for suffix, _ in others.most_common(MAX_SUFFIXES_NAMED))
        more = ", ..." if len(others) > MAX_SUFFIXES_NAMED else ""
        note(f"{count(len(left), 'file')} left alone, as they are no documents ({kinds}{more})")


def text_target(text: str, files: OutputOptions) -> TypedText:
    """Return the target for a text that was typed."""
    if files.in_place or files.format is not None:
        raise ValueError(
            f"{'--in-place' if files.in_place else '--format'} is for files, and a text was given: "
            "leave it out"
        )
    target = TypedText("", files.output, _page_of(files.output, files), text=text)
    _check_places(target, files)
    return target


def is_several(sources: Sequence[str], found: Sequence[object]) -> bool:
    """Whether there may be several files; a folder counts as several, also if it has but one."""
    return len(found) > 1 or any(source and Path(source).is_dir() for source in sources)


def _found_at(source: str, files: OutputOptions, left: list[Path]) -> list[tuple[str, str]]:
    """Return a file, or those of a folder, each with its name below the folder."""
    if not stat.S_ISDIR(stat_of(source).st_mode):
        check_read(source, files.format, files.reading)
        return [(source, Path(source).name)]
    if files.format is not None:
        raise ValueError(
            f"{source} is a folder, whose files have the formats that their names say: leave out "
            "--format"
        )
    inner = [*_inner(Path(source), left, links=files.output is not None)]
    if not inner:
        raise ValueError(
            f"{source} is a folder without documents: give one with files that end in "
            f"{', '.join(DOCUMENT_SUFFIXES)}"
        )
    return [(str(path), str(path.relative_to(source))) for path in inner]


def _inner(folder: Path, left: list[Path], *, links: bool) -> Iterator[Path]:
    """Yield the documents in a folder in order: no hidden ones, nor the files of Word's locks.

    Links to files are followed with `links`; otherwise they are left alone, as what they lead to
    may be anywhere, and a note says so. Links to folders are never followed. Files that are no
    documents are added to `left`.
    """
    found = []
    faults = list[OSError]()
    for place, folders, names in os.walk(folder, onerror=faults.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(place) / name for name in names if not name.startswith((".", WORD_LOCK_PREFIX))
        ]
    left.extend(path for path in found if not is_document(str(path)))
    for path in sorted(path for path in found if is_document(str(path))):
        if path.is_symlink() and not links:
            note(f"{path}: a link, which is left alone; give its own name to follow it")
        elif path.is_file():
            yield path
    yield from (Path(error.filename) for error in faults)  # `Target.read` says what is wrong


def _check_several_files(number: int, several: bool, files: OutputOptions) -> None:
    if not several:
        return
    if files.output is None and not (files.in_place or files.check):
        raise ValueError(
            f"{count(number, 'file')} cannot go to standard output: give --output FOLDER, "
            "--in-place or --check"
        )
    if files.diff_output:
        raise ValueError("--diff-output names one page, and there are several files: leave it out")


def _target_of(source: str, name: str, files: OutputOptions, *, several: bool) -> Target:
    place = files.output
    if place and (several or Path(place).is_dir()):
        place = str(Path(place) / name)
    if files.in_place:
        if source == "-":
            raise ValueError("standard input has no place to write to: leave out --in-place")
        place = source
    page = _page_of(place, files)
    return Target(source, place, page, files.format, files.in_place, files.reading)


def _page_of(output: str | None, files: OutputOptions) -> str | None:
    if files.diff != "html":
        return None
    if files.diff_output is None and (output is None or is_special(output)):
        raise ValueError("--diff html writes a page: give its name with --diff-output")
    page = files.diff_output if files.diff_output is not None else f"{output}.diff.html"
    names = page, output or STANDARD_OUTPUT  # which need not exist yet
    is_same = len({*map(os.path.realpath, names)}) == 1
    if is_same or (all(map(os.path.exists, names)) and os.path.samefile(*names)):
        raise ValueError(f"{page} is the output itself: give another name with --diff-output")
    return page


def _check_places(target: Target, files: OutputOptions) -> None:
    """Refuse to write over what is there, without being asked, or under a name that misleads."""
    read, force = target.stat(), files.force or files.resume
    output = None if target.in_place else target.output
    for written in filter(lambda each: each is not None, (output, target.page)):
        check_target(str(written), read, force=force, parents=written != files.output)
    if files.backup:  # of a run that goes on, the command looks at them file by file
        check_target(str(target.backup), read, force=force)
    if output is not None and not is_special(output):
        _check_format(target, output)


def _check_format(target: Target, output: str) -> None:
    """Refuse an output whose name says that it is in another format than the source."""
    own, suffix = format_of(target.source, target.form), Path(output).suffix.lower()
    claimed = format_of(output)
    is_other = suffix in NO_TEXT or (not is_document(output) and FILE_FORMATS[own].is_binary)
    differs = own != claimed and {own, claimed} != {"md", "txt"}
    if is_other or (is_document(output) and differs):
        raise ValueError(
            f"{output} would be in the format of {target.name}, which is {own}: give --output a "
            f"name that ends in {suffix_of(own)}"
        )


def check_target(name: str, read: os.stat_result, *, force: bool, parents: bool = False) -> None:
    """Refuse to write a file over the one that is `read`, or without `force` over anything else.

    Its folder must exist, unless its `parents` may be made.
    """
    if not name:
        raise ValueError(f"the output must be the name of a file, got {name!r}")
    try:
        found = os.stat(name)
    except FileNotFoundError:
        if not parents:
            Path(name).resolve().parent.stat()
        return
    if stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{name} is a folder, expected the name of a file to write")
    if not stat.S_ISREG(found.st_mode):
        return
    if os.path.samestat(found, read):
        raise ValueError(f"the output {name} is the input itself: give another name")
    if not force:
        raise ValueError(f"{name} exists: use --force to replace it, or give another name")
