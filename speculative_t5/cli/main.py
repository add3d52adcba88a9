"""The command line: `python -m speculative_t5`, and convert.py."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from tqdm import tqdm

from .. import __version__, device
from ..bench import speedup
from ..checkpoints import DTYPES, Observer, as_lines, convert, inspect
from ..errors import check_utf8, not_utf8
from ..generation import Chunk, Generation
from .batch import batch
from .bench import bench
from .models import models
from .options import (
    DEFAULT_MODEL,
    MODELS,
    OUTPUT,
    Chat,
    Delta,
    DraftLength,
    DraftModel,
    DraftVocab,
    Dtype,
    Lookup,
    MaxNgram,
    MaxSource,
    MaxTokens,
    MinNgram,
    Model,
    Prefix,
    RegularDecode,
    Seed,
    Temperature,
    TopK,
    TopP,
    Truncate,
    Verify,
    make_decoder,
)
from .repl import repl
from .terminal import (
    footer,
    give_tips,
    is_terminal,
    new_app,
    note,
    patience,
    print_stream,
    remark,
    run,
)

DEFAULT_PROMPT = (
    "my sister have never been too paris. She wants to to go their next summer, but its "
    "very expensive"
)


EXAMPLES = """Examples:

{name} --prompt "He go home" --show-drafts

{name} batch prompts.txt --output out.jsonl"""


def _print_version(asked: bool) -> None:
    if asked:
        print(f"speculative_t5 {__version__}, mlx {metadata.version('mlx')}")
        for part, state in device.parts.items():
            print(f"{part}: {state}")
        raise typer.Exit


def generate(
    ctx: typer.Context,
    model: Model = DEFAULT_MODEL,
    draft_model: DraftModel = None,
    chat: Chat = False,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Text to give the model; - reads standard input, as does a pipe.",
            show_default=f"a sentence to correct, for {DEFAULT_MODEL} alone",
            rich_help_panel=MODELS,
        ),
    ] = None,
    prefix: Prefix = None,
    max_source_length: MaxSource = None,
    truncate: Truncate = False,
    dtype: Dtype = None,
    num_draft: DraftLength = "5",
    lookup: Lookup = False,
    min_ngram: MinNgram = 1,
    max_ngram: MaxNgram = 8,
    delta: Delta = 0.0,
    verify: Verify = "auto",
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = 256,
    seed: Seed = 0,
    draft_vocab: DraftVocab = None,
    regular_decode: RegularDecode = False,
    show_drafts: Annotated[
        bool,
        typer.Option(
            "--show-drafts",
            help="On a terminal, colour tokens by where they came from.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object instead of the stream.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
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
    """Generate text with a T5 or a decoder-only model, faster by speculative decoding.

    Standard output gets the text; standard error gets a line of statistics.
    """
    if ctx.invoked_subcommand:
        _refuse_options_before(ctx, ctx.invoked_subcommand)
        return
    if prompt is None or prompt == "-":
        prompt = _read_prompt(asked=prompt == "-")
    example = prompt is None
    if prompt is None:
        if Path(model).name != DEFAULT_MODEL:  # the sentence would mean nothing to it
            raise ValueError(
                f"there is no prompt for {model}: give one by --prompt or on standard input"
            )
        prompt = DEFAULT_PROMPT
    check_utf8("--prompt", prompt)
    if not prompt.strip():
        raise ValueError("the prompt is empty: give some text by --prompt or on standard input")
    decoder = make_decoder(
        model, draft_model, lookup=lookup, min_ngram=min_ngram, max_ngram=max_ngram,
        num_draft=num_draft, delta=delta, verify=verify, regular_decode=regular_decode,
        draft_vocab=draft_vocab, chat=chat, prefix=prefix, max_source_length=max_source_length,
        truncate=truncate, dtype=dtype,
    )  # fmt: skip
    source = decoder.fit(prompt, max_tokens)
    if example:
        note(f"prompt: {prompt}")
    remark(source)
    if as_json:
        done = decoder.generate(
            source.ids, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            seed=seed,
        )  # fmt: skip
        print(json.dumps(_as_dict(done), ensure_ascii=False))
    else:
        with patience() as watched:
            chunks = decoder.stream(
                source.ids, max_tokens=max_tokens, temperature=temperature, top_k=top_k,
                top_p=top_p, seed=seed,
            )  # fmt: skip
            last = _show(watched(chunks), drafts=show_drafts and decoder.drafts)
        estimated = None
        if last.stats.drafted and is_terminal(sys.stderr):  # nobody waits for it elsewhere
            estimated = speedup(
                decoder, source.ids, last.stats, max_tokens=max_tokens, temperature=temperature,
                top_k=top_k, top_p=top_p, seed=seed,
            )  # fmt: skip
        note(footer(last.stats, last.finish_reason, max_tokens, estimated))
    give_tips()


def convert_command(
    model: Annotated[
        str,
        typer.Option(
            help="Checkpoint folder, converted or not, or a name on the Hugging Face Hub."
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Type to store: {', '.join(DTYPES)}.", show_default="as it is"),
    ] = None,
    quantize: Annotated[
        int | None, typer.Option(help="Quantize matrices to 4 or 8 bits.", show_default=False)
    ] = None,
    group_size: Annotated[
        int, typer.Option(help="Weights that share a scale when quantized: 32, 64 or 128.")
    ] = 64,
    keep_wo: Annotated[
        bool | None,
        typer.Option(
            "--keep-wo/--no-keep-wo",
            help="Leave the feed-forward's second matrix unquantized.",
            show_default="in gated models",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write.",
            show_default="weights/<name> here, or else in the user's own folder",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model folder that is there.")
    ] = False,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Go on where weights are NaN or infinite.")
    ] = False,
    only_inspect: Annotated[
        bool,
        typer.Option(
            "--inspect", help="Show what would be written and what it takes; write nothing."
        ),
    ] = False,
) -> None:
    """Convert a Hugging Face T5 checkpoint to a model folder."""
    if only_inspect:
        print("\n".join(as_lines(inspect(model, revision=revision))))
        return
    with contextlib.ExitStack() as stack:
        bars: list[Any] = []

        def progress(done: int, total: int) -> None:
            if not bars:  # not before the first bytes, so that a refusal stays one line
                bar = tqdm(total=total, desc="converting", unit="B", unit_scale=True, disable=None)
                bars.append(stack.enter_context(bar))
            bars[0].update(done - bars[0].n)

        folder = convert(
            model, output, dtype=dtype, quantize=quantize, group_size=group_size, keep_wo=keep_wo,
            revision=revision, force=force, allow_nonfinite=allow_nonfinite,
            observer=Observer(progress, note),
        )  # fmt: skip
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder} ({size / 1e6:.1f} MB)")


def main() -> NoReturn:
    """Entry point of `speculative-t5`, and of `python -m speculative_t5`."""
    installed = Path(sys.argv[0]).name != "__main__.py"
    name = "speculative-t5" if installed else "python -m speculative_t5"
    app = new_app(completion=installed)  # shells complete names of programs
    app.callback(invoke_without_command=True, epilog=EXAMPLES.format(name=name))(generate)
    app.command(short_help="Try prompts and options one after another.")(repl)
    app.command(short_help="Generate for every line of a file of prompts.")(batch)
    app.command(short_help="List the models that are here, and which pairs fit.")(models)
    app.command("convert", short_help="Convert a Hugging Face checkpoint.")(convert_command)
    app.command(short_help="Measure how fast decoding is here.")(bench)
    run(app, name)


def convert_main() -> NoReturn:
    """Entry point of convert.py."""
    app = new_app()
    app.command()(convert_command)
    run(app, "python convert.py")


def _refuse_options_before(ctx: typer.Context, command: str) -> None:
    """They would be this command's own, and have no effect."""
    commands = cast(Any, ctx.command).commands
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--json" if name == "as_json" else "--" + name.replace("_", "-")
            if name in {each.name for each in commands[command].params}:
                raise ValueError(f"{option} stands before the word {command}: put it after that")
            raise ValueError(f"{option} is no option of {command}: leave it out")


def _show(chunks: Iterable[Chunk], *, drafts: bool) -> Chunk:
    """Print a stream as it comes; rich, which takes time to import, is for who can see it."""
    if sys.stdout is None or not (sys.stdout.isatty() or "FORCE_COLOR" in os.environ):
        return print_stream(chunks)
    from .view import show

    return show(chunks, drafts=drafts)


def _read_prompt(*, asked: bool) -> str | None:
    """The prompt from standard input, if that is a pipe or a file or was asked for."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError) as error:  # closed, or not a file at all
        if asked:
            raise ValueError(
                "the prompt was to come from standard input, which is closed: give it by --prompt"
            ) from error
        return None
    if not asked and not stat.S_ISFIFO(mode) and not stat.S_ISREG(mode):
        return None
    try:
        return sys.stdin.buffer.read().decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on standard input is {not_utf8(error)}") from error


def _as_dict(done: Generation) -> dict[str, object]:
    stats: dict[str, object] = {}
    for name in ("rounds", "drafted", "accepted", "acceptance_rate", "tokens_per_round"):
        stats[name] = getattr(done.stats, name)
    stats |= dataclasses.asdict(done.stats)
    for name in ("acceptance_by_position", "tokens_per_second"):
        stats[name] = getattr(done.stats, name)
    return {
        "text": done.text,
        "tokens": done.tokens,
        "finish_reason": done.finish_reason,
        "stats": stats,
    }
