"""The command `repl`: prompts and options one after another, on models that are loaded once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from ..decoding import Stats, total
from ..generation import Generation, GenerationOptions, SpeculativeDecoder
from .options import (
    UNSHOWN,
    DecoderOptions,
    Keywords,
    Task,
    choose,
    draft_length,
    draft_of,
    in_output,
    model_name,
    with_groups,
)
from .terminal import (
    SOME_FAILED,
    console,
    failure,
    footer,
    is_terminal,
    legend,
    note,
    note_if_slow,
    note_unread,
    one_line,
    shaded,
    show,
)

MAX_HISTORY = 1000  # lines
COMPARE_SECONDS, COMPARE_TURNS = 1.0, 5  # /compare stops at either
COMMANDS = {
    "/set NAME VALUE": "change an option; /set alone shows all of them",
    "/prefix TEXT": "put TEXT and a space before each prompt; /prefix alone removes it",
    "/stats": "statistics of the last output, and of all outputs",
    "/compare [TEXT]": "plain and speculative decoding of this prompt, or of the last one",
    "/help": "show this list",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops an output",
    "exit, quit, help": "the same when typed; after a space they are prompts",
}
# Only when typed: a file may hold them as prompts.
BARE = {"exit": "/quit", "quit": "/quit", "help": "/help"}

# What /set can change, beside show_drafts; by name, also with the prefix, in `Settings`.
DRAFTING = ("num_draft", "delta", "verify")
SAMPLING = ("temperature", "top_k", "top_p", "max_tokens", "seed")
Settings = Mapping[str, Any]


@with_groups(changes={"num_return_sequences": {"hidden": True}, **UNSHOWN})
def repl(
    ctx: typer.Context,
    *,
    options: DecoderOptions,
    keywords: Keywords,
    task: Task = None,
    show_drafts: Annotated[
        bool, in_output(help="On a terminal, colour tokens by where they came from.")
    ] = True,
    history: Annotated[
        Path | None,
        in_output(
            help="Keep the lines typed on a terminal, prompts included, in this file, and find "
            "them again in later sessions.",
            show_default="they are not kept",
        ),
    ] = None,
) -> None:
    """Try prompts and options one after another, on models that are loaded once.

    Each line is a prompt, or a command that begins with a slash; /help lists the commands. On a
    terminal, exit, quit and help also work without the slash.
    """
    options, keywords = choose(ctx, options, keywords, task)
    first = options.load()

    def remake(wanted: Settings) -> SpeculativeDecoder:
        drafting = replace(options.drafting, **{name: wanted[name] for name in DRAFTING})
        return replace(options, drafting=drafting, prefix=wanted["prefix"]).remake(first)

    settings = {name: getattr(options.drafting, name) for name in DRAFTING}
    settings |= {name: keywords.pop(name) for name in SAMPLING}
    settings |= {"show_drafts": show_drafts, "prefix": first.prefix}
    typed, failed = is_terminal(sys.stdin), False
    conversation = Conversation(remake, settings, keywords, typed=typed)
    if typed:
        draft = draft_of(options.model, options.draft_model)
        drafts = f", {model_name(draft)} drafts" if draft else ""
        note(f"{model_name(options.model)}{drafts}; prefix {first.prefix!r}; "
             "/help lists the commands, Ctrl-D leaves")  # fmt: skip
    for line in typed_lines(history):
        try:
            if not conversation.handle(line):
                break
        except ValueError as error:
            failed = True
            note(f"error: {one_line(str(error))}")
        except (RuntimeError, MemoryError) as error:
            failed = True
            note(f"error: {one_line(failure(error))}")
        except KeyboardInterrupt:
            if not typed:
                raise
            note("stopped")
    if failed and not typed:  # whoever typed has seen the errors
        raise typer.Exit(SOME_FAILED)


def changed(settings: Settings, name: str, text: str) -> Settings:
    """Return settings with one value parsed from text; refuse what is no value of it."""
    if name == "prefix":
        raise ValueError(f"the prefix is not set with /set, got {text!r}: use /prefix TEXT")
    if name not in settings:
        names = ", ".join(name for name in settings if name != "prefix")
        raise ValueError(f"there is no setting named {name!r}: choose from {names}")
    return {**settings, name: _value(name, type(settings[name]), text)}


def _value(name: str, kind: type, text: str) -> Any:
    if name == "num_draft":
        return draft_length(name, text)
    if kind is bool:
        if text.lower() not in ("on", "off"):
            raise ValueError(f"{name} must be on or off, got {text!r}")
        return text.lower() == "on"
    try:
        return kind(text)
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        raise ValueError(f"{name} must be {expected}, got {text!r}") from None


@dataclass
class Conversation:
    """One session: a decoder, its settings, and the statistics so far."""

    # Makes a decoder with other settings, of models that are loaded already.
    remake: Callable[[Settings], SpeculativeDecoder]
    settings: Settings
    shaping: Mapping[str, Any] = field(default_factory=dict)  # more keywords, which stay
    typed: bool = False  # by a person, who may leave out the slash of a few commands
    prompt: str | None = None  # the last one, without its prefix
    done: list[Stats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.decoder = self._checked(self.settings)

    def handle(self, line: str) -> bool:
        """Carry out a line; return False if it says to leave.

        Raises:
            ValueError: If it cannot be carried out; nothing has changed then.
            KeyboardInterrupt: If it is stopped; the session can continue.
        """
        line = BARE.get(line.rstrip(), line) if self.typed else line
        line = line.strip()
        # "//" is for a text that begins with "/".
        if not line.startswith("/") or line.startswith("//"):
            if line:
                self._generate(line.removeprefix("/"))
            return True
        name, _, rest = line.partition(" ")
        commands = {
            "/set": self._set, "/prefix": self._prefix, "/stats": self._stats,
            "/compare": self._compare, "/help": self._help,
        }  # fmt: skip
        if name in ("/quit", "/exit"):
            return False
        if name not in commands:
            raise ValueError(
                f"there is no command {name!r}: use {', '.join(commands)} or /quit, "
                "or // before a text that begins with a slash"
            )
        commands[name](rest.strip())
        return True

    def _checked(self, settings: Settings) -> SpeculativeDecoder:
        """Make a decoder, and check all settings before one of them is used."""
        decoder = self.remake(settings)
        options = GenerationOptions(**self._keywords(settings))
        options.check_stream()
        decoder.bind(options)
        return decoder

    def _keywords(self, settings: Settings) -> dict[str, Any]:
        """Return the keywords for `SpeculativeDecoder.generate`."""
        return {**self.shaping, **{name: settings[name] for name in SAMPLING}}

    def _generate(self, prompt: str) -> None:
        settings = self.settings
        source = self.decoder.fit(prompt, settings["max_tokens"])
        note_unread(source)
        with note_if_slow() as watched:
            chunks = self.decoder.stream(source.ids, **self._keywords(settings))
            self.prompt = prompt
            last = show(watched(chunks), drafts=settings["show_drafts"] and self.decoder.drafts)
        self.done.append(last.stats)
        note(footer(last.stats, last.finish_reason, settings["max_tokens"]))

    def _set(self, rest: str) -> None:
        name, _, text = rest.replace("=", " ", 1).partition(" ")
        name = name.lstrip("-").replace("-", "_")
        if name and not text:
            raise ValueError(f"/set takes a name and a value, got {rest!r}: use /set num_draft 8")
        if name:
            settings = changed(self.settings, name, text.strip())
            self.decoder, self.settings = self._checked(settings), settings
        for each in self.settings:
            if name in ("", each):
                self._print_setting(each)

    def _print_setting(self, name: str) -> None:
        value = self.settings[name]
        text = repr(value) if name == "prefix" else str(value)
        if isinstance(value, bool):
            text = "on" if value else "off"
        console().print(f"{name} = {text}", markup=False)

    def _prefix(self, rest: str) -> None:
        settings = {**self.settings, "prefix": f"{rest} " if rest else ""}
        self.decoder, self.settings = self._checked(settings), settings
        self._print_setting("prefix")

    def _stats(self, _: str) -> None:
        if not self.done:
            raise ValueError("there are no statistics yet: give a prompt first")
        out, last = console(), self.done[-1]
        out.print(f"last: {last.summary()}", markup=False)
        if last.drafted:
            shares = "  ".join(f"{share:.0%}" for share in last.acceptance_by_position)
            out.print(f"      accepted by position in the draft: {shares}", markup=False)
        out.print(f"all {len(self.done)}: {total(self.done).summary()}", markup=False)

    def _compare(self, rest: str) -> None:
        prompt = rest or self.prompt
        if prompt is None:
            raise ValueError("there is nothing to compare yet: give a prompt, or /compare TEXT")
        self.prompt = prompt
        runs, out = self._runs(prompt), console()
        for speculative, generations in runs.items():
            last = generations[-1]
            seconds = median(run.stats.seconds for run in generations)
            name = "speculative" if speculative else "plain"
            stats = replace(last.stats, seconds=seconds)
            line = footer(stats, last.finish_reason, self.settings["max_tokens"])
            out.print(f"{name}: {line}", markup=False)
            out.print(shaded(last))
        speedup = median(
            one.stats.seconds / other.stats.seconds
            for one, other in zip(runs[False], runs[True], strict=True)
        )
        if runs[False][-1].tokens == runs[True][-1].tokens:
            verdict = "the outputs are the same"
        elif self.settings["delta"]:
            verdict = "the outputs differ, as delta allows"
        elif self.settings["temperature"]:
            verdict = "the outputs differ, as samples do"
        else:
            verdict = "the outputs differ, which rounding can cause in 16 bits"
        out.print(f"speculative is {speedup:.2f}x plain; {verdict}", markup=False)

    def _runs(self, prompt: str) -> dict[bool, list[Generation]]:
        """Decode both ways, interleaved; the first turn warms up and counts only if it is alone."""
        runs: dict[bool, list[Generation]] = {False: [], True: []}
        spent = 0.0
        while spent < COMPARE_SECONDS and len(runs[True]) <= COMPARE_TURNS:
            for speculative, generations in runs.items():
                keywords = self._keywords(self.settings)
                done = self.decoder.generate(prompt, speculative=speculative, **keywords)
                generations.append(done)
                spent += done.stats.seconds
        return {way: done[1:] or done for way, done in runs.items()}

    def _help(self, _: str) -> None:
        for usage, meaning in COMMANDS.items():
            console().print(f"{usage:17} {meaning}", markup=False)
        console().print(legend())


def typed_lines(kept: Path | None = None) -> Iterator[str]:
    """Yield the lines of standard input; a terminal has a line editor and `history`."""
    if sys.stdin is None:
        raise ValueError(
            "the prompts come from standard input, which is closed: run this on a terminal, or "
            "give it a file of them"
        )
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    with history(kept):
        while True:
            try:
                yield input("> ")
            except KeyboardInterrupt:
                note("")  # drops only the line that was being typed
            except EOFError:
                note("")
                return


@contextlib.contextmanager
def history(path: Path | None) -> Iterator[None]:
    """Put the lines typed under the arrow keys: of this session, and of those kept in a file."""
    try:
        import readline
    except ImportError:  # not every Python has it
        yield
        return
    if path is None:
        yield
        return
    with contextlib.suppress(OSError):  # there is none yet, or it cannot be read
        readline.read_history_file(path)
    readline.set_history_length(MAX_HISTORY)
    try:
        yield
    finally:
        try:
            readline.write_history_file(path)
        except OSError as error:
            note(f"the history is not kept: {path}: {error.strerror}")
