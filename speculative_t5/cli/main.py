"""The default command, `convert`, and the entry points of the command line."""

import json
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from tqdm import tqdm

from .. import libraries
from .._version import __version__
from ..checkpoints import DTYPES, as_listing, convert, inspect
from ..distributed import process_group
from ..errors import check_utf8, decoded, escaped
from ..generation import BatchOptions, Generation, GenerationOptions, as_record
from ..options import option
from . import terminal
from .batch import batch
from .bench import bench
from .distill import distill
from .doctor import doctor
from .document import document
from .examples import SENTENCES_TO_CORRECT
from .job import COUNTS
from .models import models
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
from .repl import repl
from .serve import serve
from .terminal import footer, note

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


@dataclass(frozen=True)
class ConvertOptions:
    """The keywords of `convert`."""

    model: str | None = option(None, "The same, as an option.")
    dtype: str | None = option(
        None, f"Type to store: {', '.join(DTYPES)}.", shown="the type in the checkpoint"
    )
    quantize: int | None = option(None, "Quantize matrices to 4 or 8 bits.")
    group_size: int = option(64, "Weights that share a scale when quantized: 32, 64 or 128.")
    keep_wo: bool | None = option(
        None, "Leave the feed-forward's second matrix unquantized.", shown="in gated models"
    )
    adapter: str | None = option(
        None,
        "LoRA adapter of PEFT to merge first: a folder or a name; alone, into the model it names.",
    )
    output: Path | None = option(
        None,
        "Folder to write.",
        shown="weights/<name> in a checkout, else in the user's data folder",
    )
    revision: str | None = option(None, "Branch, tag or commit on the Hub.")
    force: bool = option(False, "Replace an existing model folder.")
    allow_nonfinite: bool = option(False, "Convert even if some weights are NaN or infinite.")


@with_options
def convert_command(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint folder, converted or not, or a name on the Hugging Face Hub.",
        ),
    ] = None,
    *,
    options: Annotated[dict[str, Any], ConvertOptions],
    only_inspect: bool = option(
        False, "Show what the checkpoint is, and which models here can draft for it; write nothing."
    ),
) -> None:
    """Convert a Hugging Face T5 checkpoint to a model folder."""
    given = [name for name in (checkpoint, options.pop("model")) if name is not None]
    if not given and options["adapter"]:
        given = [options["adapter"]]
    if len(given) != 1:
        raise ValueError(
            f"convert takes one checkpoint, got {len(given)}: give the path of its folder, or a "
            "name such as google/flan-t5-small"
        )
    (model,) = given
    if only_inspect:
        inspected = inspect(model, adapter=options["adapter"], revision=options["revision"])
        print("\n".join(map(escaped, as_listing(inspected))))
        return
    # Not before the first bytes: a refusal stays one line.
    with tqdm(
        desc="converting", unit="B", unit_scale=True, disable=None, delay=1e-3, mininterval=0
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        folder = convert(model, **options, note=note, progress=show)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{escaped(str(folder))} ({size / 1e6:.1f} MB)")


def main() -> NoReturn:
    """Run `speculative-t5`, or `python -m speculative_t5`."""
    installed = Path(sys.argv[0]).name != "__main__.py"
    name = "speculative-t5" if installed else "python -m speculative_t5"
    app = terminal.new_app(completion=installed)  # a shell completes the names of programs
    epilog = EXAMPLES.format(name=name)
    app.callback(invoke_without_command=True, epilog=epilog, help=_help(generate))(generate)
    for command in (repl, batch, document, serve, models, convert_command, distill, bench, doctor):
        app.command(command.__name__.removesuffix("_command"), help=_help(command))(command)
    terminal.run(app, name)


def convert_main() -> NoReturn:
    """Run convert.py."""
    app = terminal.new_app()
    app.command(help=_help(convert_command))(convert_command)
    terminal.run(app, "python convert.py")


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
    names = [*COUNTS, *own, "acceptance_by_position", "tokens_per_second"]
    stats = {name: getattr(done.stats, name) for name in names}
    found: dict[str, object] = {"text": done.text, "tokens": done.tokens, **as_record(done)}
    found["stats"] = stats
    if done.alternatives:
        found["alternatives"] = [_as_dict(each) for each in done.alternatives]
    return found
