"""`batch` as a user runs it: records, streams, signals, full disks, resuming."""

import json
import os
import re
import signal
import subprocess
from itertools import zip_longest
from pathlib import Path
from typing import Any

from speculative_t5.cli.job import RecordFile
from speculative_t5.tokenizers.prompt_files import EMPTY_LINE

import pytest
from commands import Call, in_a_shell, start

# Outputs of commands are compared with those of others.
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
MODELS = ("--model", "target", "--draft-model", "draft")
SHORT = ("--max-tokens", "12", "--num-draft", "5")
BATCH = ("batch", "in.txt", "--output", "out.jsonl", *MODELS)
SAMPLED = ("--temperature", "1", "--seed", "3")


@pytest.fixture
def here(place: Path, tmp_path: Path) -> Path:
    """A folder with the models of `place` and 40 prompts, one of them empty."""
    (tmp_path / "weights").symlink_to(place / "weights")
    words = ["old", "man", "The", "sea", "and", "was", "fish"]
    prompts = [" ".join(words[(i * j) % 7] for j in range(1, 2 + i % 9)) for i in range(40)]
    prompts[11] = ""
    (tmp_path / "in.txt").write_text("\n".join(prompts) + "\n")
    return tmp_path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_every_line_gets_its_record(call: Call, here: Path) -> None:
    done = call(*BATCH, *SHORT)
    assert (done.code, done.out) == (3, "")
    error, summary = done.err
    assert error == f"line 12: {EMPTY_LINE}"
    assert "40 prompts" in summary and "1 with errors" in summary
    records = read(here / "out.jsonl")
    prompts = enumerate((here / "in.txt").read_text().splitlines(), 1)
    assert [(record["id"], record["prompt"]) for record in records] == [*prompts]
    (alone,) = call(*MODELS, *SHORT, "--prompt", records[0]["prompt"], "--json").records
    assert records[0]["text"] == alone["text"]
    again = call(*BATCH, *SHORT, "--resume")
    cut = sum(record.get("finish_reason") == "length" for record in records)
    (said,) = again.err
    assert said.startswith(f"[40 prompts, 40 of them earlier, 1 with errors, {cut} cut at ")
    assert again.code == 3 and cut > 0


def test_json_lines_go_through_standard_streams(call: Call, here: Path) -> None:
    lines = '{"body": "The old man", "id": "x"}\n{"body": "and the sea"}\n'
    done = call("batch", "-", "--field", "body", *MODELS, *SHORT, stdin=lines)
    assert done.code == 0 and [record["id"] for record in done.records] == ["x", 2]
    (here / "in.JSONL").write_text(lines.replace("body", "prompt"))
    call("batch", "in.JSONL", "--output", "out.jsonl", *MODELS, *SHORT)
    assert (here / "out.jsonl").read_text() == done.out
    piped = call("batch", "-", *MODELS, *SHORT, "--prefix", "The ", stdin="old man")
    assert piped.records[0]["text"] == done.records[0]["text"]
    assert piped.err[-1].startswith("[1 prompt, ")


def test_an_input_without_prompts_is_refused_at_its_first_line(call: Call, here: Path) -> None:
    odd = '{"text": "a", "label": 1}\n'
    (here / "in.jsonl").write_text("\n[1]\n" + odd * 100)
    command = ("batch", "in.jsonl", "--output", "out.jsonl", *MODELS, *SHORT)
    call(*command).check_error("in.jsonl, line 2: not a JSON object but an array")
    assert not (here / "out.jsonl").exists()
    (here / "in.jsonl").write_text("x" + odd + odd * 100 + '{"prompt": ""}\n')
    done = call(*command)
    assert done.code == 3 and len(read(here / "out.jsonl")) == 102, "a line has the field"
    for last in (odd, '{"prompt": "a"}\n'):
        piped = call("batch", "-", "--format", "jsonl", *MODELS, stdin=odd + last, pipe=True)
        piped.check_error("standard input, line 1: no field 'prompt' (found: 'text', 'label')")
    piped = call("batch", "-", "--field", "text", *MODELS, stdin="{}x\n" + odd, pipe=True)
    assert piped.code == 3 and len(piped.records) == 2


def test_records_do_not_depend_on_batch_size_or_shards(call: Call) -> None:
    command = ("batch", "in.txt", *MODELS, *SHORT, *SAMPLED)
    one, other = (call(*command, "--batch-size", size).out for size in ("5", "64"))
    shards = (call(*command, "--shard", f"{n}/3").out.splitlines() for n in (1, 2, 3))
    merged = [line for lines in zip_longest(*shards) for line in lines if line]
    assert one == other == "".join(f"{line}\n" for line in merged)


def test_a_stopped_run_continues_where_it_was(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (*BATCH, *SHORT, *SAMPLED, "--batch-size", "4")
    out, append = here / "out.jsonl", RecordFile.append_bytes
    call(*command)
    whole = out.read_bytes()
    out.unlink()
    written: list[bytes] = []

    def stop(self: RecordFile, data: bytes) -> None:
        """End the run at its fourth record: by a signal, or half-way in it."""
        written.append(data)
        is_last = len(written) == 4
        append(self, data[:-5] if is_last and code == 1 else data)
        if is_last and code == 1:
            raise MemoryError
        if is_last:
            signal.raise_signal(code - 128)

    for code in (128 + signal.SIGINT, 128 + signal.SIGTERM, 1):
        written.clear()
        with monkeypatch.context() as patch:
            patch.setattr(RecordFile, "append_bytes", stop)
            done = call(*command, "--resume")
        assert done.code == code and ("error: interrupted" in done.err) == (code == 130)
        summary, advice = (line for line in done.err if not line.startswith(("line", "error")))
        assert re.match(r"\[\d+ of 40 prompts, ", summary)
        assert advice == "the records written so far are kept; --resume decodes the other lines"
        assert out.read_bytes().endswith(b"\n") == (code > 1)
        assert 0 < out.read_bytes().count(b'"text"') < 39
    done = call(*command, "--resume")
    assert done.code == 3 and " of them earlier" in done.err[-1]
    assert out.read_bytes() == whole


def test_a_reader_that_goes_away_ends_the_run(here: Path) -> None:
    line = json.dumps({"prompt": "The sea", "notes": "much" * 1000}) + "\n"
    (here / "in.jsonl").write_text(line * 40)  # more than a pipe holds
    with start(here, "batch", "in.jsonl", *MODELS, *SHORT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert process.returncode == 1 and "error" not in errors and "Traceback" not in errors


def test_an_input_that_shrinks_is_an_error(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = RecordFile.append_bytes

    def shrink(self: RecordFile, data: bytes) -> None:
        append(self, data)
        os.truncate(here / "in.txt", 0)

    monkeypatch.setattr(RecordFile, "append_bytes", shrink)
    (here / "in.txt").write_bytes((b"The sea " * 12 + b"\n") * 200)  # more than is read at once
    done = call(*BATCH, "--max-tokens", "1", "--batch-size", "2")
    assert done.code == 1
    found = r"error: failed while running: in.txt changed .* had 200 lines to do, then \d+;"
    assert re.match(found, done.err[-1])


def test_standard_output_that_others_wrote_to_is_never_cut(here: Path) -> None:
    """A limit on file sizes, of 1 or 2 MiB by the shell's unit, stands in for a full disk."""
    (here / "all").write_bytes(b"x" * 2**21)
    options = " ".join((*MODELS, *SHORT))
    done = in_a_shell(here, f"ulimit -f 2048; $P batch in.txt {options} >> all")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(b"error: standard output: File too large; ")
    assert (here / "all").read_bytes() == b"x" * 2**21


def test_standard_streams_may_be_closed(call: Call, here: Path) -> None:
    options = (*MODELS, *SHORT)
    call(*BATCH, *SHORT)
    closed = f"$P batch in.txt --output a {' '.join(options)} <&- >&- 2>&-"
    assert in_a_shell(here, closed).returncode == 3
    assert (here / "a").read_bytes() == (here / "out.jsonl").read_bytes() != b""


def test_a_pipe_is_answered_in_order_as_it_comes(here: Path) -> None:
    with start(
        here,
        "batch",
        "-",
        *MODELS,
        *SHORT,
        "--batch-size",
        "1",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for number in (1, 2, 3):
            process.stdin.write(b"The sea\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == number


def test_only_the_first_errors_are_shown(call: Call) -> None:
    done = call("batch", "-", *MODELS, *SHORT, stdin=b"\x1b[31m\xff\n" * 300 + b"The sea")
    assert done.code == 3 and len(done.records) == 301
    assert done.err[0] == "line 1: not UTF-8: byte 0xff at offset 5; convert it to UTF-8"
    assert done.err[10] == "further errors are only in the output" and len(done.err) == 12
