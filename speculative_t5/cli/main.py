"""The default command, the names of the others, and the entry points of the command line."""

import json
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperGroup

from .. import libraries
from .._version import __version__
from ..distributed import process_group
from ..errors import check_utf8, decoded
from ..generation import BatchOptions, Generation, GenerationOptions, as_record
from . import terminal
from .examples import SENTENCES_TO_CORRECT
from .options import (
    DEFAULT_MODEL,
    DecoderOptions,
    Keywords,
    choose,
    in_models,
    in_output,
    is_given,
    with_options,
)
from .terminal import STATS_IN_JSON, footer, note

# The commands in the order of --help, each a function in a module of its name. Modules are imported
# when they are called, so the first lines of the functions' docstrings are here as well.
COMMANDS = {
    "repl": "Try prompts and options one after another, on models that are loaded once.",
    "batch": "Generate for each line of a file of prompts; write one JSON record per line, in "
    "order.",
    "document": "Rewrite texts of any length, for example to correct or translate them.",
    "serve": "Serve models over HTTP, in the protocols of OpenAI, LanguageTool and LibreTranslate.",
    "models": "List the models on this machine: family, size, stored types, and the drafts that "
    "fit each.",
    "convert": "Convert a Hugging Face T5 checkpoint to a model folder.",
    "distill": "Train a draft for a T5 or T5Gemma from prompts alone.",
    "bench": "Measure greedy decoding, one prompt at a time: plain, speculative, lookup, auto.",
    "doctor": "Check on this machine that outputs are right, and measure how many tokens to draft.",
}
DEFAULT_PROMPT = SENTENCES_TO_CORRECT[0].removeprefix("correct: ")
EXAMPLES = """Examples:

{name} --prompt "He go home" --show-drafts

{name} batch prompts.txt --output out.jsonl"""


def _print_version(asked: bool) -> None:
    if asked:
        print(f"speculative_t5 {__version__}, mlx {metadata.version('mlx')}")
        for part, state in libraries.parts().items():
            print(f"{part}: {state}")
        raise typer.Exit


@with_options
def generate(
    ctx: typer.Context,
    *,
    prompt: str | None = in_models(
        None,
        "Prompt; - reads it from standard input. Without this option, a pipe or a redirected file "
        "is read.",
        shown=f"a sentence to correct, if the model is {DEFAULT_MODEL}",
    ),
    options: DecoderOptions,
    keywords: Keywords,
    show_drafts: bool = in_output(False, "On a terminal, colour tokens by where they came from."),
    as_json: bool = in_output(False, "Print one JSON object at the end instead of the text."),
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions of this program and of MLX, and which parts are loaded.",
            is_eager=True,
            callback=_print_version,
        ),
    ] = False,
) -> None:
    """Generate text with a T5, faster by speculative decoding.

    The text goes to standard output, a line of statistics to standard error. Several processes that
    mlx.launch has started share the target.
    """
    processes = process_group()
    if ctx.invoked_subcommand:
        _refuse_options_before(ctx, ctx.invoked_subcommand)
        if processes and ctx.invoked_subcommand != "batch":
            raise ValueError(
                f"{ctx.invoked_subcommand} runs in one process, and {processes.group.size()} were "
                "started: run it without a launcher"
            )
        return
    if prompt is None or prompt == "-":
        prompt = _read_prompt(asked=prompt == "-")
    example = prompt is None
    if prompt is None:
        # The sentence would mean nothing to another model.
        if options.adapter or Path(options.model).name != DEFAULT_MODEL:
            raise ValueError(
                f"there is no prompt for {options.name}: give one with --prompt or on standard "
                "input"
            )
        prompt = DEFAULT_PROMPT
    check_utf8("--prompt", prompt)
    if not prompt.strip():
        raise ValueError("the prompt is empty: give some text with --prompt or on standard input")
    options, keywords = choose(ctx, options, keywords)  # checked before the models are loaded
    wanted = GenerationOptions(**keywords)
    if show_drafts and wanted.beams:
        raise ValueError(
            f"num_beams is {wanted.num_beams}, and a beam search has no drafts: leave out "
            "--show-drafts"
        )
    group = processes.group if processes else None
    decoder = options.load(group)
    source = decoder.fit(prompt)
    if processes:
        decoder.check_batch(BatchOptions(**keywords))  # in all processes
        processes.start({"the prompt": str(source.ids), "the options": str(keywords)})
    if example:
        note(f"prompt: {prompt}")
    terminal.note_unread(source)
    if as_json:
        done = decoder.generate(source.ids, **keywords)
        print(json.dumps(_as_dict(done), ensure_ascii=False))
    elif not wanted.of_finished:
        chunks = decoder.stream(source.ids, **keywords)
        last = terminal.show(chunks, drafts=show_drafts and decoder.drafts)
        note(footer(last.stats, last.finish_reason, wanted.max_tokens))
    else:
        done = decoder.generate(source.ids, **keywords)
        for each in (done, *done.alternatives):
            print((f"{each.score:.4f}\t" if wanted.scores else "") + each.text, flush=True)
            note(footer(each.stats, each.finish_reason, wanted.max_tokens))
    terminal.give_tips()


class LazyGroup(TyperGroup):
    """Imports a command's module when the command is called; --help needs only `COMMANDS`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """Import a command, and make of its function what the command line calls."""
    app = terminal.new_app()
    function = getattr(import_module(f".{name}", __package__), name)
    app.command(name, help=_help(function))(function)
    return typer.main.get_command(app)


def main() -> NoReturn:
    """Run `speculative-t5`, or `python -m speculative_t5`."""
    installed = Path(sys.argv[0]).name != "__main__.py"
    name = "speculative-t5" if installed else "python -m speculative_t5"
    app = terminal.new_app(completion=installed)  # a shell completes the names of programs
    epilog, help = EXAMPLES.format(name=name), _help(generate)
    app.callback(cls=LazyGroup, invoke_without_command=True, epilog=epilog, help=help)(generate)
    for command, summary in COMMANDS.items():
        app.command(command, help=summary)(_not_imported)
    terminal.run(app, name)


def convert_main() -> NoReturn:
    """Run convert.py."""
    terminal.run(load_command("convert"), "python convert.py")


def _not_imported() -> None:
    """Stand for a command in --help; `LazyGroup` puts the real one in its place."""


def _help(command: Callable[..., None]) -> str:
    """Return a command's docstring, a line for each paragraph, for --help to wrap."""
    paragraphs = (command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def _refuse_options_before(ctx: typer.Context, command: str) -> None:
    group = cast(Any, ctx.command)
    others = {each.name for each in group.commands[command].params}
    for given in group.params:
        if is_given(ctx, given.name):
            if given.name in others:
                raise ValueError(
                    f"{given.opts[0]} comes before {command!r}: put it after {command!r}"
                )
            raise ValueError(f"{given.opts[0]} is not an option of {command!r}: leave it out")


def _read_prompt(*, asked: bool) -> str | None:
    """Read the prompt from standard input if that is a pipe or a file, or was asked for."""
    if process_group():  # a launcher gives each process a pipe, and may never end it
        if asked:
            raise ValueError(
                "one prompt on standard input cannot be read by several processes: give it with "
                "--prompt"
            )
        return None
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not asked and not stat.S_ISFIFO(mode) and not stat.S_ISREG(mode):
        return None
    return decoded(sys.stdin.buffer.read(), "the prompt on standard input").strip()


def _as_dict(done: Generation) -> dict[str, object]:
    own = [each.name for each in fields(done.stats)]
    names = [*STATS_IN_JSON, *own, "acceptance_by_position", "tokens_per_second"]
    stats = {name: getattr(done.stats, name) for name in names}
    found: dict[str, object] = {"text": done.text, "tokens": done.tokens, **as_record(done)}
    found["stats"] = stats
    if done.alternatives:
        found["alternatives"] = [_as_dict(each) for each in done.alternatives]
    return found
