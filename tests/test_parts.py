"""`batch --join`: parts of a job are put together, or left as they are."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speculative_t5.cli.job import UNDONE

import pytest
from commands import Call, Done
from messages import check_message


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with 20 prompts, one of them empty."""
    prompts = [f"prompt {number}" if number != 12 else "" for number in range(1, 21)]
    (tmp_path / "in.txt").write_text("\n".join(prompts) + "\n")
    return tmp_path


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


def assert_refused(done: Done, named: str) -> None:
    (line,) = done.err
    assert done.code == 2
    check_message(line.removeprefix("error: "), named)


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
    record = {"id": 3, "prompt": "prompt 3", "error": f"line 3: {UNDONE}"}
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
        (lambda here: (here / "in.txt").write_text("prompt 1\n"), "has more records than the"),
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
    assert_refused(call(*JOIN), named)
    assert {path.name: path.read_bytes() for path in here.glob("out.jsonl*")} == before


def test_options_that_do_not_go_with_joining(here: Path, call: Call) -> None:
    assert_refused(call(*JOIN, "--resume"), "--join replaces OUTPUT")
    assert_refused(call("batch", "in.txt", "--join"), "--join needs the --output")


def test_a_part_that_is_being_written_is_not_joined(here: Path, call: Call) -> None:
    write_parts(here, 10, 10)
    with (here / "out.jsonl.1-of-2").open() as part:  # a lock belongs to an open file
        fcntl.flock(part, fcntl.LOCK_EX)
        assert_refused(call(*JOIN), "a process is writing to")
