"""The command `repl`: prompts and options one after another, on models that are loaded once."""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import typer

from ..checkpoints import model_name
from ..decoding import Stats, total
from ..generation import GenerationOptions, SpeculativeDecoder
from . import terminal
from .options import (
    HIDDEN_OPTIONS,
    ON_OFF,
    DecoderOptions,
    Keywords,
    choose,
    draft_length,
    output_option,
    parsed,
    with_options,
)
from .terminal import note, one_line

REPL_COMMANDS = {
    "/set NAME VALUE": "change an option; /set alone shows all of them",
    "/prefix TEXT": "put TEXT and a space before each prompt; /prefix alone removes it",
    "/to LANGUAGE": "translate each prompt to a language; /to German from English says both",
    "/stats": "statistics of the last output, and of all outputs",
    "/help": "show this list",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops an output",
    "exit, quit, help": "the same when typed; after a space they are prompts",
}
# Only when typed: a file may hold them as prompts.
BARE_COMMANDS = {"exit": "/quit", "quit": "/quit", "help": "/help"}

# What /set shows, and changes, except for the prefix.
SETTINGS_SHOWN = (
    "num_draft",
    "delta",
    "verify",
    "temperature",
    "top_k",
    "top_p",
    "max_tokens",
    "seed",
    "show_drafts",
    "prefix",
)
DECODER_SETTINGS = tuple(DecoderOptions().keywords)
GENERATION_SETTINGS = tuple(each.name for each in fields(GenerationOptions))


@with_options(
    changes={"regular_decode": None, "num_return_sequences": {"hidden": True}, **HIDDEN_OPTIONS}
)
def repl(
    ctx: typer.Context,
    *,
    options: DecoderOptions,
    keywords: Keywords,
    show_drafts: bool = output_option(
        True, "On a terminal, colour tokens by where they came from."
    ),
) -> None:
    """Try prompts and options one after another, on models that are loaded once.

    Each line is a prompt, or a command that begins with a slash; /help lists the commands. On a
    terminal, exit, quit and help also work without the slash.
    """
    options, keywords = choose(ctx, options, keywords)
    first = options.load()
    settings = {
        **options.keywords,
        "lookup": options.lookup or options.draft_model == "lookup",
        "prefix": first.prefix,
        "to": None,
        "from_": None,
        "show_drafts": show_drafts,
    }
    typed, failed = terminal.is_terminal(sys.stdin), False
    conversation = ReplSession(first, settings | keywords, typed=typed)
    if typed:
        drafts = f", {model_name(options.draft)} drafts" if options.draft else ""
        begun = f"{options.name}{drafts}; prefix {first.prefix!r}"
        note(f"{begun}; /help lists the commands, Ctrl-D leaves")
    for line in typed_lines():
        try:
            if not conversation.handle(line):
                break
        except (ValueError, RuntimeError, MemoryError) as error:
            failed = True
            note(f"error: {one_line(terminal.failure(error))}")
        except KeyboardInterrupt:
            if not typed:
                raise
            note("stopped")
    if failed and not typed:  # whoever typed has seen the errors
        raise typer.Exit(terminal.EXIT_SOME_FAILED)


@dataclass
class ReplSession:
    """One session: a decoder, its settings, and the statistics so far."""

    decoder: SpeculativeDecoder  # whose models stay
    settings: Mapping[str, Any]  # by name: of the decoder, of its calls, and show_drafts
    typed: bool = False  # by a person, who may leave out the slash of a few commands
    done: list[Stats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._change()

    def handle(self, line: str) -> bool:
        """Carry out a line, or raise a ValueError; return False if the line says to leave.

        After an error, KeyboardInterrupt included, nothing has changed.
        """
        line = BARE_COMMANDS.get(line.rstrip(), line) if self.typed else line
        line = line.strip()
        # "//" is for a text that begins with "/".
        if not line.startswith("/") or line.startswith("//"):
            if line:
                self._generate(line.removeprefix("/"))
            return True
        name, _, rest = line.partition(" ")
        commands = {
            "/set": self._set,
            "/prefix": self._prefix,
            "/to": self._to,
            "/stats": self._stats,
            "/help": self._help,
        }
        if name in ("/quit", "/exit"):
            return False
        if name not in commands:
            raise ValueError(
                f"there is no command {name!r}: use {', '.join(commands)} or /quit, "
                "or // before a text that begins with a slash"
            )
        commands[name](rest.strip())
        return True

    def _change(self, **changes: Any) -> None:
        """Make a decoder with other settings, of the same models; show what has changed."""
        settings = {**self.settings, **changes}
        models = self.decoder.model, self.decoder.draft, self.decoder.tokenizer
        decoder = SpeculativeDecoder(*models, **{name: settings[name] for name in DECODER_SETTINGS})
        keywords = {name: settings[name] for name in GENERATION_SETTINGS if name in settings}
        options = GenerationOptions(**keywords)
        options.check_stream()
        decoder.engine.check(options)
        self.decoder, self.settings, self._keywords = decoder, settings, keywords
        self._print_settings(changes)

    def _generate(self, prompt: str) -> None:
        max_tokens, keywords = self.settings["max_tokens"], self._keywords
        source = self.decoder.fit(prompt)
        terminal.note_unread(source)
        chunks = self.decoder.stream(source.ids, **keywords)
        last = terminal.show(chunks, drafts=self.settings["show_drafts"] and self.decoder.drafts)
        self.done.append(last.stats)
        note(terminal.footer(last.stats, last.finish_reason, max_tokens))

    def _set(self, rest: str) -> None:
        name, _, text = rest.replace("=", " ", 1).partition(" ")
        name = name.lstrip("-").replace("-", "_")
        if not name:
            self._print_settings(SETTINGS_SHOWN)
            return
        if not text:
            raise ValueError(f"/set takes a name and a value, got {rest!r}: use /set num_draft 8")
        if name == "prefix":
            raise ValueError(f"the prefix is not set with /set, got {text!r}: use /prefix TEXT")
        if name not in SETTINGS_SHOWN:
            raise ValueError(
                f"there is no setting named {name!r}: choose from {', '.join(SETTINGS_SHOWN[:-1])}"
            )
        text, kind = text.strip(), type(self.settings[name])
        if name == "num_draft":
            value: Any = draft_length(name, text)
        elif kind is bool:
            value = parsed(name, text, lambda text: ON_OFF[text.lower()], "on or off")
        else:
            value = parsed(name, text, kind, "an integer" if kind is int else "a number")
        self._change(**{name: value})

    def _print_settings(self, names: Iterable[str]) -> None:
        for name in names:
            value = self.settings[name]
            text = repr(value) if name == "prefix" else str(value)
            if isinstance(value, bool):
                text = "on" if value else "off"
            terminal.console().print(f"{name} = {text}")

    def _prefix(self, rest: str) -> None:
        self._change(prefix=f"{rest} " if rest else "")

    def _to(self, rest: str) -> None:
        to, _, source = rest.partition(" from ")
        self._change(prefix=self.decoder.translating(to, source or None).prefix)

    def _stats(self, _: str) -> None:
        if not self.done:
            raise ValueError("there are no statistics yet: give a prompt first")
        out, last = terminal.console(), self.done[-1]
        out.print(f"last: {last.summary()}")
        if last.drafted:
            shares = "  ".join(f"{share:.0%}" for share in last.acceptance_by_position)
            out.print(f"      accepted by position in the draft: {shares}")
        out.print(f"all {len(self.done)}: {total(self.done).summary()}")

    def _help(self, _: str) -> None:
        for usage, meaning in REPL_COMMANDS.items():
            terminal.console().print(f"{usage:17} {meaning}")
        terminal.console().print(terminal.legend())


def typed_lines() -> Iterator[str]:
    """Yield the lines of standard input, on a terminal by a line editor."""
    if not terminal.is_terminal(sys.stdin):
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    with contextlib.suppress(ImportError):  # not every Python has it
        import readline as readline  # whose line editor `input` uses
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            note("")  # drops only the line that was being typed
        except EOFError:
            note("")
            return
