""", numbers that JSON lacks, NUL, columns' names."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from speculative_t5.cli.job import Record, check_record
from speculative_t5.files import json_line, json_object
from speculative_t5.generation import OPTIONAL_FIELDS, OUTCOME_FIELDS, outcome_of
from speculative_t5.tables import DELIMITERS, read_rows
from speculative_t5.tokenizers import Line, Shard, count_lines, read_lines

import pytest
from commands import Call
from messages import check_message

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
MODELS = ("--model", "target", "--draft-model", "draft", "--max-tokens", "8", "--num-draft", "3")


class Named(io.BytesIO):
    name = "in.csv"


@pytest.fixture
def here(place: Path, tmp_path: Path) -> Path:
    (tmp_path / "weights").symlink_to(place / "weights")
    return tmp_path


def rows(content: str, **how: Any) -> list[dict[str, Any]]:
    return [json.loads(row) for row in read_rows(Named(content.encode()), ".csv", **how)]


@pytest.mark.parametrize("delimiter", DELIMITERS)
def test_the_delimiter_is_that_of_the_first_rows(delimiter: str) -> None:
    others = "".join(set(DELIMITERS) - {delimiter})
    table = [
        ["id", "body", "label"],
        ["1", f"She have a apple, or two; {others}.", "x"],
        ["2", 'He said "hi",\nand\tgo | home;', ""],
        ["", "", ""],
    ]
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        file = io.StringIO()
        csv.writer(file, delimiter=delimiter, quoting=quoting).writerows(table)
        expected = [dict(zip(table[0], row, strict=True)) for row in table[1:]]
        assert rows(file.getvalue()) == rows("\ufeff" + file.getvalue()) == expected
        assert rows(file.getvalue(), delimiter=delimiter) == expected


UNSURE = {
    "body\nShe have a apple.\n": [{"body": "She have a apple."}],
    "body\none; two\n": [{"body": "one; two"}],
    "body;label\nShe have a apple, and he go.;x\n": [
        {"body": "She have a apple, and he go.", "label": "x"}
    ],
    "a,b;c\n1,2;3\n": [{"a": "1", "b;c": "2;3"}],
    "a;b\n1,5;2,5\n": [{"a": "1,5", "b": "2,5"}],
    '"a;b",c\n"1;2",3\n': [{"a;b": "1;2", "c": "3"}],
    '"a,b";c\n"1,2";3\n': [{"a,b": "1,2", "c": "3"}],
    "\n\na;b\n\n1;2\n": [{"a": "1", "b": "2"}],
    "a;b\n": [],
    "a|b\n1|2\n": [{"a": "1", "b": "2"}],
}


@pytest.mark.parametrize("content", UNSURE)
def test_tables_whose_delimiter_is_not_plain(content: str) -> None:
    assert rows(content) == UNSURE[content]


def test_a_fault_behind_the_rows_that_are_looked_at_is_still_found() -> None:
    for content, found in (
        (b"a;b\n1;2\n3\n", "line 3 cannot be read"),
        (b"a;b\n1;caf\xe9\n", "line 2 is not UTF-8: byte 0xe9"),
        (b"caf\xe9;b\n1;2\n", "line 1 is not UTF-8"),
        (b'a;b\n1;"x\n' + b"y\n" * 3000, "cannot be read (unexpected end of data)"),
        (b"", "it is empty"),
    ):
        with pytest.raises(ValueError) as raised:
            list(read_rows(Named(content), ".csv"))
        check_message(str(raised.value), found)


def test_a_delimiter_can_be_given(call: Call, here: Path) -> None:
    (here / "in.csv").write_text("id~body\n1~He go, or stay.\n")
    (here / "in.tsv").write_text("id;body\n1;He go, or stay.\n")
    for source, delimiter in (("in.csv", "~"), ("in.tsv", ";")):
        options = ("--prompt-field", "body", "--delimiter", delimiter)
        done = call("batch", source, *MODELS, *options)
        assert done.code == 0 and done.records[0]["prompt"] == "He go, or stay."
    (here / "in.csv").write_text("id\tbody\n1\tHe go, or stay.\n")
    for typed in ("tab", "\\t", "\t"):
        done = call("batch", "in.csv", *MODELS, "--prompt-field", "body", "--delimiter", typed)
        assert done.records[0]["prompt"] == "He go, or stay."
    for typed in ("", ";;", '"', "\n", "a", "1"):
        call("batch", "in.csv", "--delimiter", typed).check_error(
            "--delimiter must be one character"
        )
    call("batch", "in.txt", "--delimiter", ";").check_error("--delimiter is for CSV")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_json_lacks_are_null(call: Call, here: Path, number: str) -> None:
    record = '{"prompt": "He go.", "score": 0.25, "of": {"a": [1, 0.25, 2.5]}}\n'
    (here / "in.jsonl").write_text(record.replace("0.25", number))
    options = ("--output", "out.jsonl", *MODELS)
    assert call("batch", "in.jsonl", *options).code == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (line,) = (here / "out.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=refuse)
    assert found["score"] is None and found["of"] == {"a": [1, None, 2.5]}
    assert call("batch", "in.jsonl", *options, "--resume").code == 0, "it is the same line"
    (here / "out.jsonl").write_text(line.replace('"score": null', f'"score": {number}') + "\n")
    assert call("batch", "in.jsonl", *options, "--resume").code == 0, "as earlier versions wrote it"


def test_no_record_has_what_json_lacks() -> None:
    inner = {"a": [float("nan"), {"b": float("-inf")}], "c": 1.5, "d": "\ud800"}
    line = json_line({"score": float("inf"), **inner})
    assert json_object(line) == {"score": None, "a": [None, {"b": None}], "c": 1.5, "d": "\ud800"}


@pytest.mark.parametrize(
    ("form", "content", "found"),
    [
        ("text", b"She have\0 a apple.\n", "the line has a NUL at character 9"),
        ("text", "Se".encode("utf-16-le"), "the line has a NUL at character 2"),
        ("jsonl", b'{"prompt": "a\\u0000b"}\n', "'prompt' has a NUL at character 2"),
        ("csv", b"prompt,x\nab\0c,y\n", "'prompt' has a NUL at character 3"),
    ],
)
def test_a_nul_is_refused(form: Any, content: bytes, found: str) -> None:
    (line,) = read_lines(Named(content), form, "prompt", Shard())
    assert line.prompt is None and line.error is not None
    check_message(f"line 1: {line.error}", found)


def test_lines_without_a_nul_are_done(call: Call, here: Path) -> None:
    (here / "in.txt").write_bytes(b"She have\0 a apple.\nHe go.\n")
    done = call("batch", "in.txt", *MODELS)
    assert done.code == 3 and ["error" in each for each in done.records] == [True, False]
    (here / "in.txt").write_bytes("She go.\nHe go.\n".encode("utf-16-le"))
    call("batch", "in.txt", *MODELS).check_error(
        "in.txt, line 1: the line has a NUL at character 2"
    )


COLUMNS = {"score": 3, "alternatives": "x", "truncated": False, "error": "e", "text": "t"}


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ((), ()),
        (("--scores",), ("score",)),
        (("-n", "2", "--temperature", "1"), ("alternatives",)),
        (("--truncate",), ("truncated",)),
        (("--num-beams", "2", "--regular-decode"), ("score",)),
    ],
)
def test_a_column_moves_only_where_an_output_has_its_name(
    call: Call, here: Path, options: tuple[str, ...], moved: tuple[str, ...]
) -> None:
    record = {"prompt": "He go home.", **COLUMNS}
    (here / "in.jsonl").write_text(json.dumps(record) + "\n")
    models = [each for each in MODELS if each not in ("--draft-model", "draft")]
    how = models if "--num-beams" in options else MODELS
    assert call("batch", "in.jsonl", *how, *options, "--output", "out.jsonl").code == 0
    (done,) = map(json.loads, (here / "out.jsonl").read_text().splitlines())
    assert done["given"].keys() == {"error", "text", *moved}
    for name in OPTIONAL_FIELDS:
        place = done["given"] if name in moved else done
        assert place[name] == COLUMNS[name]
    for other in ((), options):  # records of either kind are those of the line
        again = call("batch", "in.jsonl", *how, *other, "--output", "out.jsonl", "--resume")
        assert again.code == 0, again.err


def test_records_of_a_run_with_other_options_are_known_by_their_fields() -> None:
    line = Line(1, 1, "line 1", "a", columns=COLUMNS)
    for wanted in (outcome_of({}, truncate=False), OUTCOME_FIELDS):
        record = json.loads(Record(line, error="none", outcome=wanted).to_json())
        check_record("out", record, line)
        other = Line(1, 1, "line 1", "a", columns=COLUMNS | {"score": 4})
        with pytest.raises(ValueError, match="another id, prompt or other field"):
            check_record("out", record, other)


def test_rows_are_counted_with_the_same_delimiter() -> None:
    content = b'a;b\n1;"x\ny"\n2;z\n'
    assert [line.number for line in read_lines(Named(content), "csv", "b", Shard())] == [1, 2]
    with open("/dev/null", "rb") as empty, pytest.raises(ValueError, match="it is empty"):
        assert count_lines(empty, "csv") is None
        list(read_lines(empty, "csv", "b", Shard()))
