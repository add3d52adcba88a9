"""Files of prompts, line by line; files written whole or not at all, and pieces beside them."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speculative_t5.cli.pieces import PartialFile
from speculative_t5.cli.targets import OutputOptions, partial_file_of
from speculative_t5.files import open_input, replacing, write_whole
from speculative_t5.tokenizers.prompt_files import (
    EMPTY_LINE,
    MAX_LINE,
    ONE_OBJECT,
    Line,
    Shard,
    count_lines,
    read_lines,
)

import pytest
from checkpoints import refused
from conftest import REPOSITORY
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
    assert [line.error for line in found] == [None, None, EMPTY_LINE, None]
    assert lines(b"") == []


def test_json_lines_have_a_field_and_perhaps_an_id() -> None:
    content = b'{"text": "a", "id": "x"}\n{"text": "b", "id": 12}\n{"id": null, "text": "c"}\n'
    found = [(line.id, line.prompt) for line in lines(content, "jsonl")]
    assert found == [("x", "a"), (12, "b"), (3, "c")]
    (line,) = lines(b'{"text": "a", "body": "b"}', "jsonl", "body")
    assert (line.id, line.prompt) == (1, "b")


def test_lines_that_are_no_json_objects_have_an_error() -> None:
    assert errors(b'x\n\n[1]\n"s"\n') == [
        f"not JSON: Expecting value at character 1; {ONE_OBJECT}",
        EMPTY_LINE,
        f"not a JSON object but an array; {ONE_OBJECT}",
        f"not a JSON object but a string; {ONE_OBJECT}",
    ]
    unclosed, control = errors(b'{"text": "a\n{"text": "a\tb"}')
    assert unclosed == f"not JSON: Unterminated string starting at character 10; {ONE_OBJECT}"
    assert control == f"not JSON: Invalid control character at character 12; {ONE_OBJECT}"


def test_lines_without_a_text_have_an_error() -> None:
    assert errors(b'{}\n{"a": 1, "b": 2}\n{"text": null}\n{"text": {}}\n{"text": " "}') == [
        "no field 'text' (found: nothing): give the prompt's field with --prompt-field",
        "no field 'text' (found: 'a', 'b'): give the prompt's field with --prompt-field",
        "'text' is null, expected a string",
        "'text' is an object, expected a string",
        "'text' is empty, expected a prompt",
    ]


def test_lines_that_are_no_text_have_an_error() -> None:
    (error,) = errors(b'{"text": "\\ud800"}')
    assert error == "'text' holds half of a surrogate pair, expected text"
    (error,) = errors(b'{"text": "a", "id": "\\ud800"}')
    assert error == "'id' is half of a surrogate pair, expected a string or an integer"
    (error,) = errors(b"ab\xff\n", "text")
    assert error == "not UTF-8: byte 0xff at offset 2; convert it to UTF-8"


def test_lines_that_are_nested_too_deep_have_an_error() -> None:
    (error,) = errors(b"[" * 100_000)
    assert error is not None and error.startswith("not JSON: ")
    (error,) = errors(b'{"text": "a", "x": %s}' % (b"[" * 100 + b"]" * 100))
    assert error == "nested more than 100 deep: leave out what is"
    (line,) = lines(b'{"text": "a", "x": %s}' % (b"[" * 99 + b"]" * 99), "jsonl")
    assert line.prompt == "a"


def test_ids_that_cannot_be_used_are_an_error_and_not_kept() -> None:
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
        [1, 4, 7, 10],
        [2, 5, 8, 11],
        [3, 6, 9],
    ]
    assert sorted((line for part in parts for line in part), key=lambda x: x.number) == whole
    assert [Shard(n, 3).size(11) for n in (1, 2, 3)] == [4, 4, 3]
    assert [Shard(n, 4).size(2) for n in (1, 2, 3, 4)] == [1, 1, 0, 0]
    for text in ("", "2", "0/3", "4/3", "1/0", "-1/3", "1/3/5", "a/b", "1.5/3"):
        with refused("a shard must be 1/N to N/N, such as 2/8, got ", repr(text)):
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


HEADER = {"text": "a1", "model": "b2"}
PIECES: list[dict[str, Any]] = [
    {
        "file": "f",
        "start": i,
        "end": i + 1,
        "line": 1,
        "output": f"\u2603 {i}",
        "reason": None,
        "refused": None,
        "retried": None,
        "surest": 0.0,
        "written": None,
    }
    for i in range(3)
]


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def entered(path: Path, header: Any = HEADER, *, resume: bool = False, force: bool = False) -> Any:
    files = OutputOptions(output=str(path), resume=resume, force=force)
    partial = partial_file_of([], files)
    assert partial
    return PartialFile(partial, header, files)


@contextmanager
def stopped(path: Path, **options: Any) -> Iterator[PartialFile]:
    """Run in a partial file, and then stop before the run is done."""
    with pytest.raises(KeyboardInterrupt), entered(path, **options) as partial:
        yield partial
        raise KeyboardInterrupt


def leave(path: Path, pieces: Any = PIECES) -> Path:
    """Make a run that stops after some pieces; return its partial file."""
    with stopped(path, force=True) as partial:
        for piece in pieces:
            partial.append(piece)
    return path.with_name(f"{path.name}.partial.jsonl")


def test_processes_that_write_a_file_at_once_do_not_mix(tmp_path: Path) -> None:
    """Processes that start together keep what their draft lengths gained, for example."""
    path = tmp_path / "out"
    other = (
        "import sys; from speculative_t5.files import write_whole; write_whole(sys.argv[1], b'1')"
    )
    with replacing(path) as ours:
        ours.write_bytes(b"ours")
        subprocess.run([sys.executable, "-c", other, path], check=True, cwd=REPOSITORY)
        assert path.read_bytes() == b"1" and ours.read_bytes() == b"ours"
    assert path.read_bytes() == b"ours" and list(tmp_path.iterdir()) == [path]


def test_pieces_are_kept_until_the_run_is_done(tmp_path: Path) -> None:
    leave(tmp_path / "out")
    with entered(tmp_path / "out", resume=True) as partial:
        assert partial.earlier == {"f": PIECES}
        partial.append({**PIECES[0], "start": 7})
    assert not list(tmp_path.iterdir())
    leave(tmp_path / "out", [])
    assert not list(tmp_path.iterdir()), "nothing was done"


def test_torn_lines_are_cut_off(tmp_path: Path) -> None:
    path = leave(tmp_path / "out")
    whole = path.read_bytes()
    ends = [size for size, byte in enumerate(whole, start=1) if byte == ord("\n")]
    sizes = [0, *(end + more for end in ends for more in (-2, -1, 0, 1))][:-2]
    for size in (size for size in sizes if size == 0 or size >= ends[0]):
        path.write_bytes(whole[:size])
        lines = whole[:size].count(b"\n")
        with stopped(tmp_path / "out", resume=True) as partial:
            assert partial.count == max(lines - 1, 0)
            partial.append({"start": 9})  # shorter than what is torn
            kept = path.read_bytes()
        assert kept.endswith(b"\n") and kept.count(b"\n") == max(lines, 1) + 1


def test_nothing_stays_if_the_first_line_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"), entered(tmp_path / "out"):
        pass
    monkeypatch.undo()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("header", "more", "resume", "found"),
    [
        (HEADER, b"", False, "holds the pieces of an earlier run"),
        ({**HEADER, "text": "c3"}, b"", True, "another text"),
        (HEADER, b"no piece\n", True, "a line that is not a piece"),
        (HEADER, b'{"start": 1, "end": 2}\n', True, "a line that is not a piece"),
    ],
)
def test_pieces_of_other_runs_are_left_alone(
    tmp_path: Path, header: Any, more: bytes, resume: bool, found: str
) -> None:
    path = leave(tmp_path / "out")
    before = path.read_bytes() + more
    path.write_bytes(before)
    with refused(found), entered(tmp_path / "out", header, resume=resume):
        pass
    assert path.read_bytes() == before
    with entered(tmp_path / "out", header, force=True) as partial:
        assert partial.earlier == {}


@pytest.mark.parametrize("notes", [b"my notes", b'{"text": "a1"} and more', b'{"text": "c'])
def test_what_is_of_no_run_is_left_alone(tmp_path: Path, notes: bytes) -> None:
    path = tmp_path / "out.partial.jsonl"
    path.write_bytes(notes)
    for options, found in (
        ({}, "holds the pieces of an earlier run"),
        ({"resume": True}, "is from a run with another text"),
        ({"resume": True, "force": True}, "is from a run with another text"),
    ):
        with refused(found), entered(tmp_path / "out", **options):
            pass
        assert path.read_bytes() == notes
    with entered(tmp_path / "out", force=True):
        assert path.read_bytes().endswith(b"}\n")


def test_only_one_run_writes(tmp_path: Path) -> None:
    with entered(tmp_path / "out") as first:
        first.append(PIECES[0])
        with refused("another process is writing"), entered(tmp_path / "out", force=True):
            pass
        assert first.path.read_bytes().count(b"\n") == 2


def test_a_file_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "out", tmp_path / "link"
    path.write_bytes(b"before")
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(str(link), b"a\r\n")
    assert link.is_symlink() and path.read_bytes() == b"a\r\n"
    assert path.stat().st_mode & 0o777 == 0o640
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        write_whole(str(path), b"b")
    assert raised.value.filename == str(path)
    assert path.read_bytes() == b"a\r\n" and {p.name for p in tmp_path.iterdir()} == {"out", "link"}
