"""Tables as input and output of `batch`: what is read, what is refused, and what a kill leaves."""

import csv
import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from time import sleep
from typing import Any
from uuid import UUID

from speculative_t5 import tables
from speculative_t5.cli.job import RecordFile
from speculative_t5.files import open_input
from speculative_t5.tokenizers import Line, Shard, count_lines, read_lines

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import Call, start

# Outputs of commands are compared with those of others.
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
MODELS = ("--model", "target", "--draft-model", "draft", "--max-tokens", "12", "--num-draft", "5")
CSV = (
    "\ufeffid,body,label,text,note\r\n"
    '007,"The ""old"" man,\r\nand the sea",01,A,2020-01-01\r\n'
    "008,,02,B,\r\n\r\n"
    "009,The sea,03,,\u2603\r\n"
)


@pytest.fixture
def here(place: Path, tmp_path: Path) -> Path:
    """A folder with the models of `place` and a table of three rows, one without a prompt."""
    (tmp_path / "weights").symlink_to(place / "weights")
    (tmp_path / "in.csv").write_bytes(CSV.encode())
    return tmp_path


@pytest.fixture
def batch(call: Call) -> Call:
    def run(source: str, *options: str, **how: Any) -> Any:
        return call("batch", source, *MODELS, *options, **how)

    return run


def rows_of(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


def lines_of(path: Path, field: str = "body", shard: str = "1/1", **how: Any) -> list[Line]:
    with open_input(str(path)) as stream:
        form: Any = path.suffix[1:]
        found = list(read_lines(stream, form, field, Shard.parse(shard), **how))
        stream.seek(0)
        whole = sum(1 for _ in read_lines(stream, form, field, Shard()))
        stream.seek(0)
        assert count_lines(stream, form) == whole and stream.tell() == 0
        return found


def test_cells_of_csv_stay_as_they_are(here: Path) -> None:
    one, two, three = lines_of(here / "in.csv")
    assert (one.id, one.prompt) == ("007", 'The "old" man,\r\nand the sea')
    assert one.columns == {"label": "01", "text": "A", "note": "2020-01-01"}
    assert two.error == "'body' is empty, expected a prompt" and two.is_empty
    assert (three.number, three.place, three.columns["note"]) == (3, "row 3", "\u2603")
    (here / "in.tsv").write_text('body\tx\nHe said 5" nails, two\t\n')
    (line,) = lines_of(here / "in.tsv")
    assert line.prompt == 'He said 5" nails, two' and line.columns == {"x": ""}
    (here / "long.csv").write_text(f'body\n"{"many words " * 30_000}"\n')
    (line,) = lines_of(here / "long.csv")
    assert line.prompt == "many words " * 30_000
    assert [line.number for line in lines_of(here / "in.csv", shard="2/2")] == [2]


def test_what_json_lacks_in_parquet_is_text(tmp_path: Path) -> None:
    noon = datetime(2020, 1, 2, 12, tzinfo=UTC)
    columns = {
        "body": ["a", None], "count": [2**60, None], "score": [0.5, 2.0], "yes": [True, False],
        "tags": [["x", "y"], []], "of": [{"at": date(2020, 1, 2)}, None],
        "day": [date(2020, 1, 2)] * 2, "price": [Decimal("1.50"), None],
        "key": [UUID(int=7).bytes] * 2,
        "raw": [b"caf\xc3\xa9", b"\xff"], "hour": [time(1, 2, 3)] * 2,
        "at": pa.array([1_000_000_001, None], pa.timestamp("ns")), "when": [noon, None],
        "kind": pa.array(["u", "v"]).dictionary_encode(),
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    one, two = lines_of(tmp_path / "in.parquet")
    assert (one.prompt, one.id, two.error) == ("a", 1, "'body' is null, expected a string")
    assert one.columns is not None and two.columns is not None
    assert one.columns == {
        "count": 2**60,
        "score": 0.5,
        "yes": True,
        "tags": ["x", "y"],
        "of": {"at": "2020-01-02"},
        "day": "2020-01-02",
        "price": "1.50",
        "raw": "caf\u00e9",
        "key": "\0" * 15 + "\x07",
        "hour": "01:02:03.000000",
        "at": "1970-01-01 00:00:01.000000001",
        "when": "2020-01-02 12:00:00.000000Z",
        "kind": "u",
    }
    assert two.columns["raw"] == "\\xff" and two.columns["when"] is None


BAD = {
    b"": "it is empty, expected a line with the names of the columns",
    b"\n\n": "it is empty, expected a line with the names of the columns",
    b"a,body\n1,x\n2,He go, home\n": "line 3 cannot be read (the number of cells is 3, expected 2)",
    b"a,body\n1\n": "line 2 cannot be read (the number of cells is 1, expected 2)",
    b'a,body\n1,"x\n2,y\n': "line 3 cannot be read (unexpected end of data)",
    b'a,body\n1,"x" y\n': "line 2 cannot be read (',' expected after '\"')",
    b"a,body\n1,x\n2,caf\xe9\n": "line 3 is not UTF-8: byte 0xe9 at offset 5",
    b"a,body,a\n1,x,2\n": "two columns are called 'a'",
    b"a,b\n1,x\n2,y\n": "bad.csv, row 1: no field 'body' (found: 'a', 'b')",
    b"a,body\n1,\n2,\n": None,
}


@pytest.mark.parametrize("content", BAD)
def test_what_is_no_table_is_refused_before_anything_is_written(
    content: bytes, batch: Call, here: Path
) -> None:
    (here / "bad.csv").write_bytes(content)
    done = batch("bad.csv", "--prompt-field", "body", "--output", "out.csv")
    if (found := BAD[content]) is None:  # prompts that are empty are a table still
        assert done.code == 3 and len(rows_of(here / "out.csv")) == 3
        return
    done.check_error(found)
    assert "bad.csv" in done.err[0] and not [*here.glob("out*")]


def test_what_is_not_parquet_is_refused(batch: Call, here: Path) -> None:
    batch("in.csv", "--format", "parquet").check_error(
        "in.csv: it cannot be read as Parquet (Parquet magic bytes not found in footer"
    )
    pipe = batch("-", "--format", "parquet", stdin=b"PAR1", pipe=True)
    pipe.check_error("standard input: it cannot be read as Parquet (")
    pq.write_table(pa.table([["x"], ["y"]], names=["a", "a"]), here / "in.parquet")
    batch("in.parquet").check_error("in.parquet: two columns are called 'a'")


HEADER = ["id", "prompt", "text", "finish_reason", "error", "label", "note", "given"]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_a_table_has_what_the_records_have(suffix: str, batch: Call, here: Path) -> None:
    options = ("--prompt-field", "body", "--output")
    assert batch("in.csv", *options, "out.jsonl").code == 3
    done = batch("in.csv", *options, f"out.{suffix}")
    assert done.code == 3 and done.err[0] == "row 2: 'body' is empty, expected a prompt"
    out = here / f"out.{suffix}"
    assert {path.name for path in here.glob("out*")} == {"out.jsonl", out.name}
    if suffix == "parquet":
        table = pq.read_table(out)
        assert set(table.schema.types) == {pa.string()}
        header, rows = table.column_names, [list(row.values()) for row in table.to_pylist()]
    else:
        header, *rows = rows_of(out)
    assert header == HEADER
    for row, line in zip(rows, (here / "out.jsonl").read_text().splitlines(), strict=True):
        record = json.loads(line)
        record["given"] = json.dumps(record["given"])
        none = None if suffix == "parquet" else ""
        assert row == [record.get(name, none) for name in HEADER]
    assert json.loads(rows[0][-1]) == {"text": "A"}
    again = batch(out.name, "--output", "again.csv")  # which has the field prompt
    assert again.code == 3 and rows_of(here / "again.csv")[1][:2] == rows[0][:2]


def test_columns_of_parquet_have_types(batch: Call, here: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "The sea", "n": 1, "x": 1, "yes": True, "mixed": 1, "big": 2**63,
         "of": {"a": []}},
        {"prompt": "and", "n": None, "x": 0.5, "yes": False, "mixed": "a", "id": 7, "big": 1},
        {"prompt": "old", "half": "\ud800"},
    ]  # fmt: skip
    (here / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch("in.jsonl", "--output", "out.parquet")
    table = pq.read_table(here / "out.parquet")
    kinds = {name: str(table.schema.field(name).type) for name in table.column_names}
    assert kinds == {
        "id": "int64",
        "prompt": "string",
        "text": "string",
        "finish_reason": "string",
        "error": "string",
        "n": "int64",
        "x": "double",
        "yes": "bool",
        "mixed": "string",
        "big": "string",
        "of": "string",
        "half": "string",
    }
    found = table.to_pydict()
    assert found["id"] == [1, 7, 3] and found["n"] == [1, None, None]
    assert found["x"] == [1.0, 0.5, None] and found["mixed"] == ["1", "a", None]
    assert found["big"] == [str(2**63), "1", None] and found["of"] == ['{"a": []}', None, None]
    assert found["half"] == [None, None, "\\ud800"] and found["error"] == [None] * 3
    batch("in.jsonl", "--output", "out.csv")
    assert rows_of(here / "out.csv")[1][5:] == ["1", "1", "true", "1", str(2**63), '{"a": []}', ""]


def test_a_table_without_rows_has_its_first_columns(batch: Call, here: Path) -> None:
    (here / "none.csv").write_text("prompt,label\n")
    for name in ("out.csv", "out.parquet"):
        assert batch("none.csv", "--output", name).code == 0
    assert rows_of(here / "out.csv") == [HEADER[:5]]
    assert pq.read_table(here / "out.parquet").column_names == HEADER[:5]


def test_a_large_table_is_read_and_written_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "WRITTEN_AT_ONCE", 200)
    monkeypatch.setattr(tables, "READ_AT_ONCE", 7)
    values = [None if i < 50 else i / 2 for i in range(99)]
    rows = [json.dumps({"body": str(i), "x": value}) + "\n" for i, value in enumerate(values)]
    (tmp_path / "records").write_text("".join(rows))
    path = tmp_path / "out.parquet"
    tables.write_table(path, ".parquet", tmp_path / "records", ["body"], without=["stats"])
    assert pq.ParquetFile(path).metadata.num_row_groups > 5
    found = [(line.prompt, (line.columns or {})["x"]) for line in lines_of(path)]
    assert found == [(str(i), value) for i, value in enumerate(values)]


@pytest.fixture
def many(here: Path) -> Callable[[], bytes]:
    """Make a table of 40 rows; return what gives its output, and removes that."""
    words = ["old", "man", "The", "sea", "and", "was", "fish"]
    prompts = [" ".join(words[(i * j) % 7] for j in range(1, 2 + i % 9)) for i in range(40)]
    (here / "in.csv").write_text("".join(f"{line}\n" for line in ("prompt", *prompts)))
    return (here / "out.csv").read_bytes


OUT = ("--output", "out.csv", "--batch-size", "4")


def test_a_stopped_table_is_resumed(
    batch: Call, here: Path, many: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert batch("in.csv", *OUT).code == 0
    whole, append = many(), RecordFile.append_bytes
    (here / "out.csv").write_bytes(b"of an earlier run\n")
    written: list[bytes] = []

    def stop(self: RecordFile, data: bytes) -> None:
        append(self, data[:-5] if len(written) == 9 else data)
        written.append(data)
        if len(written) == 10:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "append_bytes", stop)
        assert batch("in.csv", *OUT, "--force").code == 1
    assert many() == b"of an earlier run\n" and (here / "out.csv.jsonl").exists()
    batch("in.csv", *OUT).check_error("the output out.csv.jsonl is not empty")
    done = batch("in.csv", *OUT, "--resume")
    assert done.code == 0 and "of them earlier" in done.err[-1] and many() == whole
    done = batch("in.csv", *OUT, "--resume")
    assert done.code == 0 and many() == whole
    assert done.err == ["out.csv is there, so nothing is left to do; --force starts over"]
    batch("in.csv", *OUT).check_error("the output out.csv is not empty")
    assert batch("in.csv", *OUT, "--force").code == 0 and many() == whole
    assert {path.name for path in here.glob("*out*")} == {"out.csv"}


def test_a_killed_run_leaves_no_half_of_a_table(
    batch: Call, here: Path, many: Callable[[], bytes]
) -> None:
    batch("in.csv", *OUT)
    whole, records = many(), here / "out.csv.jsonl"
    (here / "out.csv").unlink()
    with start(here, "batch", "in.csv", *MODELS, *OUT) as process:
        while not records.exists() or records.stat().st_size < 1000:
            assert process.poll() is None
            sleep(0.002)
        process.kill()
    assert not (here / "out.csv").exists() and records.exists()
    assert batch("in.csv", *OUT, "--resume").code == 0 and many() == whole
    assert not records.exists()


def test_a_table_that_cannot_be_written_keeps_its_records(
    batch: Call, here: Path, many: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        done = batch("in.csv", *OUT)
    assert done.code == 1 and done.err[-1].startswith("error: out.csv: No space left on device")
    assert {path.name for path in here.glob("*out*")} == {"out.csv.jsonl"}
    assert batch("in.csv", *OUT, "--resume").code == 0 and len(rows_of(here / "out.csv")) == 41


def test_shards_are_joined_to_a_table(batch: Call, here: Path, many: Callable[[], bytes]) -> None:
    batch("in.csv", *OUT)
    whole = many()
    for number in (1, 2):
        batch("in.csv", "--shard", f"{number}/2", "--output", f"out.csv.jsonl.{number}-of-2")
    batch("in.csv", "--join", *OUT).check_error("the output out.csv is not empty")
    done = batch("in.csv", "--join", *OUT, "--force")
    assert done.err == ["[40 records in out.csv, 0 with errors]"] and many() == whole
    assert {path.name for path in here.glob("out*")} == {"out.csv"}
    batch("in.csv", "--shard", "2/2", *OUT, "--force")
    assert [row[0] for row in rows_of(here / "out.csv")[1:]] == [str(i) for i in range(2, 41, 2)]


def test_tables_are_files_beside_the_input(batch: Call, here: Path) -> None:
    field = ("--prompt-field", "body", "--output")
    batch("in.csv", *field, "in.csv", "--force").check_error("in.csv is the input itself")
    (here / "folder.csv").mkdir()
    batch("in.csv", *field, "folder.csv").check_error("folder.csv: Is a directory")
    assert (here / "in.csv").read_bytes() == CSV.encode()
    done = batch("-", *field, "out.csv", "--format", "csv", stdin=CSV, pipe=True)
    assert done.code == 3 and len(rows_of(here / "out.csv")) == 4


def test_ids_are_in_a_field_that_is_named(batch: Call, here: Path) -> None:
    field = ("--prompt-field", "body", "--id-field", "note", "--output")
    batch("in.csv", *field, "out.jsonl")
    records = [json.loads(line) for line in (here / "out.jsonl").read_text().splitlines()]
    assert [(record["id"], record["note"]) for record in records] == [
        ("2020-01-01", "2020-01-01"),
        ("", ""),
        ("\u2603", "\u2603"),
    ]
    assert records[0]["given"] == {"id": "007", "text": "A"}
    whole = (here / "out.jsonl").read_bytes()
    (here / "out.jsonl").write_bytes(whole[:-9])
    assert batch("in.csv", *field, "out.jsonl", "--resume").code == 3
    assert (here / "out.jsonl").read_bytes() == whole
    again = batch("in.csv", "--prompt-field", "body", "--output", "out.jsonl", "--resume")
    again.check_error("out.jsonl, line 1, is not about row 1 of the input, as it has another id")
    lines = '{"prompt": "The sea", "key": null}\n{"prompt": "The sea"}\n{"prompt": "a", "key": 5}\n'
    done = batch("-", "--id-field", "key", stdin=lines)
    errors = [record.get("error") for record in done.records]
    wrong = "line {}: 'key' is {}, expected a string or an integer"
    assert errors == [wrong.format(1, "null"), wrong.format(2, "missing"), None]
    assert [record["id"] for record in done.records] == [1, 2, 5]


def test_without_pyarrow_it_says_what_to_install(
    batch: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "in.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for names in (("in.parquet",), ("in.csv", "--field", "body", "--output", "out.parquet")):
        batch(*names).check_error("a table of Parquet needs pyarrow, which is not installed")
    assert not [*here.glob("out*")]
    assert batch("in.csv", "--field", "body", "--output", "out.csv").code == 3, "CSV needs nothing"
