"""`python -m speculative_t5 batch`: files of prompts."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, cast

import mlx.core as mx
import typer
from tqdm import tqdm

from .job import Earlier, Output, Record, process
from .options import (
    DEFAULT_MODEL,
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
    Temperature,
    TopK,
    TopP,
    Truncate,
    Verify,
    make_decoder,
)
from .prompts import JSON_SUFFIXES, Format, Shard, count_lines, open_input, read_lines
from .terminal import (
    SOME_FAILED,
    Failure,
    cut_at,
    give_tips,
    note,
    printable,
    signals_held,
    some_of,
)

MOST_TOLD = 10  # errors of single lines, on standard error


def batch(
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="Prompts, one a line: text, or JSON Lines; - is standard input.",
            show_default=False,
        ),
    ],
    output: Annotated[
        str,
        typer.Option(help="JSON Lines to write, one record a line of INPUT; - is standard output."),
    ] = "-",
    batch_size: Annotated[int, typer.Option(help="Prompts decoded side by side.")] = 16,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Of INPUT: text or jsonl.",
            show_default=f"jsonl with --field or if INPUT ends in {', '.join(JSON_SUFFIXES)}",
        ),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(help="Where the prompt is in a JSON object.", show_default="text"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the records in OUTPUT, and go on after them.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is in OUTPUT.")] = False,
    shard: Annotated[
        str, typer.Option(help="This part of INPUT only: 2/8 is every eighth line from the second.")
    ] = "1/1",
    model: Model = DEFAULT_MODEL,
    draft_model: DraftModel = None,
    chat: Chat = False,
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
    seed: Annotated[
        int, typer.Option(help="Seed for sampling, used with the number of each line.")
    ] = 0,
    draft_vocab: DraftVocab = None,
    regular_decode: RegularDecode = False,
) -> None:
    """Generate for every line of a file of prompts; one JSON record for each, in their order.

    A line that cannot be used gets a record with its error, and the run goes on; the exit code is
    then 3. A record is written when it and all records before it are done.
    """
    part = Shard.parse(shard)
    if resume and force:
        raise ValueError("--resume keeps OUTPUT and --force replaces it: give one of them")
    with open_input(source) as stream:
        writer = Output(output, stream, resume=resume, force=force)
        lines = read_lines(stream, *_form(source, form, field), part)
        total = count_lines(stream)
        decoder = make_decoder(
            model, draft_model, lookup=lookup, min_ngram=min_ngram, max_ngram=max_ngram,
            num_draft=num_draft, delta=delta, verify=verify, regular_decode=regular_decode,
            draft_vocab=draft_vocab, chat=chat, prefix=prefix, max_source_length=max_source_length,
            truncate=truncate, dtype=dtype,
        )  # fmt: skip
        run_all = partial(
            decoder.iter_batch, batch_size=batch_size, max_tokens=max_tokens,
            temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
            by_length=total is not None,  # from a pipe they are taken as they come
        )  # fmt: skip
        run_all(())  # options are checked here, before anything is written
        expected = None if total is None else part.size(total)
        with writer:
            earlier = Earlier()
            if resume:
                lines, earlier = writer.resume(lines)
            with _Progress(expected, earlier, max_tokens, advise=writer.regular) as progress:

                def emit(record: Record) -> None:
                    with signals_held():
                        writer.append(record)
                        progress.written += 1

                encode = partial(decoder.fit, max_tokens=max_tokens)
                process(lines, run_all, encode, emit, watch=progress.count)
    if expected is not None and progress.written < expected:
        raise Failure(
            f"{source} had {expected} lines to do when the run began but {progress.written} when "
            "it was read: run this again once nothing changes it any more"
        )
    give_tips()
    if progress.failed:
        raise typer.Exit(SOME_FAILED)


class _Progress:
    """What a run over a file shows on standard error: a bar, errors, and a line at the end."""

    def __init__(
        self, total: int | None, earlier: Earlier, max_tokens: int, *, advise: bool
    ) -> None:
        self.written, self.failed, self._cut = earlier.done, earlier.failed, earlier.cut.copy()
        self._total = total
        self._earlier = earlier.done
        self._max_tokens = max_tokens
        self._advise = advise
        self._unknown: dict[str, None] = {}  # characters, in the order they were met
        self._lacking = 0  # prompts with some of them
        self._told = self._tokens = self._rounds = self._drafted = self._accepted = 0
        self._began = time.perf_counter()
        self._bar = tqdm(total=total, initial=earlier.done, unit=" prompts", disable=None)

    def count(self, record: Record) -> None:
        """One more record is known."""
        if record.done is None:
            self.failed += 1
            self._tell(f"line {record.line.number}: {record.error}")
        else:
            stats = record.done.stats
            self._tokens += stats.emitted
            self._rounds += stats.rounds
            self._drafted += stats.drafted
            self._accepted += stats.accepted
            self._cut[stats.emitted] += record.done.finish_reason == "length"
            rate = self._tokens / (time.perf_counter() - self._began)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._lacking += bool(record.unknown)
        self._unknown |= dict.fromkeys(record.unknown)
        self._bar.update()

    def _tell(self, error: str) -> None:
        self._told += 1
        if self._told <= MOST_TOLD:
            tqdm.write(printable(error), file=sys.stderr)
        elif self._told == MOST_TOLD + 1:
            tqdm.write("further errors are in the output only", file=sys.stderr)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Take the bar away, and tell what was done."""
        self._bar.close()
        if self._lacking:
            note(
                f"prompts with characters that the model's vocabulary lacks: {self._lacking:,} "
                f"({some_of(self._unknown)}); it reads an unknown mark instead"
            )
        note(f"[{', '.join(self._parts())}]")
        if kind is not None and self.written and self._advise:
            note("what is written stays; --resume goes on after it")

    def _parts(self) -> Iterator[str]:
        seconds = time.perf_counter() - self._began
        share = "" if self._total in (None, self.written) else f" of {self._total:,}"
        yield f"{self.written:,}{share} prompts"
        if self._earlier:
            yield f"{self._earlier:,} of them before"
        if self.failed:
            yield f"{self.failed:,} with errors"
        if at_most := self._cut[self._max_tokens]:
            yield f"{at_most:,} {cut_at(self._max_tokens)}"
        if others := self._cut.total() - at_most:
            yield f"{others:,} {cut_at(None)}"
        if self._rounds:
            yield f"{self._tokens:,} tokens in {seconds:.1f} s"
            yield f"{self._tokens / seconds:,.0f} tokens/s"
            yield (
                f"acceptance {self._accepted / self._drafted:.0%}" if self._drafted else "no draft"
            )
            yield f"{self._tokens / self._rounds:.1f} tokens per round"
            resident, arrays = peak_memory() / 1e6, mx.get_peak_memory() / 1e6
            yield f"peak memory {resident:,.0f} MB, MLX's {arrays:,.0f}"


def peak_memory() -> int:
    """The most that was resident, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _form(source: str, form: str | None, field: str | None) -> tuple[Format, str]:
    """How the input is to be read, and where in it."""
    if form not in (None, "text", "jsonl"):
        raise ValueError(f"--format must be text or jsonl, got {form!r}")
    if form is None:
        form = "jsonl" if field is not None or source.endswith(JSON_SUFFIXES) else "text"
    if form == "text" and field is not None:
        raise ValueError(
            f"--field {field!r} is for --format jsonl, as lines of text have no fields: "
            "leave out --field or --format text"
        )
    return cast(Format, form), field or "text"
