"""From lines to records in their order, and resuming; with a stand-in for the decoder."""

import io
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from speculative_t5.cli.job import NOT_DECODED, Record, RecordFile, process
from speculative_t5.decoding.results import Stats
from speculative_t5.files import open_input
from speculative_t5.generation.outputs import Generation
from speculative_t5.tokenizers.prompt_files import EMPTY_LINE, Line, Shard, read_lines
from speculative_t5.tokenizers.prompts import Source

import pytest


def lines(content: bytes) -> list[Line]:
    return list(read_lines(io.BytesIO(content), "text", "text", Shard()))


def shout(
    requests: Iterable[tuple[int, list[int]]], room: int = 3
) -> Iterator[tuple[int, Generation]]:
    """A decoder that gives its input in capitals, the last of `room` prompts first."""
    waiting = iter(requests)
    while batch := list(islice(waiting, room)):
        for index, ids in reversed(batch):
            text = bytes(ids[:-1]).decode(errors="replace").upper()
            yield index, Generation(text, ids, "eos", Stats(emitted=len(ids)))


def encode(text: str) -> Source:
    if "<bad>" in text:
        raise ValueError("prompt ids must be from 0 to 8, got 9")
    return Source([*text.encode(), 0])


def records(content: bytes) -> list[dict[str, Any]]:
    found: list[Record] = []
    process(lines(content), shout, encode, found.append)
    rows = [record.to_json() for record in found]
    assert all(row.count(b"\n") == 1 for row in rows)
    return [json.loads(row) for row in rows]


def test_records_come_in_the_order_of_lines() -> None:
    found = records(b"a\nb\n\nc\nd\n<bad>\ne\nf\ng\n\n")
    assert [record["id"] for record in found] == list(range(1, 11))
    texts = [record.get("text", record.get("error")) for record in found]
    assert texts == [
        "A",
        "B",
        f"line 3: {EMPTY_LINE}",
        "C",
        "D",
        "line 6: prompt ids must be from 0 to 8, got 9",
        "E",
        "F",
        "G",
        f"line 10: {EMPTY_LINE}",
    ]
    stats = {"tokens": 2, "rounds": 0, "drafted": 0, "accepted": 0, "acceptance_rate": 0.0,
             "tokens_per_round": 0.0}  # fmt: skip
    assert found[0] == {
        "id": 1,
        "prompt": "a",
        "text": "A",
        "finish_reason": "eos",
        "stats": stats,
    }
    assert found[2] == {"id": 3, "prompt": "", "error": f"line 3: {EMPTY_LINE}"}


PROMPTS = b"".join(b"prompt %d\n" % i if i % 7 else b"\n" for i in range(40))


class Job:
    """A run over a file of prompts, as the command does it."""

    def __init__(self, folder: Path, content: bytes = PROMPTS, *how: str) -> None:
        self.source, self.target = folder / "in.txt", folder / "out.jsonl"
        self.source.write_bytes(content)
        self._how = how or ("text", "text")

    def run(self, decode: Any = shout, **options: Any) -> Any:
        with open_input(str(self.source)) as stream:
            found = read_lines(stream, *self._how, Shard())
            with RecordFile(str(self.target), stream, **options) as output:
                counts, kept = None, dict[int, bytes]()
                if options.get("resume"):
                    found, earlier = output.resume(found)
                    counts, kept = [earlier.done, earlier.failed], earlier.kept
                output.begin()
                write = output.append_bytes
                process(found, decode, encode, lambda each: write(each.to_json()), kept=kept)
        return counts


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


COLUMNS = [
    b'{"prompt": "a", "label": 3, "notes": {"of": ["x", null, NaN]}}',
    b'{"id": "x", "label": 1e3, "prompt": "b", "text": "B", "stats": 0, "given": []}',
    b'{"prompt": "c", "text": "\\ud800 \\u2028"}',
    b'{"label": 4, "error": "none"}',
    b'{"prompt": "d"}',
]


@pytest.fixture
def columns(tmp_path: Path) -> Job:
    return Job(tmp_path, b"\n".join(COLUMNS), "jsonl", "prompt")


def test_columns_of_the_input_stay(columns: Job) -> None:
    columns.run()
    rows = columns.target.read_bytes().splitlines()
    assert rows[0].startswith(
        b'{"id": 1, "prompt": "a", "label": 3, "notes": {"of": ["x", null, null]}, "text": "A", "fi'
    )
    _, second, third, fourth, fifth = (json.loads(row) for row in rows)
    assert second["id"] == "x" and second["text"] == "B" and second["stats"]["tokens"] == 2
    assert second["label"] == 1000 and second["given"] == {"text": "B", "stats": 0, "given": []}
    assert b'"given": {"text": "\\ud800 \xe2\x80\xa8"}' in rows[2] and third["text"] == "C"
    assert fourth["label"] == 4 and fourth["given"] == {"error": "none"}
    assert fourth["error"].startswith("line 4: no field 'prompt' (found: 'label', 'error')")
    assert list(fifth) == ["id", "prompt", "text", "finish_reason", "stats"]


def test_a_run_with_columns_is_resumed(columns: Job) -> None:
    columns.run()
    whole = columns.target.read_bytes()
    for size in range(0, len(whole) + 1, 7):
        columns.target.write_bytes(whole[:size])
        columns.run(resume=True)
        assert columns.target.read_bytes() == whole
    first = whole[: whole.index(b"\n") + 1]
    for line in (COLUMNS[0].replace(b"NaN", b"0"), b'{"prompt": "a"}', b'{"prompt": "a", "x": 3}'):
        columns.source.write_bytes(line)
        columns.target.write_bytes(first)
        with pytest.raises(ValueError, match="not about line 1 of .* or other field: give another"):
            columns.run(resume=True)
        assert columns.target.read_bytes() == first


def test_a_resumed_run_is_an_uninterrupted_one(job: Job) -> None:
    assert job.run(resume=True) == [0, 0], "without records it starts"
    whole = job.target.read_bytes()
    assert whole.count(b"\n") == 40
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1, len(whole)):
        kept = whole[:size].rpartition(b"\n")[0]
        job.target.write_bytes(whole[:size])
        assert job.run(resume=True) == [whole[:size].count(b"\n"), kept.count(b'"error"')]
        assert job.target.read_bytes() == whole
    first = whole[: whole.index(b"\n") + 1]
    for torn in (b"\x00" * 99, b"\x00" * 99 + b"\n", b'{"id": 2, "prom\x00', b'{"id": 2, "p\n'):
        job.target.write_bytes(first + torn)  # as after a power failure
        assert job.run(resume=True) == [1, 1] and job.target.read_bytes() == whole
    job.target.write_bytes(re.sub(rb'"eos", "stats": {[^}]*}', b'"length"', whole))
    assert job.run(resume=True) == [40, 6], "records without statistics are kept"


def test_a_file_of_other_records_is_left_alone(job: Job) -> None:
    job.run()
    whole = job.target.read_bytes()
    first, second, *_ = whole.splitlines(keepends=True)
    no_records = (b"something else\n" * 2, b'{"config": 1}', b"one line", b"{}\n", b'{"id": 3, "p')
    cases = dict.fromkeys(no_records, "line 1, is not a record of a batch") | {
        second + first: "line 1, is not about line 1 of the input",
        first.replace(b': ""', b': "other"', 1): "line 1, is not about line 1 of the input",
        whole + first: "line 41, is more than the input has lines for",
        first + b"{}\n" + second: "line 2, is not a record of a batch",
    }
    for content, message in cases.items():
        job.target.write_bytes(content)
        with pytest.raises(ValueError, match=f"{message}.*--force to start over"):
            job.run(resume=True)
        assert job.target.read_bytes() == content


def test_an_output_is_kept_unless_forced(job: Job) -> None:
    """Also if another run wrote it meanwhile."""
    with open_input(str(job.source)) as stream:
        late = RecordFile(str(job.target), stream)
        with (
            RecordFile(str(job.target), stream),
            pytest.raises(ValueError, match="another process is writing to "),
        ):
            job.run(resume=True)
        job.run()
        whole = job.target.read_bytes()
        for run in (late.__enter__, job.run):
            with pytest.raises(ValueError, match="is not empty: use --resume .* --force to"):
                run()
    assert job.target.read_bytes() == whole
    job.target.write_bytes(b"precious")
    job.run(force=True)
    assert job.target.read_bytes() == whole


@pytest.mark.parametrize("ends", [(8,), (1, 3, 20), (2, 2, 2, 2), (10, 15)])
def test_an_interrupted_run_keeps_what_is_decoded(job: Job, ends: tuple[int, ...]) -> None:
    """The job is interrupted after each of these numbers of outputs, and run again each time."""
    decoded: list[int] = []

    def decode(requests: Iterable[tuple[int, list[int]]]) -> Iterator[tuple[int, Generation]]:
        for index, done in shout(requests, room=7):
            if decoded and len(decoded) in limits:
                limits.remove(len(decoded))
                raise KeyboardInterrupt
            decoded.append(index + 1)
            yield index, done

    job.run()
    whole = job.target.read_bytes().splitlines(keepends=True)
    job.target.unlink()
    limits = [sum(ends[: i + 1]) for i in range(len(ends))]
    while limits:
        with pytest.raises(KeyboardInterrupt):
            job.run(decode, resume=True)
        found = job.target.read_bytes().splitlines(keepends=True)
        for number, (row, expected) in enumerate(zip(found, whole, strict=False), 1):
            undone = {"id": number, "prompt": json.loads(expected)["prompt"],
                      "error": f"line {number}: {NOT_DECODED}"}  # fmt: skip
            assert row == expected or (json.loads(row) == undone and number not in decoded)
        assert max(decoded) <= len(found) < 40 and found[-1] == whole[len(found) - 1]
    job.run(decode, resume=True)
    assert job.target.read_bytes() == b"".join(whole)
    assert len(decoded) == len({*decoded}), "nothing is decoded twice"


@pytest.mark.parametrize(("name", "most"), [("MAX_HELD", 5), ("MAX_HELD_SIZE", 100)])
def test_errors_do_not_pile_up_behind_a_prompt(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(f"speculative_t5.cli.job.{name}", most)
    bad = b"<bad>" + b"x" * 25 + b"\n"  # five of these wait at most by either limit
    emitted: list[Record] = []

    def reading() -> Iterator[Line]:
        for line in lines(b"a\nb\n" + bad * 50 + b"c\n" + bad * 7 + b"d\n"):
            assert line.number - len(emitted) <= 8
            yield line

    process(reading(), shout, encode, emitted.append)
    assert [record.line.number for record in emitted] == list(range(1, 62))


def test_pipes_and_devices_can_be_written_to(job: Job, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    job.target = tmp_path / "fifo"
    with subprocess.Popen(["wc", "-l", tmp_path / "fifo"], stdout=subprocess.PIPE) as reader:
        job.run()
        assert reader.communicate()[0].split()[0] == b"40"
    for name in ("fifo", "/dev/null"):
        job.target = tmp_path / name
        with pytest.raises(ValueError, match="--resume needs an --output that is a file"):
            job.run(resume=True)
    job.run()


def test_the_input_is_never_the_output(job: Job, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(job.source)
    os.link(job.source, tmp_path / "hard")
    for name in ("in.txt", "link", "hard"):
        job.target = tmp_path / name
        for options in ({}, {"force": True}, {"resume": True}):
            with pytest.raises(ValueError, match="is the input itself: give another --output"):
                job.run(**options)
    assert job.source.read_bytes() == PROMPTS


def test_a_record_that_does_not_fit_leaves_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that stops half-way stands in for a full disk."""
    write, room = os.write, 1000

    def full(file: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            room = 10_000  # for records that should not be tried any more
            raise OSError(28, "No space left on device")
        room -= (written := write(file, data[:room]))
        return written

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        job.run()
    assert raised.value.filename == str(job.target)
    written = job.target.read_bytes()
    assert 0 < len(written) < 1000 and written.endswith(b"\n")
