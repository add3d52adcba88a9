"""Files of prompts, line by line: text, JSON Lines, and what cannot be used."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from speculative_t5.tokenizers.prompt_files import (
    EMPTY,
    MAX_LINE,
    ONE_OBJECT,
    Line,
    Shard,
    count_lines,
    open_input,
    read_lines,
)

import pytest
from messages import check_message


def lines(
    content: bytes, form: Any = "text", field: str = "text", shard: str = "1/1"
) -> list[Line]:
    return list(read_lines(io.BytesIO(content), form, field, Shard.parse(shard)))


def errors(content: bytes, form: Any = "jsonl", field: str = "text") -> list[str | None]:
    found = [line.error for line in lines(content, form, field)]
    for error in found:
        check_message(f"line 1: {error}", "line 1")
    return found


def test_text_has_one_prompt_a_line() -> None:
    found = lines("\ufeffone\r\n  two \u2028 \u0085x\x0c\n\nlast".encode())
    assert [(line.number, line.id, line.prompt) for line in found] == [
        (1, 1, "one"),
        (2, 2, "  two \u2028 \u0085x\x0c"),
        (3, 3, ""),
        (4, 4, "last"),
    ]
    assert [line.error for line in found] == [None, None, EMPTY, None]
    assert lines(b"") == []


def test_json_lines_have_a_field_and_perhaps_an_id() -> None:
    content = b'{"text": "a", "id": "x"}\n{"text": "b", "id": 12}\n{"id": null, "text": "c"}\n'
    found = [(line.id, line.prompt) for line in lines(content, "jsonl")]
    assert found == [("x", "a"), (12, "b"), (3, "c")]
    (line,) = lines(b'{"text": "a", "body": "b"}', "jsonl", "body")
    assert (line.id, line.prompt) == (1, "b")


def test_lines_that_cannot_be_used_have_an_error() -> None:
    assert errors(b'x\n\n[1]\n"s"\n') == [
        f"not JSON: Expecting value at character 1; {ONE_OBJECT}",
        EMPTY,
        f"not a JSON object but an array; {ONE_OBJECT}",
        f"not a JSON object but a string; {ONE_OBJECT}",
    ]
    assert errors(b'{}\n{"a": 1, "b": 2}\n{"text": null}\n{"text": {}}\n{"text": " "}') == [
        "no field 'text' (found: nothing): give the prompt's field with --field",
        "no field 'text' (found: 'a', 'b'): give the prompt's field with --field",
        "'text' is null, expected a string",
        "'text' is an object, expected a string",
        "'text' is empty, expected a prompt",
    ]
    unclosed, control = errors(b'{"text": "a\n{"text": "a\tb"}')
    assert unclosed == f"not JSON: Unterminated string starting at character 10; {ONE_OBJECT}"
    assert control == f"not JSON: Invalid control character at character 12; {ONE_OBJECT}"
    (error,) = errors(b'{"text": "\\ud800"}')
    assert error == "'text' holds half of a surrogate pair, expected text"
    (error,) = errors(b'{"text": "a", "id": "\\ud800"}')
    assert error == "'id' is half of a surrogate pair, expected a string or an integer"
    (error,) = errors(b"ab\xff\n", "text")
    assert error == "not UTF-8: byte 0xff at offset 2; convert it to UTF-8"
    (error,) = errors(b"[" * 100_000)
    assert error is not None and error.startswith("not JSON: ")
    (error,) = errors(b'{"text": "a", "x": %s}' % (b"[" * 100 + b"]" * 100))
    assert error == "nested more than 100 deep: leave out what is"
    (line,) = lines(b'{"text": "a", "x": %s}' % (b"[" * 99 + b"]" * 99), "jsonl")
    assert line.prompt == "a"
    for own, kind in (("1.5", "a number"), ("[]", "an array"), ("true", "a boolean")):
        (line,) = lines(b'{"text": "a", "id": %s}' % own.encode(), "jsonl")
        assert line.error == f"'id' is {kind}, expected a string or an integer" and line.id == 1


def test_a_line_that_is_too_long_is_skipped() -> None:
    found = lines(b"a\n" + b"x" * (2 * MAX_LINE + 5) + b"\nb\n")
    assert [line.prompt for line in found] == ["a", None, "b"]
    assert found[1].error == "longer than 16 MiB: split it into several"


def test_shards_part_the_lines() -> None:
    content = b"".join(b"%d\n" % i for i in range(1, 12))
    whole = lines(content)
    parts = [lines(content, shard=f"{n}/3") for n in (1, 2, 3)]
    assert [[line.number for line in part] for part in parts] == [
        [1, 4, 7, 10], [2, 5, 8, 11], [3, 6, 9],
    ]  # fmt: skip
    assert sorted((line for part in parts for line in part), key=lambda x: x.number) == whole
    assert [Shard(n, 3).size(11) for n in (1, 2, 3)] == [4, 4, 3]
    assert [Shard(n, 4).size(2) for n in (1, 2, 3, 4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "1/0", "-1/3", "1/3/5", "a/b", "1.5/3"])
def test_bad_shards_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"a shard must be 1/N to N/N, such as 2/8, got {text!r}"):
        Shard.parse(text)


def test_lines_are_counted(tmp_path: Path) -> None:
    for content, number in ((b"", 0), (b"a", 1), (b"a\n", 1), (b"a\n\nb", 3)):
        (tmp_path / "file").write_bytes(content)
        with open_input(str(tmp_path / "file")) as stream:
            assert count_lines(stream) == number
            assert stream.read() == content
    reader, writer = os.pipe()
    with open(reader, "rb") as stream:
        assert count_lines(stream) is None
    os.close(writer)
