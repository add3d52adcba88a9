"""`python -m speculative_t5 batch` as a user runs it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

from speculative_t5.cli.prompts import EMPTY

import pytest
from conftest import REPOSITORY, edit_json, run
from messages import check_message

MODELS = ("--model", "target", "--draft-model", "draft")
BATCH = ("batch", "in.txt", "--output", "out.jsonl", *MODELS)
SHORT = ("--max-tokens", "12")
SAMPLED = ("--temperature", "1", "--seed", "3")


@pytest.fixture
def here(place: Path, tmp_path: Path) -> Path:
    """A folder of its own with the models of `place` and 40 prompts, an empty line among them."""
    (tmp_path / "weights").symlink_to(place / "weights")
    words = ["old", "man", "The", "sea", "and", "was", "fish"]
    prompts = [" ".join(words[(i * j) % 7] for j in range(1, 2 + i % 9)) for i in range(40)]
    prompts[11] = ""
    (tmp_path / "in.txt").write_text("\n".join(prompts) + "\n")
    return tmp_path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def start(here: Path, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "speculative_t5", *arguments],
        cwd=here, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stderr=subprocess.PIPE,
        # What was started in the background of a script passes on that it ignores this signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options,
    )  # fmt: skip


def wait_for_lines(path: Path, number: int) -> None:
    until = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert time.monotonic() < until
        time.sleep(0.005)


def test_every_line_gets_its_record(here: Path) -> None:
    done = run(here, *BATCH, *SHORT)
    assert done.returncode == 3 and done.stdout == b""
    told, summary = done.stderr.decode().splitlines()
    assert told == f"line 12: {EMPTY}"
    parts = (
        "40 prompts",
        "1 with errors",
        "cut at --max-tokens 12",
        "tokens/s",
        "acceptance",
        "tokens per round",
        "peak",
    )
    assert all(part in summary for part in parts), summary
    prompts = (here / "in.txt").read_text().splitlines()
    records = read(here / "out.jsonl")
    assert [record["id"] for record in records] == list(range(1, 41))
    assert [record["prompt"] for record in records] == prompts
    assert records[11] == {"id": 12, "prompt": "", "error": f"line 12: {EMPTY}"}
    for record in records[:3]:
        alone = json.loads(
            run(here, *MODELS, *SHORT, "--prompt", record["prompt"], "--json").stdout
        )
        assert (record["text"], record["finish_reason"]) == (alone["text"], alone["finish_reason"])
        for name in ("rounds", "drafted", "accepted"):
            assert record["stats"][name] == alone["stats"][name]


def test_json_lines_flow_through_standard_streams(here: Path) -> None:
    lines = b'{"body": "The old man", "id": "x"}\n{"body": "and the sea"}\n'
    done = run(here, "batch", "-", "--field", "body", *MODELS, *SHORT, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["x", 2]
    (here / "in.jsonl").write_bytes(lines.replace(b"body", b"text"))
    run(here, "batch", "in.jsonl", "--output", "out.jsonl", *MODELS, *SHORT)
    assert (here / "out.jsonl").read_bytes() == done.stdout
    piped = run(here, "batch", "-", *MODELS, *SHORT, "--prefix", "The ", stdin=b"old man")
    assert json.loads(piped.stdout)["text"] == json.loads(done.stdout.splitlines()[0])["text"]


def test_records_do_not_hang_on_batch_size_or_shards(here: Path) -> None:
    outputs = []
    for size in ("1", "5", "64"):
        run(here, *BATCH, *SHORT, *SAMPLED, "--batch-size", size, "--force")
        outputs.append((here / "out.jsonl").read_bytes())
    assert outputs[0] == outputs[1] == outputs[2]
    for n in (1, 2, 3):
        done = run(here, *BATCH[:3], f"part{n}", *MODELS, *SHORT, *SAMPLED, "--shard", f"{n}/3")
        assert done.returncode in (0, 3)
    merge = "paste -d '\n' part1 part2 part3 | sed '/^$/d'"
    assert subprocess.check_output(["bash", "-c", merge], cwd=here) == outputs[0]


def test_prompts_longer_than_the_model_was_made_for_are_errors_unless_cut(here: Path) -> None:
    shutil.copytree(here / "weights" / "target", here / "short")
    edit_json(here / "short" / "config.json", n_positions=8)
    (here / "in.txt").write_text("the sea\n" + "the sea " * 20)
    arguments = (*BATCH[:4], "--model", "short", *SHORT)
    assert run(here, *arguments).returncode == 3
    fits, long = read(here / "out.jsonl")
    assert "text" in fits
    assert re.fullmatch(
        r"line 2: the prompt has \d+ tokens, more than the 8 that the model is made for: use "
        r"truncate=True \(--truncate\) to cut it, or max_source_length=N "
        r"\(--max-source-length N\) to allow more",
        long["error"],
    )
    assert run(here, *arguments, "--force", "--truncate").returncode == 0
    cut = read(here / "out.jsonl")
    assert cut[0] == fits and cut[1]["truncated"] is True
    assert run(here, *arguments, "--force", "--max-source-length", "999").returncode == 0
    whole = read(here / "out.jsonl")
    assert whole[0] == fits and whole[1].keys() == fits.keys()


MANY = 3000  # take seconds: a run is not to end before it is interrupted


def many(here: Path, number: int = MANY) -> None:
    lines = (here / "in.txt").read_text().splitlines()
    (here / "in.txt").write_text("".join(f"{lines[i % 40]} {i}\n" for i in range(number)))


def test_a_killed_run_goes_on_where_it_was(here: Path) -> None:
    many(here)
    assert run(here, *BATCH, *SHORT, *SAMPLED).returncode == 0
    whole = (here / "out.jsonl").read_bytes()
    cut = here / "cut.jsonl"
    for lines in (40, 130):
        process = start(here, *BATCH[:3], "cut.jsonl", *MODELS, *SHORT, *SAMPLED, "--resume")
        wait_for_lines(cut, lines)
        process.kill()
        process.communicate()
        assert lines <= cut.read_bytes().count(b"\n") < MANY
    kept = cut.read_bytes().rpartition(b"\n")[0] + b"\n"
    cut.write_bytes(whole[: len(kept) + 40])  # a torn line
    done = run(here, *BATCH[:3], "cut.jsonl", *MODELS, *SHORT, *SAMPLED, "--resume")
    assert done.returncode == 0, done.stderr
    assert b"of them before" in done.stderr
    assert cut.read_bytes() == whole


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda value: getattr(value, "name", None),
)
def test_signals_end_a_run_after_a_whole_line(here: Path, number: int, code: int) -> None:
    many(here)
    process = start(here, *BATCH, *SHORT)
    wait_for_lines(here / "out.jsonl", 40)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    written = (here / "out.jsonl").read_bytes()
    assert written.endswith(b"\n") and len(read(here / "out.jsonl")) < MANY
    lacking, summary, advice, *rest = errors.decode().splitlines()
    assert lacking.startswith("prompts with characters that the model's vocabulary lacks: ")
    assert re.match(rf"\[\d+ of {MANY:,} prompts, ", summary)
    assert advice == "what is written stays; --resume goes on after it"
    assert rest == (["error: interrupted"] if number == signal.SIGINT else [])


def test_a_reader_that_goes_away_ends_the_run(here: Path) -> None:
    many(here)
    with start(here, "batch", "in.txt", *MODELS, *SHORT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert process.returncode == 1
    assert "error" not in errors and "Traceback" not in errors


def test_an_input_that_vanishes_is_read_to_its_end(here: Path) -> None:
    many(here)
    process = start(here, *BATCH, *SHORT)
    wait_for_lines(here / "out.jsonl", 3)
    (here / "in.txt").unlink()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(read(here / "out.jsonl")) == MANY


def test_an_input_that_shrinks_is_told(here: Path) -> None:
    many(here)
    process = start(here, *BATCH, *SHORT)
    wait_for_lines(here / "out.jsonl", 3)
    os.truncate(here / "in.txt", 0)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(
        r"error: failed while running: in.txt had 3000 lines .* but \d+ when it was read",
        str(errors),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("batch",), "Missing argument 'INPUT'"),
        (("batch", "absent.txt", "--output", "x"), "absent.txt: No such file or directory"),
        (("batch", "weights", "--output", "x"), "weights is a folder, expected a file of prompts"),
        (("batch", "in.txt", "--output", "in.txt"), "in.txt is the input itself"),
        (("batch", "in.txt", "--output", "old"), "old has something in it: use --resume"),
        (
            ("batch", "in.txt", "--output", "old", "--resume"),
            "old, line 1, is no record of a batch",
        ),
        (("batch", "in.txt", "--output", "weights"), "weights"),
        (("batch", "in.txt", "--output", "absent/x"), "absent/x: No such file or directory"),
        (("batch", "in.txt", "--resume"), "--resume needs an --output that is a file"),
        (("batch", "in.txt", "--output", "x", "--resume", "--force"), "give one of them"),
        (
            ("batch", "in.txt", "--output", "x", "--shard", "9/8"),
            "a shard must be given as 1/8 to 8/8",
        ),
        (("batch", "in.txt", "--output", "x", "--format", "csv"), "--format must be text or jsonl"),
        (
            ("batch", "in.txt", "--output", "x", "--format", "text", "--field", "a"),
            "--field 'a' is for --format jsonl",
        ),
        (
            ("batch", "in.txt", "--output", "x", "--max-source-length", "1"),
            "max_source_length must be an integer of at least 2, got 1",
        ),
        (
            ("batch", "in.txt", "--output", "x", "--batch-size", "0"),
            "batch_size must be an integer from 1 to 65536, got 0",
        ),
        (("batch", "in.txt", "--output", "x", "--batch-size", "9" * 20), "batch_size must be an"),
        (("batch", "in.txt", "--output", ""), "the output must be the name of a file, or -"),
        (("batch", "in.txt", "--output", "/dev/null", "--resume"), "an --output that is a file"),
        (("batch", "in.txt", "--output", "x", "--prefix", b"\xff"), "--prefix is not UTF-8: byte"),
        (("batch", "in.txt", "--output", "x", "--temperature", "-1"), "temperature must be 0 or"),
        (
            ("batch", "in.txt", "--output", "x", "--max-tokens", "0"),
            "max_tokens must be an integer of at least 1",
        ),
        (
            ("batch", "in.txt", "--output", "x", "--model", "absent"),
            "is named 'absent', and",
        ),
        (("--seed", "3", "batch", "in.txt"), "--seed stands before the word batch"),
        (("in.txt",), "No such command 'in.txt' (a prompt is given by --prompt)"),
    ],
)
def test_bad_arguments_get_one_line_and_leave_nothing(
    here: Path, arguments: tuple[str | bytes, ...], message: str
) -> None:
    (here / "old").write_text("precious\nthings\n")
    before = (here / "in.txt").read_bytes()
    models = () if "--model" in arguments or "--seed" in arguments else MODELS
    done = run(here, *arguments, *(models if "batch" in arguments else ()))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: ") and message in line, line
    check_message(line.removeprefix("error: "))
    assert done.stdout == b"" and not (here / "x").exists()
    assert (here / "old").read_text() == "precious\nthings\n"
    assert (here / "in.txt").read_bytes() == before


def shell(here: Path, command: str) -> subprocess.CompletedProcess[bytes]:
    """A command line in which $B is this program."""
    environment = {"PYTHONPATH": str(REPOSITORY), "B": f"{sys.executable} -m speculative_t5 batch"}
    return subprocess.run(
        ["bash", "-c", command], cwd=here, env=os.environ | environment, capture_output=True,
        timeout=60,
    )  # fmt: skip


def test_what_others_wrote_to_standard_output_is_never_cut(here: Path) -> None:
    """A limit on file sizes stands in for a disk that is full."""
    (here / "all").write_bytes(b"x" * 2**20)
    done = shell(here, f"ulimit -f 1024; $B in.txt {' '.join(MODELS)} >> all")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(b"error: standard output: File too large; ")
    assert (here / "all").read_bytes() == b"x" * 2**20


def test_standard_streams_may_be_closed(here: Path) -> None:
    options = " ".join((*MODELS, *SHORT))
    assert shell(here, f"$B in.txt --output a {options} 2>&-").returncode == 3
    assert shell(here, f"$B in.txt --output b {options} <&- >&- 2>&-").returncode == 3
    assert (here / "a").read_bytes() == (here / "b").read_bytes() != b""
    done = shell(here, f"$B in.txt {options} >&-")
    assert b"the records were to go to standard output, which is closed" in done.stderr
    done = shell(here, f"$B - {options} <&-")
    assert b"the prompts were to come from standard input, which is closed" in done.stderr


def test_a_pipe_is_answered_in_order_as_it_comes(here: Path) -> None:
    with start(
        here, "batch", "-", *MODELS, *SHORT, "--batch-size", "1",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        for number in (1, 2, 3):
            process.stdin.write(b"The sea\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == number


def test_only_the_first_errors_are_shown(here: Path) -> None:
    (here / "in.txt").write_bytes(b"\x1b[31m\xff\n" * 300)
    done = run(here, *BATCH)
    assert done.returncode == 3
    lines = done.stderr.decode().splitlines()
    assert lines[0] == "line 1: not UTF-8: byte 0xff at offset 5; convert it to UTF-8"
    assert lines[10] == "further errors are in the output only" and len(lines) == 12
    assert len(read(here / "out.jsonl")) == 300
    (here / "in.txt").write_bytes(b"\xff\n" * 10)
    done = run(here, *BATCH, "--force")
    assert len(done.stderr.splitlines()) == 11 and b"further" not in done.stderr


def test_a_resumed_run_tells_of_earlier_errors_and_cuts(here: Path) -> None:
    assert run(here, *BATCH, *SHORT).returncode == 3
    again = run(here, *BATCH, *SHORT, "--resume")
    assert again.returncode == 3
    cut = sum(record.get("finish_reason") == "length" for record in read(here / "out.jsonl"))
    assert cut > 0 and again.stderr.decode() == (
        f"[40 prompts, 40 of them before, 1 with errors, {cut} cut at --max-tokens 12]\n"
    )


def test_a_terminal_is_shown_prompts_tokens_and_time_left(here: Path) -> None:
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "speculative_t5", *BATCH], cwd=here, stderr=end,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # what a terminal gives when nobody is left to write to it
        while part := os.read(terminal, 10_000):
            shown += part
    os.close(terminal)
    assert process.wait() == 3
    bar = rb"\d+/40 \[\d\d:\d\d<\d\d:\d\d, +[0-9.]+ prompts/s, [0-9,]+ tokens/s\]"
    assert re.search(bar, shown), shown.decode()
