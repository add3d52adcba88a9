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
    # Whole names, perhaps with a folder, where a suffix is that of other files as well.
    names: tuple[str, ...] = ()
    is_binary: bool = False
    options: tuple[str, ...] = ()  # names of `FormatOptions` that the reader takes


FILE_FORMATS = {
    "txt": FileFormat("formats", "PlainFile", (".txt",)),
    "md": FileFormat("markdown", "MarkdownFile", (".md", ".markdown")),
    "srt": FileFormat("cue_files", "Subtitles", (".srt",)),
    "vtt": FileFormat("cue_files", "Subtitles", (".vtt",)),
    "ass": FileFormat("cue_files", "SubStation", (".ass", ".ssa")),
    "lrc": FileFormat("cue_files", "Lyrics", (".lrc",)),
    "html": FileFormat("web", "WebPage", (".html", ".htm"), options=("attributes",)),
    "docx": FileFormat("word", "WordFile", (".docx",), is_binary=True, options=("track_changes",)),
    "po": FileFormat("catalogs", "Catalog", (".po", ".pot")),
    "android": FileFormat(
        "app_strings",
        "AndroidStrings",
        (),
        names=("strings.xml", "values*/plurals.xml", "values*/arrays.xml"),
    ),
    "strings": FileFormat("app_strings", "AppleStrings", (".strings",)),
    "xcstrings": FileFormat("string_catalogs", "StringCatalog", (".xcstrings",)),
    "ipynb": FileFormat("notebook", "Notebook", (".ipynb",)),
}
DOCUMENT_NAMES = tuple(  # that say a format as a whole, whatever folder the file is in
    name for form in FILE_FORMATS.values() for name in form.names if "/" not in name
)
READ_TEXT_ALONE = FormatOptions()
DOCUMENT_FORMATS = tuple(FILE_FORMATS)
DOCUMENT_SUFFIXES = tuple(suffix for form in FILE_FORMATS.values() for suffix in form.suffixes)
# Formats that people have texts in and that are not read, and what to do about each: those that are
# no text, so that text under such a name would be a broken file, and those that are.
_AS_WORD = "save it as .docx"
_AS_TEXT = "give its text as .txt or .docx"
_AS_SHEET = "save the sheet as .csv, and use `batch` for a column of it"
_AS_TABLE = "use `batch` for a column of a table"
_AS_PLAIN = "name it .txt, or give --format txt, to read it as plain text, marks included"
NO_TEXT = {
    **dict.fromkeys((".doc", ".dot", ".docm", ".odt", ".rtf", ".pages"), _AS_WORD),
    ".pdf": f"{_AS_WORD}, or its text as .txt",
    ".epub": "give the .html files in it, once it is unpacked",
    **dict.fromkeys((".pptx", ".ppt", ".odp"), _AS_TEXT),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), _AS_SHEET),
    ".parquet": _AS_TABLE,
}
NOT_READ = NO_TEXT | {
    **dict.fromkeys((".csv", ".tsv"), _AS_TABLE),
    ".jsonl": "use `batch` for a field of its records",
    **dict.fromkeys((".json", ".xml", ".yaml", ".yml", ".rst", ".tex", ".adoc", ".org"), _AS_PLAIN),
}


def format_of(name: str, form: str | None = None) -> str:
    """Return the format of a file: the one given, or the one that its name says, else txt."""
    return form or _known_format(name) or "txt"


def is_document(name: str) -> bool:
    """Whether the name of a file says a format that is read."""
    return _known_format(name) is not None


def suffix_of(form: str) -> str:
    """Return what the names of files of a format end in."""
    known = FILE_FORMATS[form]
    return (*known.suffixes, *known.names)[0]


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
            flag = f"--{option.name.replace('_', '-')}"
            raise ValueError(
                f"{flag} is for {', '.join(having)}, and {name} is read as {found}: "
                f"leave out {flag}"
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
        if suffix in known.suffixes or any(map(path.match, known.names)):
            return form
    return None
