"""Commands in several processes that share a model, or the lines, whose parts are then joined."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speculative_t5 import distributed
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.cli import terminal
from speculative_t5.cli.job import NOT_DECODED
from speculative_t5.distributed import ProcessGroup, ProcessMessage

import mlx.core as mx
import pytest
from commands import Call, start
from conftest import V1_0, write_checkpoint
from messages import check_message
from ranks import Pair, run_ranks

pytestmark = [pytest.mark.cpu, pytest.mark.forks]
PROGRAM = ("-m", "speculative_t5")
PAIR = ("--model", "even", "--draft-model", "draft", "--max-tokens", "12")
SAMPLED = ("--temperature", "1", "--seed", "3", "--num-draft", "5")
BATCH = ("batch", "in.txt", *PAIR, *SAMPLED, "--output")
PATCHED = "from speculative_t5.cli import batch, job, main\n{}\nmain()"
DYING = PATCHED.format("""
import os

written = iter([1, 2])
to_json = job.Record.to_json
job.Record.to_json = lambda record: to_json(record) if next(written, 0) else os.kill(os.getpid(), 9)
""")
ANOTHER_INPUT = """
import hashlib
from types import SimpleNamespace

batch.hashlib = SimpleNamespace(file_digest=lambda *_: hashlib.sha256())
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    """A folder with a target that two processes can share, another one, and a draft."""
    folder = tmp_path_factory.mktemp("models")
    shape = V1_0 | {"num_heads": 4}
    for name, where, seed in (("even", "weights", 1), ("draft", "weights", 2), ("even", "new", 3)):
        write_checkpoint(folder / "checkpoint", shape, spiece, seed=seed)
        convert(str(folder / "checkpoint"), folder / where / name)
    return folder


@pytest.fixture
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with these models and 20 prompts, one of them empty."""
    (tmp_path / "weights").symlink_to(models / "weights")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_prompts(tmp_path)
    return tmp_path


def write_prompts(folder: Path) -> None:
    words = ["old", "man", "The", "sea", "and", "was", "fish"]
    prompts = [" ".join(words[(i * j) % 7] for j in range(1, 2 + i % 9)) for i in range(20)]
    prompts[11] = ""
    (folder / "in.txt").write_text("\n".join(prompts) + "\n")


@pytest.fixture(scope="module")
def expected(models: Path) -> bytes:
    """The records that one process writes."""
    write_prompts(models)
    alone = start(models, *BATCH, "alone.jsonl", "--force")
    _, errors = alone.communicate()
    assert alone.returncode == 3, errors
    return (models / "alone.jsonl").read_bytes()


def together(folder: Path, size: int, *arguments: str) -> list[tuple[int, str, str]]:
    return run_ranks(folder, [(*PROGRAM, *arguments)] * size)


def assert_refused(results: list[tuple[int, str, str]], named: str) -> None:
    """By all processes, and in one line of the first."""
    assert [code for code, _, _ in results] == [2, 2]
    assert results[1][1:] == ("", ""), results[1]
    (line,) = results[0][2].splitlines()
    check_message(line.removeprefix("error: "), named)


def joined(here: Path, *more: str) -> tuple[int, str]:
    """Join the parts of out.jsonl; return the exit code and what is said."""
    alone = start(here, *BATCH, "out.jsonl", "--join", *more)
    _, errors = alone.communicate()
    return alone.returncode, errors.decode() if isinstance(errors, bytes) else errors


def test_each_process_has_some_of_the_lines(here: Path, expected: bytes) -> None:
    results = together(here, 3, *BATCH, "out.jsonl")
    assert [code for code, _, _ in results] == [0, 0, 0]
    assert all(output == "" for _, output, _ in results)
    assert results[0][2].startswith("process 1 of 3: [7 prompts, ")
    assert "run the same command with --join" in results[0][2].splitlines()[-1]
    assert [errors.count("line 12: empty") for _, _, errors in results] == [0, 0, 1]
    assert [len(errors.splitlines()) for _, _, errors in results] == [2, 0, 1]
    assert not (here / "out.jsonl").exists()
    code, said = joined(here)
    assert code == 3 and said == "[20 records in out.jsonl, 1 with errors]\n"
    assert (here / "out.jsonl").read_bytes() == expected
    assert not list(here.glob("out.jsonl.*"))


def test_processes_leave_an_output_that_was_joined_alone(here: Path, expected: bytes) -> None:
    (here / "out.jsonl").write_bytes(expected)
    for more in ((), ("--resume",)):
        results = together(here, 2, *BATCH, "out.jsonl", *more)
        assert_refused(results, "out.jsonl is not empty")
    assert (here / "out.jsonl").read_bytes() == expected


def test_a_process_with_a_shard_of_its_own_works_by_itself(here: Path, expected: bytes) -> None:
    command = [(*PROGRAM, *BATCH, f"{number}.jsonl", "--shard", f"{number}/2") for number in (1, 2)]
    results = run_ranks(here, command)
    assert sorted(code for code, _, _ in results) == [0, 3]
    lines = [(here / f"{number}.jsonl").read_bytes().splitlines(True) for number in (1, 2)]
    assert b"".join(a + b for a, b in zip(*lines, strict=True)) == expected


def test_a_process_that_dies_costs_its_own_lines(here: Path, expected: bytes) -> None:
    (here / "out.jsonl").write_text("of an earlier run\n")
    (here / "out.jsonl.1-of-3").write_text("of another one\n" * 500)
    ask = (*BATCH, "out.jsonl", "--force")
    results = run_ranks(here, [(*PROGRAM, *ask), ("-c", DYING, *ask), (*PROGRAM, *ask)])
    assert [code for code, _, _ in results] == [0, -9, 0]
    kept = [(here / f"out.jsonl.{n}-of-3").read_bytes().count(b"\n") for n in (1, 2, 3)]
    assert kept == [7, 2, 6]
    code, said = joined(here, "--force")
    assert code == 2 and "out.jsonl.2-of-3 has no record of line" in said
    assert (here / "out.jsonl").read_text() == "of an earlier run\n"
    (here / "out.jsonl").unlink()
    results = together(here, 3, *BATCH, "out.jsonl", "--resume")
    assert [code for code, _, _ in results] == [0, 0, 0]
    assert "7 of them earlier" in results[0][2]
    assert joined(here)[0] == 3
    assert (here / "out.jsonl").read_bytes() == expected and not list(here.glob("out.jsonl.*"))


def test_processes_share_the_model_and_the_first_one_writes(here: Path, expected: bytes) -> None:
    sharing = (*BATCH, "out.jsonl", "--parallel", "tensor")
    results = together(here, 2, *sharing)
    assert [code for code, _, _ in results] == [3, 0] and results[1][1:] == ("", "")
    assert results[0][2].startswith("line 12: empty")
    assert (here / "out.jsonl").read_bytes() == expected
    records = expected.splitlines(keepends=True)[:9]
    undone = json.loads(records[4]) | {"error": f"line 5: {NOT_DECODED}"}
    records[4] = json.dumps(undone).encode() + b"\n"
    records[8] = records[8][:30]  # torn
    (here / "out.jsonl").write_bytes(b"".join(records))
    together(here, 2, *sharing, "--resume")
    assert (here / "out.jsonl").read_bytes() == expected


def test_the_first_process_prints_the_text(here: Path, call: Call) -> None:
    ask = (*PAIR, "--prompt", "The old man and the fish")
    (code, output, errors), *others = together(here, 2, *ask)
    assert code == 0 and others == [(0, "", "")]
    assert output == call(*ask).out
    assert "tokens per round" in errors


WEIGHTS = "SPECULATIVE_T5_WEIGHTS"


ASK, RECORD = ("--prompt", "old man"), ("batch", "in.txt", "--output", "out.jsonl")


@pytest.mark.parametrize(
    ("command", "more", "environment", "named"),
    [
        (ASK, ("--max-tokens", "5"), {}, "differ in the command line"),
        (ASK, (), {WEIGHTS: "new"}, "differ in the target: weights"),
        (ASK, (), {WEIGHTS: "none", "HOME": "none"}, "process 2 of 2: no model on this machine"),
        (RECORD, (), {WEIGHTS: "new"}, "differ in the target: weights"),
    ],
    ids=["options", "weights", "no model", "batch"],
)
def test_a_process_that_would_do_something_else_is_named(
    here: Path,
    models: Path,
    command: tuple[str, ...],
    more: tuple[str, ...],
    environment: dict[str, str],
    named: str,
) -> None:
    (here / "weights").unlink()
    ask = (*PROGRAM, *command, "--model", "even")
    first = {WEIGHTS: str(models / "weights")}
    other = first | {name: str(models / value) for name, value in environment.items()}
    assert_refused(run_ranks(here, [ask, (*ask, *more)], [first, other]), named)
    assert not [path for path in here.glob("out.jsonl*") if path.stat().st_size]


@pytest.mark.parametrize("parallel", ["data", "tensor"])
def test_a_run_that_is_refused_changes_nothing(here: Path, parallel: str) -> None:
    (here / "out.jsonl").write_text("of an earlier run\n")
    other = PATCHED.format(ANOTHER_INPUT)
    ask = (*BATCH, "out.jsonl", "--force", "--parallel", parallel)
    results = run_ranks(here, [(*PROGRAM, *ask), ("-c", other, *ask)])
    assert_refused(results, "process 2 of 2 and process 1 differ in the input")
    assert (here / "out.jsonl").read_text() == "of an earlier run\n"
    parts = list(here.glob("out.jsonl.*"))
    assert all(part.stat().st_size == 0 for part in parts)
    if parallel == "data":
        again = together(here, 2, *BATCH, "out.jsonl", "--force")  # empty parts are no hindrance
        assert [code for code, _, _ in again] == [0, 0]
        assert joined(here, "--force")[0] == 3 and not list(here.glob("out.jsonl.*"))


def test_a_launched_process_may_be_the_only_one(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_RANK", "0")
    assert call("--version").code == 0
    (here / "empty").write_text("")
    monkeypatch.setenv("MLX_HOSTFILE", "empty")  # as mlx.launch -n 1
    assert call("--version").code == 0
    monkeypatch.delenv("MLX_HOSTFILE")
    monkeypatch.setenv("MLX_RANK", "1")
    call("--version").check_error("MLX finds no others")


def test_a_process_of_another_version_is_named(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(_: object, message: ProcessMessage) -> list[ProcessMessage]:
        other = {"facts": {"the version of speculative_t5": "0.1"}, "own": {}}
        return [message, other]

    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setattr(mx.distributed, "init", Pair)
    monkeypatch.setattr(distributed, "exchange_messages", exchange)
    monkeypatch.setattr(terminal, "_processes", None)
    done = call(*PAIR, "--prompt", "old man")
    done.check_error("differ in the version of speculative_t5: 0.1, not")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the first of two processes tells the other one, which does not answer."""
    found: list[str] = []

    def exchange(_: object, message: ProcessMessage) -> list[ProcessMessage]:
        found.extend(message.values())
        return [message]

    monkeypatch.setattr(terminal, "_processes", ProcessGroup(Pair()))  # type: ignore[arg-type]
    monkeypatch.setattr(distributed, "exchange_messages", exchange)
    return found


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("models",), "models runs in one process"),
        (("--prompt", "-"), "one prompt on standard input"),
        (("batch", "pipe", "--output", "out.jsonl"), "several processes cannot read one pipe"),
        (("batch", "in.txt"), "standard output is not a file"),
        (("batch", "in.txt", "--output", "out.jsonl", "--parallel", "both"), "--parallel must be"),
        (("batch", "in.txt", "--output", "out.jsonl", "--join"), "--join is for one process"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(
    here: Path, call: Call, told: list[str], arguments: tuple[str, ...], named: str
) -> None:
    os.mkfifo(here / "pipe")
    with open(here / "pipe", "r+b", buffering=0):  # or to open it would wait for a writer
        done = call(*arguments)
    assert done.code == 2 and done.err == [f"error: {told[0]}"]
    check_message(told[0], named)


def test_the_same_error_in_all_processes_is_one_line(here: Path) -> None:
    assert_refused(together(here, 2, "--max-tokens", "0", "--prompt", "old"), "--max-tokens must")


def test_parts_of_another_number_of_processes_are_not_resumed(
    here: Path, call: Call, told: list[str], expected: bytes
) -> None:
    (here / "out.jsonl.3-of-3").write_bytes(expected.splitlines(keepends=True)[2])
    assert call(*BATCH, "out.jsonl", "--resume").code == 2
    check_message(told[0], "by one of 3 processes")


def write_parts(here: Path, *sizes: int) -> bytes:
    """Write records of the prompts as parts of several processes; return the whole."""
    lines = []
    for number, prompt in enumerate((here / "in.txt").read_text().splitlines(), 1):
        outcome = {"text": prompt.upper()} if prompt else {"error": "empty"}
        lines.append(json.dumps({"id": number, "prompt": prompt} | outcome).encode() + b"\n")
    for number, size in enumerate(sizes, 1):
        own = lines[number - 1 :: len(sizes)][:size]
        (here / f"out.jsonl.{number}-of-{len(sizes)}").write_bytes(b"".join(own))
    return b"".join(lines)


PART = "out.jsonl."
JOIN = ("batch", "in.txt", "--output", "out.jsonl", "--join")


def test_parts_are_joined_by_hand(here: Path, call: Call) -> None:
    whole = write_parts(here, 7, 7, 6)
    done = call(*JOIN)
    assert (done.code, done.err) == (3, ["[20 records in out.jsonl, 1 with errors]"])
    assert (here / "out.jsonl").read_bytes() == whole
    assert not list(here.glob("out.jsonl.*"))
    write_parts(here, 7, 7, 6)
    (here / "out.jsonl").write_text("mine\n")
    (line,) = call(*JOIN).err
    assert "use --force to replace it" in line and "--resume" not in line
    assert call(*JOIN, "--force").code == 3  # one record has an error
    assert (here / "out.jsonl").read_bytes() == whole


def tear(here: Path) -> None:
    (here / f"{PART}3-of-3").write_bytes((here / f"{PART}3-of-3").read_bytes()[:-5])


def leave_out(here: Path) -> None:
    _, *rest = (here / f"{PART}3-of-3").read_bytes().splitlines(keepends=True)
    record = {"id": 3, "prompt": "The and fish", "error": f"line 3: {NOT_DECODED}"}
    (here / f"{PART}3-of-3").write_bytes(json.dumps(record).encode() + b"\n" + b"".join(rest))


def swap(here: Path) -> None:
    (here / f"{PART}1-of-3").rename(here / "other")
    (here / f"{PART}2-of-3").rename(here / f"{PART}1-of-3")
    (here / "other").rename(here / f"{PART}2-of-3")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda here: (here / f"{PART}2-of-3").unlink(), f"{PART}2-of-3 is missing"),
        (tear, f"{PART}3-of-3 has no record of"),
        (leave_out, f"{PART}3-of-3 has no record of"),
        (swap, "is not about line 1 of the input"),
        (lambda here: (here / f"{PART}2-of-2").write_text("x"), "parts of 2 and of 3 pro"),
        (lambda here: (here / "in.txt").write_text("old\n"), "has more records than the"),
        (lambda here: (here / "out.jsonl").write_text("a\n"), "out.jsonl is not empty"),
        (lambda here: [p.unlink() for p in here.glob(f"{PART}*")], "no parts of out.jsonl"),
    ],
)
def test_parts_that_do_not_make_a_whole_are_kept(
    here: Path, call: Call, damage: Callable[[Path], Any], named: str
) -> None:
    write_parts(here, 7, 7, 6)
    damage(here)
    before = {path.name: path.read_bytes() for path in here.glob("out.jsonl*")}
    call(*JOIN).check_error(named)
    assert {path.name: path.read_bytes() for path in here.glob("out.jsonl*")} == before


def test_options_that_do_not_go_with_joining(here: Path, call: Call) -> None:
    call(*JOIN, "--resume").check_error("--join replaces OUTPUT")
    call("batch", "in.txt", "--join").check_error("--join needs the --output")


def test_a_part_that_is_being_written_is_not_joined(here: Path, call: Call) -> None:
    write_parts(here, 10, 10)
    with (here / "out.jsonl.1-of-2").open() as part:  # a lock belongs to an open file
        fcntl.flock(part, fcntl.LOCK_EX)
        call(*JOIN).check_error("a process is writing to")
