"""How every command ends, and what it says: exit codes, signals, one line for each error."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

import typer

from .. import device, libraries
from ..checkpoints import Download, announce_downloads
from ..decoding import FinishReason, Origin, Stats
from ..distributed import ProcessGroup, found_processes, is_launched
from ..errors import escaped, shown
from ..files import cache_folder
from ..generation import ORIGIN_MEANINGS, Chunk
from ..kernels import native_parts
from ..tokenizers import Source

if TYPE_CHECKING:  # rich takes time to import
    from rich.console import Console
    from rich.text import Text

MAX_NAMED = 5  # characters that a vocabulary lacks
# Options of other programs for speculative decoding, by their names here.
NAMES_ELSEWHERE = {"gamma": "num-draft", "max-new-tokens": "max-tokens"}
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_SOME_FAILED, EXIT_INTERRUPTED = 1, 2, 3, 130
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# typer exports one of its errors about arguments; this is their base class.
ArgumentError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])

# Types of values, in pydantic's words and in ours.
VALUE_KINDS = {"integer": "an integer", "number": "a number", "boolean": "true or false"}

# Options that earlier versions had, and what to do instead.
GONE_OPTIONS = {"--plot": "run bench --json | python scripts/figures/draw_sweep.py PICTURE"}

# What to do about the system's own errors, by number.
ADVICE_BY_ERRNO = {
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

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # nothing more can be written

TIPS_SWITCH = "SPECULATIVE_T5_TIPS"  # "0" silences them
SECONDS_OF_A_DAY = 24 * 60 * 60  # seconds

# Weight and underlines tell them apart without colour, too.
ORIGIN_STYLES: dict[Origin, str] = {
    "accepted": "green",
    "recovered": "bold yellow",
    "bonus": "underline cyan",
    "regular": "",
}


class Failure(RuntimeError):
    """A failure while running whose message says what to do."""


def option_name(typed: str) -> str:
    """Return an option's name here, for one as it is typed: underscores are hyphens."""
    name = typed.replace("_", "-")
    return NAMES_ELSEWHERE.get(name, name)


def new_app(*, completion: bool = False) -> typer.Typer:
    """Make an application without commands; `completion` adds options that set up a shell's."""
    return typer.Typer(
        add_completion=completion,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "token_normalize_func": option_name,
        },
    )


_processes: ProcessGroup | None = None  # that run the command, if a launcher started several


def run(app: Callable[..., Any], name: str) -> NoReturn:
    """Run an application and exit; an error becomes one line on standard error.

    The exit code is 0, 2 for bad input, 1 for a failure while running, 3 if some of many prompts
    had errors, or 130 for Ctrl-C.
    """
    global _processes
    _open_closed_streams()
    warnings.showwarning = lambda message, *_: note(f"warning: {one_line(str(message))}")
    if not is_terminal(sys.stderr):  # read when the Hub's client is imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    announce_downloads(announce_download)
    try:
        if is_launched():
            handle_signals(signal.SIG_DFL, signal.SIG_DFL)
            _processes = found_processes()
            if _processes:
                _processes.join()
        if process_group() is None:
            handle_signals()
        code = app(prog_name=name, standalone_mode=False) or 0
        if code == EXIT_INTERRUPTED:  # newer versions of typer catch Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", EXIT_INTERRUPTED)
    except ArgumentError as error:
        context = getattr(error, "ctx", None)  # of the command that was given the argument
        asked = context.command_path if context else name
        fail(f"{_argument_error(error)}; see {asked} --help", EXIT_BAD_INPUT, error)
    except BrokenPipeError:
        # The reader went away, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except (ValueError, RuntimeError, MemoryError) as error:
        fail(
            failure(error), EXIT_BAD_INPUT if isinstance(error, ValueError) else EXIT_FAILED, error
        )
    except OSError as error:
        fail(failure(error), EXIT_FAILED if error.errno in DISK_ERRORS else EXIT_BAD_INPUT, error)


def handle_signals(
    interrupted: Any = signal.default_int_handler,
    ended: Any = lambda number, _: sys.exit(128 + number),
) -> None:
    """Set what Ctrl-C and other signals that end a process do.

    By default they raise an exception, so that half-written files are removed.
    """
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, interrupted if number == signal.SIGINT else ended)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold a signal that ends the process until the block is done; a second one acts at once."""
    waiting: list[int] = []
    handlers = {n: handler for n in ENDING_SIGNALS if callable(handler := signal.getsignal(n))}

    def hold(number: int, frame: FrameType | None) -> None:
        waiting.append(number)
        if len(waiting) > 1:  # the block may be stuck, on a pipe that nobody reads
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


def process_group() -> ProcessGroup | None:
    """Return the processes that run this command; None if this one is alone."""
    return _processes


def note(line: str) -> None:
    """Print a line beside the output, on standard error; of several processes, the first does.

    What a terminal would obey, in names of files, is escaped.
    """
    processes = process_group()
    if processes is None or processes.is_first:
        _say(escaped(line))


def announce_download(download: Download) -> None:
    """Say how large a download is; where a person can answer, ask whether to begin it."""
    note(str(download))
    is_asked = process_group() is None and threading.current_thread() is threading.main_thread()
    if is_asked and is_terminal(sys.stdin) and is_terminal(sys.stderr):
        print("Download it? [Y/n] ", end="", file=sys.stderr, flush=True)
        # An answer ends with a newline; without one it is the end of the input, as of Ctrl-D.
        if sys.stdin.readline().casefold() not in ("\n", "y\n", "yes\n"):
            note("nothing was downloaded")
            raise typer.Exit(EXIT_FAILED)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tips() -> list[str]:
    """Return what would make decoding faster on this machine; nothing off Linux CPUs."""
    if not device.on_cpu() or os.environ.get(libraries.NATIVE_SWITCH) == "0":
        return []
    return [
        f"decoding takes longer on this CPU without {part} ({why}): see docs/installing.md"
        for part, why in native_parts().items()
        if not why.startswith("loaded")
    ]


def give_tips() -> None:
    """Say on a terminal what would make decoding faster on this machine, once a day."""
    if not is_terminal(sys.stderr) or os.environ.get(TIPS_SWITCH) == "0" or not tips():
        return
    stamp = cache_folder() / "tips-given"
    with contextlib.suppress(OSError):  # not given yet
        if time.time() - stamp.stat().st_mtime < SECONDS_OF_A_DAY:
            return
    with contextlib.suppress(OSError):  # without this file they are given each time
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    for tip in tips():
        note(f"tip: {tip}; {TIPS_SWITCH}=0 silences tips")


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is shown to a person."""
    return stream.isatty()


def console(*, stderr: bool = False) -> Console:
    """Make a console; it is plain if its stream is not a terminal or NO_COLOR is set."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, emoji=False, markup=False, soft_wrap=True)


def show(chunks: Iterable[Chunk], *, drafts: bool) -> Chunk:
    """Print a stream as it comes, on a terminal perhaps coloured; return the last chunk."""
    out, last = console(), Chunk("", [], 0, Stats())
    if not out.is_terminal:
        for last in chunks:
            print(last.text, end="", flush=True)
        print(flush=True)  # before the line of statistics, in a pipe, too
        return last
    if drafts:
        console(stderr=True).print(legend())
    try:
        for last in chunks:
            out.print(shaded(last.pieces, last.origins) if drafts else visible(last.text), end="")
    finally:
        out.print()
    return last


def shaded(pieces: Iterable[str], origins: Iterable[Origin]) -> Text:
    """Colour the text of tokens by where they came from."""
    from rich.text import Text

    text = Text()
    after: Iterable[Origin] = repeat("regular")  # characters that were held back until the end
    for piece, origin in zip(pieces, chain(origins, after), strict=False):
        word = visible(piece).lstrip(" ")
        text.append(" " * (len(piece) - len(word)))  # only words are underlined
        text.append(word, ORIGIN_STYLES[origin])
    return text


def legend() -> Text:
    """Return one line that explains the colours."""
    from rich.text import Text

    text = Text()
    for kind in ("accepted", "recovered", "bonus"):
        text.append("   " if text else "").append(kind, ORIGIN_STYLES[kind])
        text.append(f" {ORIGIN_MEANINGS[kind]}")
    return text


def footer(stats: Stats, finish_reason: FinishReason | None, max_tokens: int) -> str:
    """Return the line below an output: its statistics, and whether it was cut."""
    if finish_reason != "length":
        return stats.summary()
    if stats.emitted < max_tokens:
        return f"{stats.summary()} - cut where the model's context ends"
    return f"{stats.summary()} - cut at --max-tokens {max_tokens}"


def rates(emitted: int, rounds: int, drafted: int, accepted: int, seconds: float) -> list[str]:
    """Return the statistics of many outputs, for their summary."""
    return [
        f"{emitted:,} tokens in {seconds:.1f} s",
        f"{emitted / seconds if seconds else 0:,.0f} tokens/s",
        f"acceptance {accepted / drafted:.0%}" if drafted else "no draft",
        f"{emitted / rounds:.1f} tokens per round",
    ]


def note_unread(source: Source) -> None:
    """Say on standard error which parts of a prompt the model does not read."""
    if source.unknown:
        note(
            f"the model's vocabulary lacks {a_few_of(source.unknown)}; "
            "it sees the unknown token instead"
        )
    if source.trained and len(source.ids) > source.trained:
        note(
            f"the prompt has {len(source.ids)} tokens, and the model was trained on at most "
            f"{source.trained}: parts may be lost, unless you split it (the command document does)"
        )
    if source.cut:
        note(f"the prompt was cut to {len(source.ids)} tokens, {source.cut} fewer than it has")


def a_few_of(characters: Collection[str]) -> str:
    """Return a few characters, and the number of the others."""
    named = one_line(" ".join(islice(characters, MAX_NAMED)))
    more = len(characters) - MAX_NAMED
    return f"{named} and {more:,} more" if more > 0 else named


def visible(text: str) -> str:
    """Replace the characters that a terminal would obey, except newlines and tabs."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def one_line(text: str) -> str:
    """Return text from anywhere as one line that a terminal can show."""
    return visible(" ".join(text.split()))


def fail(message: str, code: int, error: BaseException | None = None) -> NoReturn:
    """Print an error in one line, and exit."""
    text, processes = one_line(message), process_group()
    if processes is None:
        _say(f"error: {text}")
    else:
        processes.fail(error, text, _say)
    sys.exit(code)


def failure(error: ValueError | OSError | RuntimeError | MemoryError) -> str:
    """Return the message of an error; a failure while running is called so."""
    if isinstance(error, OSError):
        text = error.strerror or str(error)
        if error.errno is None or text.endswith(os.strerror(error.errno)):  # the system's own
            text += (
                f"; {ADVICE_BY_ERRNO.get(error.errno or 0, 'check the path and what it leads to')}"
            )
        return f"{error.filename}: {text}" if error.filename else text
    text, advice = str(error) or type(error).__name__, ""
    if isinstance(error, ValueError):
        return text
    if not isinstance(error, Failure):
        advice = "; run it again, with a smaller model or batch if memory was short"
    return f"failed while running: {text}{advice}"


def columns(rows: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """Return the lines of a table, columns two spaces apart, those in `right` right-aligned."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _argument_error(error: Any) -> str:
    """Return typer's message about an argument, and the value, which newer versions leave out."""
    text = str(error.format_message()).rstrip(".").partition(", unable to parse")[0]
    if text.startswith("No such command"):  # which may have been meant as a prompt
        text += " (to give a prompt, use --prompt)"
    for option, instead in GONE_OPTIONS.items():
        if text.startswith(f"No such option: {option}"):
            return f"there is no {option} any more: {instead}"
    checked = getattr(error.__cause__, "errors", None)  # pydantic's
    if not callable(checked):
        return text
    found = shown(checked()[0]["input"])
    where, _, wrong = text.removeprefix("Invalid value for ").partition(": ")
    names = re.findall(r"'(--[\w-]+)'", where)
    if not names or not text.startswith("Invalid value for "):
        return f"{text}, got {found}"
    name, wrong = names[-1], wrong.removeprefix("Value error, ")
    if " is not one of " in wrong:
        return f"{name} must be one of {wrong.rpartition(' is not one of ')[2]}, got {found}"
    for kind, expected in VALUE_KINDS.items():
        if wrong.startswith(f"Input should be a valid {kind}"):
            return f"{name} must be {expected}, got {found}"
    return f"{name}: {wrong}, got {found}"


def _open_closed_streams() -> None:
    """Open closed standard streams on the null device, or the next file would take their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
            setattr(sys, name, open(null, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
