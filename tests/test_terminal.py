"""How every command ends, and what it shows: errors, warnings, tips, outputs in colour."""

import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from speculative_t5 import device, libraries
from speculative_t5.cli import terminal
from speculative_t5.cli.terminal import legend, shaded, show, signals_held
from speculative_t5.decoding import Stats
from speculative_t5.generation import Chunk

import pexpect
import pytest
from commands import PATHS, recording
from messages import check_message


class Ended(Exception):
    pass


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers that raise, whatever the runner's are."""

    def end(number: int, _: object) -> None:
        raise Ended(number)

    before = {number: signal.signal(number, end) for number in terminal.ENDING_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", terminal.ENDING_SIGNALS)
def test_a_signal_waits_for_the_block(number: int) -> None:
    done = []
    with pytest.raises(Ended, match=str(int(number))), signals_held():
        signal.raise_signal(number)
        done.append("all of it")
    assert done
    with pytest.raises(Ended):
        signal.raise_signal(number)
    with pytest.raises(Ended, match=str(int(signal.SIGTERM))), signals_held():
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("a second one acts at once")
    signal.signal(number, signal.SIG_IGN)
    with signals_held():
        signal.raise_signal(number)
    assert signal.getsignal(number) == signal.SIG_IGN


SYSTEM = [
    (OSError(n, os.strerror(n), "some/file"), "some/file: ", None) for n in terminal.ADVICE_BY_ERRNO
]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command; returns the exit code, and the lines that it says."""
    monkeypatch.setattr(sys, "argv", ["some"])
    monkeypatch.setattr(warnings, "showwarning", None)  # put back what the application replaces

    def run(command: Callable[[], None]) -> tuple[int, list[str]]:
        app = terminal.new_app()
        app.command()(command)
        with pytest.raises(SystemExit) as left:
            terminal.run(app, "python -m some")
        return int(left.value.code or 0), capsys.readouterr().err.splitlines()

    return run


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
    ended: Any, error: Exception, found: str, code: int | None
) -> None:
    def fail() -> None:
        raise error

    number, (line,) = ended(fail)
    assert number == code or code is None
    check_message(line.removeprefix("error: "), found)
    assert line.startswith("error: ")


def test_a_warning_becomes_one_line_without_its_source(ended: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        said = ended(lambda: warnings.warn("float16\noverflows", stacklevel=1))
    assert said == (0, ["warning: float16 overflows"])


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """What is missing on a machine where no tip has been given yet."""
    parts = {"products": "not built", "OpenBLAS": "not built"}
    for name in (terminal.TIPS_SWITCH, libraries.NATIVE_SWITCH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device, "on_cpu", lambda: True)
    monkeypatch.setattr(terminal, "native_parts", lambda: parts)
    return parts


LOADED = dict.fromkeys(libraries.NATIVE_PARTS, "loaded, AVX2")


def test_every_missing_part_gives_a_tip_with_its_reason(
    lacking: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for parts in (LOADED, LOADED | {"layers": "not loaded"}, lacking):
        monkeypatch.setattr(terminal, "native_parts", lambda parts=parts: parts)
        missing = [f"{part} ({why})" for part, why in parts.items() if "not" in why]
        for tip, found in zip(terminal.tips(), missing, strict=True):
            assert found in tip
    with monkeypatch.context() as patch:
        patch.setenv(libraries.NATIVE_SWITCH, "0")
        assert terminal.tips() == []
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    assert terminal.tips() == []


def test_tips_are_given_once_a_day_on_terminals_unless_silenced(
    lacking: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def given() -> list[str]:
        terminal.give_tips()
        return capsys.readouterr().err.splitlines()

    assert given() == []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    lines = given()
    assert [line[:5] for line in lines] == ["tip: "] * 2
    assert all(f"{terminal.TIPS_SWITCH}=0" in line for line in lines)
    assert given() == []
    stamp = tmp_path / "speculative_t5" / "tips-given"
    os.utime(stamp, (0, stamp.stat().st_mtime - terminal.SECONDS_OF_A_DAY - 1))
    assert given() == lines
    stamp.unlink()
    monkeypatch.setenv(terminal.TIPS_SWITCH, "0")
    assert given() == []


GREEN, YELLOW, CYAN, END = "\x1b[32m", "\x1b[1;33m", "\x1b[4;36m", "\x1b[0m"
FIRST = Stats((3,), (3,), (1,), 2, 0.1)
SECOND = Stats((3, 3), (3, 3), (1, 3), 6, 0.2)
THIRD = Stats((3, 3, 0), (3, 3, 0), (1, 3, 0), 7, 0.25)
CHUNKS = [
    Chunk("He goes", [5, 6], 1, FIRST, None, ("He", " goes")),
    Chunk(" to the sea", [7, 8, 9, 10], 3, SECOND, None, (" to", " the", " ", "sea")),
    Chunk(".", [11], 0, THIRD, "length", (".",)),
]
SHADED = f"{GREEN}He{END} {YELLOW}goes{END} {GREEN}to{END} {GREEN}the{END} {CYAN}sea{END}."


def test_tokens_are_coloured_as_they_stream_unless_no_color_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = recording(monkeypatch)
    seen: list[str] = []

    def arriving() -> Iterator[Chunk]:
        for chunk in CHUNKS:
            yield chunk
            seen.append(console.export_text(clear=False))

    assert show(arriving(), drafts=True) == CHUNKS[-1]
    meanings, text = console.export_text(styles=True).splitlines()
    assert text == SHADED
    assert meanings == (
        f"{GREEN}accepted{END} drafted   "
        f"{YELLOW}recovered{END} the target's, for a rejected draft   "
        f"{CYAN}bonus{END} the target's, after a whole draft"
    )
    shown = [each.splitlines()[1] for each in seen]
    assert shown == ["He goes", "He goes to the sea", "He goes to the sea."]
    console.export_text()
    pieces = (piece for chunk in CHUNKS for piece in chunk.pieces)
    console.print(shaded(pieces, (origin for _, origin in THIRD.origins())))
    assert console.export_text(styles=True) == SHADED + "\n", "as a finished output looks"
    monkeypatch.setenv("NO_COLOR", "1")
    console = recording(monkeypatch)
    console.print(shaded(CHUNKS[0].pieces, CHUNKS[0].origins), legend())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1mgoes\x1b[0m" in text and "\x1b[4mbonus\x1b[0m" in text
    assert not any(code in text for code in ("32m", "33m", "36m"))


def test_outputs_cannot_command_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for drafts in (True, False):
        console = recording(monkeypatch, colour=False)
        evil = Chunk("a\x1b[2Jb\r\n\tc", [5], 1, FIRST, "length", ("a\x1b[2Jb\r\n\tc",))
        show([evil], drafts=drafts)
        text = console.export_text()
        assert "\x1b" not in text and "\r" not in text
        mark = "\N{REPLACEMENT CHARACTER}"
        assert text.splitlines()[-2:] == [f"a{mark}[2Jb{mark}", "        c"]


def test_a_table_that_is_too_wide_becomes_a_list(tmp_path: Path) -> None:
    lines = {}
    # pytest-xdist may set the width of a terminal that is not this one.
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    for width in (60, 200):
        process = pexpect.spawn(
            sys.executable,
            ["-m", "speculative_t5", "models"],
            cwd=tmp_path,
            env=environment | PATHS,
            dimensions=(40, width),
            timeout=120,
        )
        lines[width] = process.read().decode().splitlines()
    assert lines[200][0].startswith("model  ") and len(lines[200][1]) > 60
    assert {"correct-base", "  parameters: 26.1 M", "  computes in: float32"} <= {*lines[60]}
    assert max(map(len, lines[60])) <= 60
