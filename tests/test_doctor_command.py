"""The command `doctor`: it reports whatever happens to its checks, and names no private folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from speculative_t5.cli import doctor as command
from speculative_t5.doctor import CHECKS, Check, Finding, Subject, checks, environment, outputs, run

import pytest
from checkpoints import write_causal
from commands import Call, on_a_terminal
from conftest import REPOSITORY
from messages import check_message

NAMES = [check.name for check in CHECKS]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.abort()", "the process ended with signal 6, SIGABRT"),
        ("import time; time.sleep(9)", "it did not end within 0.5 s"),
        ("raise ValueError('no weights')", "exit code 1: ValueError: no weights"),
        ("pass", "the process ended with exit code 0"),
    ],
)
def test_a_process_that_crashes_or_hangs_is_a_finding(
    code: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "COMMAND", (sys.executable, "-Sc", code))
    found = run(Check(outputs.known, "", deadline=0.5 if "sleep" in code else 60), Subject())
    assert (found.name, found.status) == ("known", "failed") and reason in found.reason


def faked(monkeypatch: pytest.MonkeyPatch, **statuses: Any) -> list[Subject]:
    """Replace all checks: those that are named have that status, all others are ok."""
    seen: list[Subject] = []

    def run(check: Check, subject: Subject) -> Finding:
        seen.append(subject)
        status = statuses.get(check.name, "ok")
        reason = f"see {subject.model}/config.json, {'and so on ' * 9}"
        return Finding(check.name, status, reason, ("a note",), {"path": [subject.model]}, 1.0)

    monkeypatch.setattr(command, "run", run)
    return seen


@pytest.mark.parametrize("status", ["ok", "skipped", "failed"])
def test_only_failures_change_the_exit_code(
    status: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked(monkeypatch, rows=status)
    done = call("doctor")
    assert (done.code, done.err) == (int(status == "failed"), [])
    lines = done.out.splitlines()
    assert lines[0] == "speculative_t5 doctor: correct-base, drafts by correct-small"
    assert [line.split()[0] for line in lines[2:-2] if line[:1] != " "] == NAMES
    assert f"rows      {status.ljust(7)}  see" in done.out  # the path may need another line
    assert ("1 of 10 checks failed in 0 s: rows" in lines[-1]) == (status == "failed")
    assert max(map(len, lines)) <= 80


def test_checks_are_chosen(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch)

    def ran(*options: str) -> list[str]:
        done = call("doctor", "--json", *options)
        return [check["name"] for check in json.loads(done.out)["checks"]]

    assert ran("--only", "rows", "--only", "device") == ["device", "rows"]
    assert ran("--skip", "greedy", "--skip", "speed") == [
        name for name in NAMES if name not in ("greedy", "speed")
    ]
    assert [line.split()[0] for line in call("doctor", "--list").out.splitlines()] == NAMES


@pytest.mark.parametrize(
    "options",
    [
        ("--only", "row"), ("--skip", "all"), ("--only", "rows", "--skip", "rows"),
        ("--model", "no-such-model"), ("--model", "no/such/folder"),
        ("--draft-model", "no-such-model"), ("--dtype", "float64"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line(
    options: tuple[str, ...], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked(monkeypatch)
    done = call("doctor", *options)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err
    check_message(line.removeprefix("error: "), options[-1])


def test_json_has_every_number(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = faked(monkeypatch, known="skipped", rows="failed")
    done = call("doctor", "--json", "--model", "weights/target", "--draft-model", "lookup")
    (result,) = done.records
    assert done.code == 1
    assert result.keys() == {"model", "draft", "dtype", "checks", "failed", "seconds"}
    assert (result["model"], result["draft"], result["dtype"]) == ("weights/target", None, None)
    assert result["failed"] == ["rows"]
    fields = {"name", "status", "reason", "notes", "details", "seconds"}
    assert all(check.keys() == fields for check in result["checks"])
    assert {subject.draft for subject in seen} == {None}


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_the_home_folder_is_not_in_the_report(
    option: tuple[str, ...], place: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(place))
    faked(monkeypatch)
    done = call("doctor", *option, "--model", str(place / "weights" / "target"))
    assert str(place) not in done.out and "~/weights/target/config.json" in done.out


def test_the_home_folder_is_found_however_it_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    monkeypatch.setenv("HOME", str(link))
    home = tmp_path.resolve()
    assert command.without_home(f"{link}/x {home}/x {home}x") == f"~/x ~/x {home}x"
    monkeypatch.setenv("HOME", "/")
    assert command.without_home("/ and /x") == "/ and /x"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert command.without_home("/x ~") == "/x ~"


def test_a_draft_is_reported_as_it_was_given(
    place: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of one from the Hub is named after a commit."""
    seen = faked(monkeypatch)
    folder = str(place / "weights" / "draft")
    monkeypatch.setattr(
        command, "find_cached", lambda name: Path(folder) if name == "some/draft" else None
    )
    options = ("--model", "weights/target", "--draft-model", "some/draft")
    assert call("doctor", *options).out.startswith(
        "speculative_t5 doctor: weights/target, drafts by some/draft\n"
    )
    assert seen[0].draft == folder
    assert call("doctor", "--json", *options).records[0]["draft"] == "some/draft"


def test_a_broken_model_is_refused_before_any_check(call: Call, place: Path) -> None:
    done = call("doctor", "--model", str(place / "bert"))
    assert (done.code, done.out) == (2, "")
    (line,) = done.err
    assert "this is a bert" in line
    assert call("doctor", "--only", "versions", "--model", str(place / "bert")).code == 0


def test_a_draft_that_does_not_fit_is_refused(call: Call, tmp_path: Path) -> None:
    write_causal(tmp_path, "opt")
    done = call("doctor", "--model", "weights/target", "--draft-model", str(tmp_path))
    assert (done.code, done.out) == (2, "")
    *_, line = done.err
    check_message(line.removeprefix("error: "), str(tmp_path))
    assert "the target is an encoder-decoder" in line and "the draft decoder-only" in line
    assert call("doctor", "--only", "versions", "--model", str(tmp_path)).code == 0
    Subject(str(tmp_path), str(tmp_path)).check()


def test_another_model_of_the_shipped_ones_name_is_not_it(tmp_path: Path) -> None:
    folder = tmp_path / "weights" / "correct-base"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert not Subject(str(folder)).is_shipped
    shipped = REPOSITORY / "weights" / "correct-base"
    assert Subject(str(shipped)).is_shipped and Subject().is_shipped


def test_a_terminal_shows_which_check_runs(place: Path) -> None:
    """The check runs in a process of its own, and finds what it finds in this one."""
    shown = on_a_terminal(
        place, "-m", "speculative_t5", "doctor", "--only", "versions", "--model", "weights/target"
    )
    reason = environment.versions(Subject()).reason
    assert "versions (1 of 1) ..." in shown and "\rversions  ok " in shown
    assert reason in " ".join(shown.split())
