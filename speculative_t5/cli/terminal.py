"""How every command ends: exit codes, signals, one line for each error."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from itertools import islice
from threading import Timer
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

import typer

from ..decoding import FinishReason, Stats
from ..generation import Chunk
from ..tokenizers import Source
from .tips import SWITCH, due_tips

SLOW = 3.0  # seconds
STILL_WORKING = (
    "the first tokens take long: on a CPU, MLX compiles its kernels once after a restart of the "
    "machine, for up to half a minute; --num-draft auto measures a pair once; or the model is large"
)
MOST_NAMED = 5  # of the characters that a vocabulary lacks
FAILED, BAD_INPUT, SOME_FAILED, INTERRUPTED = 1, 2, 3, 130
# typer exports one kind of its errors in arguments; this is the base of them all.
ArgumentError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])

AFTER_FAILURE = "run it again, with a smaller model or batch if memory was short"
# What to do about errors that are the system's, by their number.
ADVICE = {
    errno.ENOENT: "check the path and its folder",
    errno.EACCES: "choose another path, or change its permissions",
    errno.EISDIR: "give the path of a file",
    errno.ENOTDIR: "choose another path",
    errno.EROFS: "choose another path",
    errno.ENOSPC: "free some, or write elsewhere",
    errno.EDQUOT: "free some, or write elsewhere",
    errno.EFBIG: "raise the limit on files' sizes (ulimit -f), or write elsewhere",
    errno.EIO: "check the disk, or use another",
}
OTHERWISE = "check the path and what it leads to"


class Failure(RuntimeError):
    """A failure while running that says what to do."""


def new_app(*, completion: bool = False) -> typer.Typer:
    """An application without commands yet; completion adds options that set up a shell's."""
    return typer.Typer(
        add_completion=completion, rich_markup_mode="rich", pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip


def run(app: typer.Typer, name: str) -> NoReturn:
    """Run an application; errors become one line on standard error and an exit code.

    Exits with 0, 2 for bad input, 1 for a failure while running, 3 where some of many prompts had
    errors, 130 for Ctrl-C.
    """
    _open_what_is_closed()
    warnings.showwarning = lambda message, *_: note(f"warning: {printable(str(message))}")
    if not is_terminal(sys.stderr):  # read when the Hub's client is imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _terminate)
    try:
        code = app(prog_name=name, standalone_mode=False) or 0
        if code == INTERRUPTED:  # what newer versions of typer make of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", INTERRUPTED)
    except ArgumentError as error:
        context = getattr(error, "ctx", None)  # of the command that was given the argument
        asked = context.command_path if context else name
        fail(f"{_argument_error(error)}; see {asked} --help", BAD_INPUT)
    except BrokenPipeError:
        # The reader went away, as `head` does; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except ValueError as error:
        fail(str(error), BAD_INPUT)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{_with_advice(error)}", FAILED if full else BAD_INPUT)
    except (RuntimeError, MemoryError) as error:
        fail(failure(error), FAILED)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Let a signal to end wait until the block is done; a second one acts at once."""
    waiting: list[int] = []
    handlers = {
        ending: handler
        for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if callable(handler := signal.getsignal(ending))
    }

    def hold(number: int, frame: FrameType | None) -> None:
        waiting.append(number)
        if len(waiting) > 1:  # what is written to may be stuck, as a pipe that nobody reads
            handlers[signal.Signals(number)](number, frame)

    for ending in handlers:
        signal.signal(ending, hold)
    try:
        yield
    finally:
        for ending, handler in handlers.items():
            signal.signal(ending, handler)
        if len(waiting) == 1:
            signal.raise_signal(waiting[0])


def note(line: str) -> None:
    """Say something beside the output: on standard error."""
    print(line, file=sys.stderr, flush=True)


def give_tips() -> None:
    """Say what would make decoding faster here: to a person, once a day, after the output."""
    if is_terminal(sys.stderr):
        for tip in due_tips():
            note(f"tip: {tip}; {SWITCH}=0 silences tips")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sees it; None is a stream that is closed."""
    return stream is not None and stream.isatty()


@contextlib.contextmanager
def patience(seconds: float = SLOW) -> Iterator[Callable[[Iterable[Chunk]], Iterator[Chunk]]]:
    """Say on a terminal, once, that the first chunk may take long, if it does.

    Yields:
        What passes on the chunks that are waited for.
    """
    timer = Timer(seconds, note, [STILL_WORKING])
    timer.daemon = True
    if is_terminal(sys.stderr):
        timer.start()

    def watched(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            timer.cancel()
            yield chunk

    try:
        yield watched
    finally:
        timer.cancel()


NOTHING = Chunk("", [], 0, Stats())


def print_stream(chunks: Iterable[Chunk]) -> Chunk:
    """Print the text alone, as it comes; returns the last chunk."""
    last = NOTHING
    for chunk in chunks:
        print(chunk.text, end="", flush=True)
        last = chunk
    print()
    return last


def footer(
    stats: Stats, finish_reason: FinishReason | None, max_tokens: int, speedup: float | None = None
) -> str:
    """The line below an output: what it cost, and whether it was cut."""
    summary = stats.summary(speedup)
    if finish_reason != "length":
        return summary
    return f"{summary} - {cut_at(max_tokens if stats.emitted == max_tokens else None)}"


def cut_at(max_tokens: int | None) -> str:
    """How to say that outputs were cut; None is for the end of a decoder-only model's context."""
    return (
        "cut where the context ends" if max_tokens is None else f"cut at --max-tokens {max_tokens}"
    )


def remark(source: Source) -> None:
    """Say on standard error what a model does not read of a prompt."""
    if source.unknown:
        note(
            f"the model's vocabulary lacks {some_of(source.unknown)}; "
            "it reads an unknown mark instead"
        )
    if source.cut:
        note(f"the prompt was cut to {len(source.ids)} tokens, {source.cut} fewer than it has")


def some_of(characters: Collection[str]) -> str:
    """A few characters by name, and how many more there are."""
    named = printable(" ".join(islice(characters, MOST_NAMED)))
    more = len(characters) - MOST_NAMED
    return f"{named} and {more:,} more" if more > 0 else named


def visible(text: str) -> str:
    """The text without what a terminal would obey, lines and tabs excepted."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def printable(text: str) -> str:
    """One line of it that a terminal can show: texts from files may hold anything."""
    return visible(" ".join(text.split()))


def fail(message: str, code: int) -> NoReturn:
    """Say what was wrong, in one line, and leave."""
    note("error: " + printable(message))
    sys.exit(code)


def failure(error: RuntimeError | MemoryError) -> str:
    """What to say of a failure while running."""
    if isinstance(error, Failure):
        return f"failed while running: {error}"
    return f"failed while running: {str(error) or type(error).__name__}; {AFTER_FAILURE}"


def columns(rows: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """Lines of a table, columns two spaces apart; those in `right` go to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _argument_error(error: Any) -> str:
    """What typer says of an argument, and what was given, which its newer versions leave out."""
    text = str(error.format_message()).rstrip(".")
    if text.startswith("No such command"):  # which may have been meant as a prompt
        text += " (a prompt is given by --prompt)"
    checked = getattr(error.__cause__, "errors", None)  # pydantic's
    return f"{text}, got {checked()[0]['input']!r}" if callable(checked) else text


def _with_advice(error: OSError) -> str:
    """What it says, and what to do unless it says that: texts of the system's own do not."""
    text = error.strerror or str(error)
    if error.errno is not None and not text.endswith(os.strerror(error.errno)):
        return text
    return f"{text}; {ADVICE.get(error.errno or 0, OTHERWISE)}"


def _open_what_is_closed() -> None:
    """Have something at the places of standard streams that are closed, or files would get them."""
    for place in range(3):
        try:
            os.fstat(place)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free place
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (until the end)


def _terminate(number: int, _: object) -> NoReturn:
    """Leave in such a way that what is half-written is removed."""
    sys.exit(128 + number)
