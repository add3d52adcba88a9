"""The names of the commands, and the entry points of the command line."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from . import terminal

# The commands in the order of --help, each a function in a module of its name. Modules are imported
# when they are called, so the first lines of the functions' docstrings are here as well.
COMMANDS = {
    "repl": "Try prompts and options one after another, on models that are loaded once.",
    "batch": "Generate for each line of a file of prompts; write one JSON record per line, in "
    "order.",
    "correct": "Correct a text or files.",
    "translate": "Translate a text or files.",
    "document": "Rewrite texts of any length, for example to correct or translate them.",
    "serve": "Serve models over HTTP, in the protocols of OpenAI, LanguageTool and LibreTranslate.",
    "models": "List the models on this machine: family, size, stored types, and the drafts that "
    "fit each.",
    "convert": "Convert a Hugging Face T5 checkpoint to a model folder.",
    "distill": "Train a draft for a T5 or T5Gemma from prompts alone.",
    "bench": "Measure greedy decoding: plain, speculative, lookup, auto.",
    "doctor": "Check on this machine that outputs are right, and measure how many tokens to draft.",
}
HELP_EXAMPLES = """Examples:

{name} correct "He go home"

{name} translate --to German --model google/madlad400-3b-mt letter.docx --output brief.docx

{name} --prompt "He go home" --show-drafts

{name} batch prompts.txt --output out.jsonl"""


class LazyGroup(TyperGroup):
    """Imports a command's module when the command is called; --help needs only `COMMANDS`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and (name := args[0]) in COMMANDS:
            processes = terminal.process_group()
            if processes and name != "batch":
                raise ValueError(
                    f"{name} runs in one process, and {processes.group.size()} were started: run "
                    "it without a launcher"
                )
            self.commands[name] = load_command(name)
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
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:  # which alone has to be imported
        app.callback(cls=LazyGroup)(_nothing)
    else:
        from .generate import generate

        epilog, help = HELP_EXAMPLES.format(name=name), _help(generate)
        app.callback(cls=LazyGroup, invoke_without_command=True, epilog=epilog, help=help)(generate)
    for command, summary in COMMANDS.items():
        app.command(command, help=summary)(_nothing)
    terminal.run(app, name)


def convert_main() -> NoReturn:
    """Run convert.py."""
    terminal.run(load_command("convert"), "python convert.py")


def _nothing() -> None:
    """Stand for the default command where another is called, and for the others in --help."""


def _help(command: Callable[..., None]) -> str:
    """Return a command's docstring, a line for each paragraph, for --help to wrap."""
    paragraphs = (command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)
