"""Tables, of CSV and of Parquet: read row by row, and made of JSON Lines.

Imports `errors` alone; pyarrow is imported where there is Parquet.
"""

import codecs
import csv
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from .errors import first_line, not_utf8

TABLES = {".csv": ",", ".tsv": "\t", ".parquet": ""}  # what is between cells, by suffix
DELIMITERS = (",", ";", "\t", "|")  # that a .csv may have, the likeliest first
LOOKED_AT = 1000  # lines in which two rows have to end, to see which it has
MAX_CELL = 2**24  # characters; behind a quote that nothing closes, all is one cell
READ_AT_ONCE, WRITTEN_AT_ONCE = 1000, 2**24  # rows of Parquet, and bytes of JSON Lines
# The type in Parquet of a column whose values are of these types; any other column is text.
PARQUET_TYPES = {(bool,): "bool", (int,): "int64", (float,): "double", (float, int): "double"}


def pyarrow() -> Any:
    """Return the library that knows Parquet, or say how to install it."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ValueError(
            "a table of Parquet needs pyarrow, which is not installed: run pip install "
            "'speculative-t5[tables]'"
        ) from error
    return pyarrow


def read_rows(stream: BinaryIO, suffix: str, delimiter: str | None = None) -> Iterator[bytes]:
    """Yield the rows of an open file as JSON Lines; what is no table is a ValueError.

    Cells of CSV are text, as they stand there, and so is what JSON lacks in Parquet, such as dates.
    The `delimiter` is what stands between cells: by default a tab in .tsv, and in .csv that of
    `DELIMITERS` by which the first two rows have the same number of cells, and more than one.
    """
    if suffix == ".parquet":
        rows = _read_parquet(stream)
    else:
        rows = _read_csv(stream, delimiter or (TABLES[suffix] if suffix != ".csv" else None))
    try:
        names = next(rows)
        if len(set(names)) < len(names):
            twice = max(names, key=names.count)
            raise ValueError(f"two columns are called {twice!r}: give one of them another name")
        for row in rows:
            record = dict(zip(names, row, strict=True))
            yield json.dumps(record, ensure_ascii=False, default=_as_cell_text).encode() + b"\n"
    except ValueError as error:
        raise ValueError(f"{stream.name or 'standard input'}: {error}") from error


def _as_cell_text(value: Any) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _read_csv(stream: BinaryIO, delimiter: str | None) -> Iterator[list[str]]:
    """Yield the header, and then the rows; empty lines are none."""
    csv.field_size_limit(MAX_CELL)
    text, width = Lines(codecs.iterdecode(stream, "utf-8-sig")), 0  # line by line
    delimiter = delimiter or text.delimiter()
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        for row in filter(None, reader):
            width = width or len(row)
            if len(row) != width:
                raise ValueError(f"the number of cells is {len(row)}, expected {width}")
            yield row
    except UnicodeDecodeError as error:
        raise ValueError(f"line {reader.line_num + 1} is {not_utf8(error)}") from error
    except (csv.Error, ValueError) as error:
        raise ValueError(
            f"line {reader.line_num} cannot be read ({first_line(error)}): put cells that have "
            f"{delimiter!r}, quotes or ends of lines in quotes, and double the quotes in them"
        ) from error
    if not width:
        raise ValueError("it is empty, expected a line with the names of the columns")


class Lines:
    """The lines of a text, of which the first may be looked at before they are read."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines, self._seen = lines, list[str]()
        self._fault: UnicodeDecodeError | None = None

    def __iter__(self) -> Iterator[str]:
        yield from self._seen
        if self._fault:  # a generator that has failed would only end
            raise self._fault
        self._seen.clear()
        yield from self._lines

    def _first(self) -> Iterator[str]:
        """Yield the first lines, and keep them."""
        for i in range(LOOKED_AT):
            if i == len(self._seen):
                try:
                    line = next(self._lines, None)
                except UnicodeDecodeError as error:
                    self._fault = error
                if self._fault or line is None:
                    return
                self._seen.append(line)
            yield self._seen[i]

    def delimiter(self) -> str:
        """Return what stands between cells.

        That is the first delimiter by which two rows have several cells, and as many; else one
        that parts the header, before a row whose quotes do not close; else a comma.
        """
        unclosed = []
        for delimiter in DELIMITERS:
            reader = filter(None, csv.reader(self._first(), delimiter=delimiter, strict=True))
            width = 0
            try:
                width = len(next(reader, []))
                if width > 1 and len(next(reader, [""] * width)) == width:
                    return delimiter
            except csv.Error:
                unclosed += [delimiter] * (width > 1)
        return (*unclosed, ",")[0]


def _read_parquet(stream: BinaryIO) -> Iterator[Any]:
    """Yield the names of the columns, and then the rows."""
    library = pyarrow()
    try:
        file = library.parquet.ParquetFile(stream)
    except (library.ArrowException, OSError) as error:
        raise ValueError(
            f"it cannot be read as Parquet ({first_line(error)}): give the name of a file that can"
        ) from error
    yield file.schema_arrow.names
    for batch in file.iter_batches(READ_AT_ONCE):
        is_time = library.types.is_temporal
        columns = [each.cast("string") if is_time(each.type) else each for each in batch.columns]
        yield from zip(*(column.to_pylist() for column in columns), strict=True)


def write_table(
    path: Path, suffix: str, records: Path, first: Collection[str], without: Collection[str]
) -> None:
    """Make a table of a file of JSON Lines, with these columns first, and without others.

    Values that are no text are JSON in CSV. In Parquet a column of booleans, integers or numbers
    keeps their type, and any other is as in CSV.
    """
    kinds = _column_types(records, first, without)
    if TABLES[suffix]:
        _write_csv(path, TABLES[suffix], records, kinds)
    else:
        _write_parquet(path, records, kinds)


def _row_groups(records: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the objects of a file of JSON Lines, some at a time."""
    with records.open("rb") as file:
        while lines := file.readlines(WRITTEN_AT_ONCE):
            yield [json.loads(line) for line in lines]


def _column_types(
    records: Path, first: Collection[str], without: Collection[str]
) -> dict[str, str]:
    """Return the columns in their order, each with its type in Parquet."""
    found: dict[str, set[type]] = {name: set() for name in first}
    for row in chain.from_iterable(_row_groups(records)):
        for name, value in row.items():
            if value is not None:
                is_large = type(value) is int and abs(value) >= 2**63
                found.setdefault(name, set()).add(str if is_large else type(value))
    return {
        name: PARQUET_TYPES.get(tuple(sorted(types, key=str)), "string")
        for name, types in found.items()
        if name not in without
    }


def _write_csv(path: Path, delimiter: str, records: Path, columns: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter=delimiter)
        table.writerow(_cell(name) for name in columns)
        for row in chain.from_iterable(_row_groups(records)):
            table.writerow(_cell(row.get(name)) for name in columns)


def _write_parquet(path: Path, records: Path, kinds: Mapping[str, str]) -> None:
    library, names = pyarrow(), [_cell(name) for name in kinds]
    schema = library.schema(list(zip(names, kinds.values(), strict=True)))
    with library.parquet.ParquetWriter(str(path), schema) as writer:
        for group in _row_groups(records):
            cells = [[_cell(row.get(name), kinds[name]) for row in group] for name in kinds]
            arrays = list(map(library.array, cells, kinds.values()))
            writer.write_batch(library.record_batch(arrays, schema=schema))


def _cell(value: Any, kind: str = "string") -> Any:
    """Return a value as one of this type; half a surrogate pair is escaped."""
    if value is None or kind in ("bool", "int64"):
        return value
    if kind == "double":
        return float(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()
