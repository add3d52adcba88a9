"""Which files are read, by what their names end in, and which are refused, with what to do.

Readers are imported when a file of their format is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import cast

from .formats import FormatOptions, PlainFile


@dataclass(frozen=True)
class FileFormat:
    """A format of files that are read."""

    module: str  # of this room, and the class in it
    reader: str
    suffixes: tuple[str, ...]  # the first is the one to propose
    names: tuple[str, ...] = ()  # whole names, where a suffix is that of other files as well
    is_binary: bool = False
    options: tuple[str, ...] = ()  # names of `FormatOptions` that the reader takes


FILE_FORMATS = {
    "txt": FileFormat("formats", "PlainFile", (".txt",)),
    "md": FileFormat("formats", "PlainFile", (".md", ".markdown")),
    "srt": FileFormat("subtitles", "Subtitles", (".srt",)),
    "vtt": FileFormat("subtitles", "Subtitles", (".vtt",)),
    "html": FileFormat("web", "WebPage", (".html", ".htm"), options=("attributes",)),
    "docx": FileFormat("word", "WordFile", (".docx",), is_binary=True),
}
READ_TEXT_ALONE = FormatOptions()
DOCUMENT_FORMATS = tuple(FILE_FORMATS)
DOCUMENT_SUFFIXES = tuple(suffix for form in FILE_FORMATS.values() for suffix in form.suffixes)
# Formats that people have texts in and that are not read, and what to do about each.
_AS_PLAIN = "give --format txt to read it as plain text, marks included"
_AS_WORD = "save it as .docx"
NOT_READ = {
    ".doc": _AS_WORD,
    ".dot": _AS_WORD,
    ".odt": _AS_WORD,
    ".rtf": _AS_WORD,
    ".pages": _AS_WORD,
    ".docm": _AS_WORD,
    ".pdf": f"{_AS_WORD}, or its text as .txt",
    ".epub": "give the .html files in it, once it is unpacked",
    ".pptx": "give its text as .txt or .docx",
    ".ppt": "give its text as .txt or .docx",
    ".odp": "give its text as .txt or .docx",
    ".xlsx": "save the sheet as .csv, and use `batch` for a column of it",
    ".xls": "save the sheet as .csv, and use `batch` for a column of it",
    ".ods": "save the sheet as .csv, and use `batch` for a column of it",
    ".csv": "use `batch` for a column of a table",
    ".tsv": "use `batch` for a column of a table",
    ".jsonl": "use `batch` for a field of its records",
    ".parquet": "use `batch` for a column of a table",
    ".json": _AS_PLAIN,
    ".xml": _AS_PLAIN,
    ".yaml": _AS_PLAIN,
    ".yml": _AS_PLAIN,
    ".rst": _AS_PLAIN,
    ".tex": _AS_PLAIN,
    ".adoc": _AS_PLAIN,
    ".org": _AS_PLAIN,
}


def format_of(name: str, form: str | None = None) -> str:
    """Return the format of a file: the one given, or the one that its name says, else txt."""
    return form or _known_format(name) or "txt"


def is_document(name: str) -> bool:
    """Whether the name of a file says a format that is read."""
    return _known_format(name) is not None


def suffix_of(form: str) -> str:
    """Return what the names of files of a format end in."""
    return FILE_FORMATS[form].suffixes[0]


def check_read(
    name: str, form: str | None = None, options: FormatOptions = READ_TEXT_ALONE
) -> None:
    """Refuse a file whose name says a format that is not read, unless a format is given.

    Options that its format does not have are refused, too.

    Raises:
        ValueError: With what to do instead.
    """
    suffix = Path(name).suffix.lower()
    if form is None and not is_document(name) and suffix in NOT_READ:
        raise ValueError(f"{name} is a {suffix} file, which is not read: {NOT_READ[suffix]}")
    found = format_of(name, form)
    for option in fields(options):
        if getattr(options, option.name) and option.name not in FILE_FORMATS[found].options:
            having = [each for each, known in FILE_FORMATS.items() if option.name in known.options]
            raise ValueError(
                f"--{option.name} is for {', '.join(having)}, and {name} is read as {found}: leave "
                f"out --{option.name}"
            )


def read_file(
    data: bytes,
    name: str,
    form: str | None = None,
    options: FormatOptions = READ_TEXT_ALONE,
) -> PlainFile:
    """Return the document in a file, in the format given, or that its name says.

    Of the options, those are used that the format has; `check_read` refuses others.

    Raises:
        ValueError: If the bytes are none of that format.
    """
    if not data:
        return PlainFile(data, name)
    found = FILE_FORMATS[format_of(name, form)]
    module = import_module(f".{found.module}", __package__)
    reader = cast(Callable[..., PlainFile], getattr(module, found.reader))
    return reader(data, name, **{each: getattr(options, each) for each in found.options})


def _known_format(name: str) -> str | None:
    path = Path(name)
    suffix = path.suffix.lower()
    for form, known in FILE_FORMATS.items():
        if suffix in known.suffixes or path.name in known.names:
            return form
    return None
