"""The command line: `python -m speculative_t5`, and convert.py."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from tqdm import tqdm

from . import backend
from .conversion import DTYPES, convert
from .decoder import NumDraft, SpeculativeDecoder, VerifyRule
from .inspection import OUTPUT_TOKENS, SOURCE_TOKENS, Inspection, inspect
from .results import Generation, Stats

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130
DEFAULT_MODEL, DEFAULT_DRAFT = "correct-base", "correct-small"
DEFAULT_PROMPT = (
    "correct: my sister have never been too paris. She wants to to go their next summer, but its "
    "very expensive"
)
# typer exports one kind of its errors in arguments; this is the base of them all.
ArgumentError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])


def generate(
    model: Annotated[str, typer.Option(help="Target: a folder, or a name under weights/.")] = (
        DEFAULT_MODEL
    ),
    draft_model: Annotated[
        str | None,
        typer.Option(
            help=f"Draft: a folder or a name, with the target's tokenizer; or lookup, to copy from "
            f"the prompt with no model. [default: {DEFAULT_DRAFT} for {DEFAULT_MODEL}, else none]",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Text to give the model; - reads standard input, as does a pipe. "
            "[default: a sentence to correct]",
            show_default=False,
        ),
    ] = None,
    lookup: Annotated[
        bool, typer.Option("--lookup", help="Lookups after the draft model's tokens, too.")
    ] = False,
    min_ngram: Annotated[
        int, typer.Option(help="Fewest last tokens that a lookup must find again.")
    ] = 1,
    max_ngram: Annotated[
        int, typer.Option(help="Longest match that a lookup tells from a shorter one.")
    ] = 8,
    num_draft: Annotated[
        str, typer.Option(help="Tokens to draft for each target pass; or auto.")
    ] = "5",
    delta: Annotated[
        float,
        typer.Option(help="Lenience from 0 to 1; above 0 the output is no longer the target's."),
    ] = 0.0,
    verify: Annotated[
        str,
        typer.Option(help="Rule for drafts when drawing: token, block (accepts more), or auto."),
    ] = "auto",
    temperature: Annotated[float, typer.Option(help="0 is greedy; above it, draw.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k most probable tokens; 0 is all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(help="Then from the most probable that reach this sum; 1 is all."),
    ] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Upper bound on tokens, EOS included.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    regular_decode: Annotated[
        bool, typer.Option("--regular-decode", help="Decode with the target alone.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the stream.")
    ] = False,
) -> None:
    """Generate text with a T5 model, faster by speculative decoding.

    Standard output gets the text; standard error gets a line of statistics.
    """
    if prompt is None or prompt == "-":
        prompt = _read_prompt(asked=prompt == "-")
    _check_utf8(prompt)
    if regular_decode:
        draft_model, lookup = None, False
    elif draft_model is None and Path(model).name == DEFAULT_MODEL:
        draft_model = DEFAULT_DRAFT
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    decoder = SpeculativeDecoder.from_pretrained(
        model, draft_model, num_draft=_num_draft(num_draft), delta=delta,
        verify=cast(VerifyRule, verify), lookup=lookup, min_ngram=min_ngram, max_ngram=max_ngram,
    )  # fmt: skip
    if as_json:
        done = decoder.generate(
            prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            seed=seed,
        )  # fmt: skip
        print(json.dumps(_as_dict(done), ensure_ascii=False))
    else:
        stats = Stats()
        for chunk in decoder.stream(
            prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            seed=seed,
        ):  # fmt: skip
            print(chunk.text, end="", flush=True)
            stats = chunk.stats
        print()
        _note(_footer(stats))
    if tip := backend.advice():
        _note(tip)


def convert_command(
    model: Annotated[
        str,
        typer.Option(
            help="Checkpoint folder, converted or not, or a name on the Hugging Face Hub."
        ),
    ],
    dtype: Annotated[
        str | None, typer.Option(help=f"Type to store: {', '.join(DTYPES)}. [default: as it is]")
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
            help="Leave the feed-forward's second matrix unquantized. [default: in gated models]",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder to write. [default: weights/<name>]")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model folder that is there.")
    ] = False,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Go on where weights are NaN or infinite.")
    ] = False,
    only_inspect: Annotated[
        bool, typer.Option("--inspect", help="Tell what would be written and taken; write nothing.")
    ] = False,
) -> None:
    """Convert a Hugging Face T5 checkpoint to a model folder."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if only_inspect:
        print("\n".join(_as_lines(inspect(model, revision=revision))))
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
            revision=revision, force=force, allow_nonfinite=allow_nonfinite, progress=progress,
            note=_note,
        )  # fmt: skip
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder} ({size / 1e6:.1f} MB)")


def _as_lines(found: Inspection) -> Iterator[str]:
    config = found.config
    yield found.name
    yield f"  family      {found.family}"
    yield (
        f"  layers      {config.num_layers} encoder, {config.num_decoder_layers} decoder; d_model "
        f"{config.d_model}, {config.num_heads} heads of {config.d_kv}, d_ff {config.d_ff}, "
        f"{'gated ' if config.gated else ''}{config.activation}, "
        f"{'own' if config.own_head else 'tied'} head"
    )
    yield f"  vocabulary  {config.vocab_size} rows; tokenizer of {found.vocabulary}"
    stored = f"stored as {', '.join(found.stored)}" if found.stored else "by config.json alone"
    yield f"  parameters  {found.num_parameters / 1e6:.1f} million, {stored}"
    if config.quantization:
        yield f"  quantized   to {config.quantization}"
    if found.sizes:
        yield f"  {'':18} {'to write':>10}  to run in {'  '.join(found.sizes[0].memory)}"
    for way in found.sizes:
        run = "".join(f"{size / 1e9:9.3f} GB" for size in way.memory.values())
        yield f"  {way.options:18} {way.file / 1e9:7.3f} GB      {run}"
    drafts = [f"{path} ({count / 1e6:.1f} million)" for path, count in found.drafts]
    yield f"  drafts      {', '.join(drafts) or 'none of its tokenizer under weights/'}"
    if found.sizes:
        yield (
            f"To run: weights, and keys and values of {SOURCE_TOKENS} source and {OUTPUT_TOKENS} "
            f"output tokens; {str(backend.default_dtype()).removeprefix('mlx.core.')} is this "
            "device's default."
        )


def main() -> NoReturn:
    """Entry point of `python -m speculative_t5`."""
    run(generate, "python -m speculative_t5")


def convert_main() -> NoReturn:
    """Entry point of convert.py."""
    run(convert_command, "python convert.py")


def run(command: Callable[..., None], name: str) -> NoReturn:
    """Run one command; errors become one line on standard error and an exit code.

    Exits with 0, 2 for bad input, 1 for a failure while running, 130 for Ctrl-C.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _terminate)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        code = app(prog_name=name, standalone_mode=False) or 0
        if code == INTERRUPTED:  # what newer versions of typer make of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", INTERRUPTED)
    except ArgumentError as error:
        _fail(f"{error.format_message().rstrip('.')}; see {name} --help", BAD_INPUT)
    except BrokenPipeError:
        # The reader went away, as `head` does; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except ValueError as error:
        _fail(str(error), BAD_INPUT)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", FAILED if full else BAD_INPUT)
    except (RuntimeError, MemoryError) as error:
        _fail(f"failed while running: {str(error) or type(error).__name__}", FAILED)


def _terminate(number: int, _: object) -> NoReturn:
    """Leave in such a way that what is half-written is removed."""
    sys.exit(128 + number)


def _fail(message: str, code: int) -> NoReturn:
    line = " ".join(message.split())
    # What a file says of itself may hold what a terminal would obey.
    _note("error: " + "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line))
    sys.exit(code)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _read_prompt(asked: bool) -> str:
    """The prompt from standard input if it is a pipe or a file, or if asked; else the default."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError) as error:  # closed, or not a file at all
        if asked:
            raise ValueError(
                "the prompt was to come from standard input, which is closed"
            ) from error
        return DEFAULT_PROMPT
    if not asked and not stat.S_ISFIFO(mode) and not stat.S_ISREG(mode):
        return DEFAULT_PROMPT
    try:
        return sys.stdin.buffer.read().decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the prompt on standard input is not UTF-8: byte {error.object[error.start]:#04x} "
            f"at offset {error.start}"
        ) from error


def _check_utf8(prompt: str) -> None:
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(prompt[error.start]) & 0xFF  # how Python passes on what it cannot decode
        raise ValueError(
            f"--prompt is not UTF-8: byte {byte:#04x} at character {error.start}"
        ) from error


def _num_draft(text: str) -> NumDraft:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"--num-draft must be an integer of at least 1 or auto, got {text!r}"
        ) from None


def _footer(stats: Stats) -> str:
    acceptance = f"acceptance {stats.acceptance_rate:.0%}" if stats.drafted else "no draft"
    return (
        f"[{stats.emitted} tokens, {stats.tokens_per_second:.0f} tokens/s, {acceptance}, "
        f"{stats.rounds} rounds, {stats.tokens_per_round:.1f} tokens per round]"
    )


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
