"""How every command ends: an error is one line and an exit code, a signal waits for its block."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from collections.abc import Iterator

from speculative_t5.cli import terminal
from speculative_t5.cli.terminal import signals_held

import pytest
import typer
from messages import check_message

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(Exception):
    pass


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers that raise, whatever the runner's are."""

    def end(number: int, _: object) -> None:
        raise Ended(number)

    before = {number: signal.signal(number, end) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_waits_for_the_block(number: int) -> None:
    done = []
    with pytest.raises(Ended, match=str(int(number))), signals_held():
        signal.raise_signal(number)
        done.append("all of it")
    assert done
    with pytest.raises(Ended):
        signal.raise_signal(number)


def test_a_second_signal_acts_at_once() -> None:
    with pytest.raises(Ended, match=str(int(signal.SIGTERM))), signals_held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it should have ended")


def test_ignored_signals_stay_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_held():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


SYSTEM = [(OSError(n, os.strerror(n), "some/file"), "some/file: ", None) for n in terminal.ADVICE]


def lines_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], app: typer.Typer,
    code: int | None,
) -> list[str]:  # fmt: skip
    """Run an application, check its exit code if there is one, and return what it says."""
    monkeypatch.setattr(sys, "argv", ["some"])
    monkeypatch.setattr(warnings, "showwarning", None)  # put back what the application replaces
    with pytest.raises(SystemExit) as ended:
        terminal.run(app, "python -m some")
    assert code is None or ended.value.code == code
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("error", "found", "code"),
    [
        *SYSTEM,
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device", 1),
        (OSError("some text"), "some text", 2),
        (OSError(errno.EAGAIN, "a text: wait for its end"), "a text", 2),
        (RuntimeError("[malloc] Unable to allocate 9 bytes."), "Unable to allocate", 1),
        (RuntimeError("a\n b\x1b[31m"), "a b\N{REPLACEMENT CHARACTER}[31m", 1),
        (MemoryError(), "failed while running: MemoryError", 1),
        (terminal.Failure("a file has 3 lines: run it again"), "failed while running: a file", 1),
        (ValueError("a file is damaged: copy it again"), "a file is damaged", 2),
    ],
)
def test_any_error_becomes_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    error: Exception, found: str, code: int | None,
) -> None:  # fmt: skip
    app = terminal.new_app()

    @app.command()
    def fail() -> None:
        raise error

    (line,) = lines_of(monkeypatch, capsys, app, code)
    check_message(line.removeprefix("error: "), found)
    assert line.startswith("error: ")


def test_a_warning_becomes_one_line_without_its_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = terminal.new_app()

    @app.command()
    def warn() -> None:
        warnings.warn("float16\noverflows", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert lines_of(monkeypatch, capsys, app, 0) == ["warning: float16 overflows"]
