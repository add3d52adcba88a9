"""The default command: one prompt; its text comes as it is accepted, or as it is corrected."""

import json
import os
import stat
import sys
import time
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from .._version import __version__
from ..documents import Document, RewriteOptions, identifier, read_identifier_ahead
from ..errors import check_utf8, decoded
from ..generation import (
    STATS_IN_JSON,
    BatchOptions,
    Generation,
    GenerationOptions,
    SpeculativeDecoder,
    as_record,
)
from ..kernels import native_parts
from . import terminal
from .examples import SENTENCES_TO_CORRECT
from .options import (
    DEFAULT_MODEL,
    DecoderOptions,
    Keywords,
    choose,
    is_given,
    model_option,
    output_option,
    with_options,
)
from .report import list_kept
from .terminal import footer, note

UNGUARDED_OPTIONS = {  # that ask for a model's own output, whatever they say
    *("show_drafts", "as_json", "delta", "prefix", "truncate", "max_source_length"),
    *(each.name for each in fields(GenerationOptions) if each.name != "speculative"),
}
DEFAULT_PROMPT = SENTENCES_TO_CORRECT[0].removeprefix("correct: ")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"speculative_t5 {__version__}, mlx {metadata.version('mlx')}")
        for part, state in native_parts().items():
            print(f"{part}: {state}")
        raise typer.Exit


@with_options
def generate(
    ctx: typer.Context,
    *,
    prompt: str | None = model_option(
        None,
        "Prompt; - reads it from standard input. Without this option, a pipe or a redirected file "
        "is read.",
        shown=f"a sentence to correct, if the model is {DEFAULT_MODEL}",
    ),
    options: DecoderOptions,
    keywords: Keywords,
    show_drafts: bool = output_option(
        False, "On a terminal, colour tokens by where they came from."
    ),
    as_json: bool = output_option(False, "Print one JSON object at the end instead of the text."),
    guard: bool = output_option(
        True,
        "If the model corrects, leave out changes as `correct` does; --no-guard, --show-drafts, "
        "--json and options that change the text print the model's own.",
    ),
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
    if ctx.invoked_subcommand:
        _refuse_options_before(ctx, ctx.invoked_subcommand)
        return
    processes = terminal.process_group()
    prompt, is_example = _find_prompt(prompt, options)
    options, keywords = choose(ctx, options, keywords)  # checked before the models are loaded
    wanted = GenerationOptions(**keywords)
    if show_drafts and wanted.beams:
        raise ValueError(
            f"num_beams is {wanted.num_beams}, and a beam search has no drafts: leave out "
            "--show-drafts"
        )
    decoder = _load_decoder(options, guard=guard)
    if is_example:
        note(f"prompt: {prompt}")
    if guard and _can_guard(ctx, decoder, options, wanted):
        _print_guarded(decoder, prompt, speculative=wanted.speculative)
    else:
        source = decoder.fit(prompt)
        if processes:
            decoder.check_batch(BatchOptions(**keywords))  # in all processes
            processes.start({"the prompt": str(source.ids), "the options": str(keywords)})
        terminal.note_unread(source)
        _print_own(decoder, source.ids, keywords, as_json=as_json, show_drafts=show_drafts)
    terminal.give_tips()


def _load_decoder(options: DecoderOptions, *, guard: bool) -> SpeculativeDecoder:
    """Load the models, and meanwhile what the guard tells languages apart by."""
    if guard and options.corrects:
        read_identifier_ahead()
    processes = terminal.process_group()
    return options.load(processes.group if processes else None)


def _can_guard(
    ctx: typer.Context,
    decoder: SpeculativeDecoder,
    options: DecoderOptions,
    wanted: GenerationOptions,
) -> bool:
    """Whether nothing asks for the model's own output; if --guard is given, nothing may."""
    why = _own_because(ctx, decoder, options, wanted)
    if why and is_given(ctx, "guard"):
        raise ValueError(f"--guard is for what a model that corrects writes greedily, and {why}")
    return why is None


def _own_because(
    ctx: typer.Context,
    decoder: SpeculativeDecoder,
    options: DecoderOptions,
    wanted: GenerationOptions,
) -> str | None:
    """Say what asks for the model's own output, if anything does."""
    if not getattr(decoder.tokenizer, "corrects", None):
        return f"{options.name} does not say that it corrects: leave out --guard"
    if terminal.process_group():
        return "several processes share the target: leave out --guard"
    for each in ctx.command.params:
        if each.name in UNGUARDED_OPTIONS and is_given(ctx, each.name):
            return f"{each.opts[0]} asks for its own: leave out one of the two"
    if options.prefix or wanted != GenerationOptions(speculative=wanted.speculative):
        return "the task has options of its own: leave out --task or --guard"
    return None


def _print_guarded(decoder: SpeculativeDecoder, prompt: str, *, speculative: bool) -> None:
    """Print a text corrected sentence by sentence, and which changes are left out."""
    text = prompt.removeprefix(decoder.prefix)
    document = Document(decoder, text, RewriteOptions(), labels=True)
    identifier()  # its reading is no part of the rate
    began = time.perf_counter()
    pieces = document.settled(document.rewrite(speculative=speculative))
    result = document.result(pieces, time.perf_counter() - began)
    print(result.text, flush=True)
    list_kept(result.pieces, lambda line: f"line {line}")
    note(footer(result.stats, None, 0))


def _find_prompt(given: str | None, options: DecoderOptions) -> tuple[str, bool]:
    """Return the prompt, and whether it is the sentence that stands for one of the user's."""
    prompt = given
    if given is None or given == "-":
        prompt = _read_prompt(asked=given == "-")
    is_example = prompt is None
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
    return prompt, is_example


def _print_own(
    decoder: SpeculativeDecoder,
    ids: list[int],
    keywords: dict[str, Any],
    *,
    as_json: bool,
    show_drafts: bool,
) -> None:
    """Print the model's own output, as JSON, once it has ended, or as its tokens come."""
    wanted = GenerationOptions(**keywords)
    if as_json:
        print(json.dumps(_as_dict(decoder.generate(ids, **keywords)), ensure_ascii=False))
    elif wanted.of_finished:
        done = decoder.generate(ids, **keywords)
        for each in (done, *done.alternatives):
            print((f"{each.score:.4f}\t" if wanted.scores else "") + each.text, flush=True)
            note(footer(each.stats, each.finish_reason, wanted.max_tokens))
    else:
        chunks = decoder.stream(ids, **keywords)
        last = terminal.show(chunks, drafts=show_drafts and decoder.drafts)
        note(footer(last.stats, last.finish_reason, wanted.max_tokens))


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
    if terminal.process_group():  # a launcher gives each process a pipe, and may never end it
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
