"""The command `batch`: files of prompts."""

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

from ..generation import Generation
from ..tokenizers import JSON_SUFFIXES, Format, Shard, count_lines, open_input, read_lines
from .job import Earlier, Output, Record, Requests, process
from .options import DecoderOptions, RegularDecode, SamplingOptions, with_groups
from .shaping import ShapingOptions, choose, is_plain
from .terminal import (
    SOME_FAILED,
    Failure,
    a_few_of,
    cut_at,
    give_tips,
    note,
    one_line,
    signals_held,
)

MAX_ERRORS_SHOWN = 10  # on standard error


@with_groups
def batch(
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="File of prompts, one a line, as text or JSON Lines; - is standard input.",
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        str, typer.Option(help="File to write, a JSON record a line; - is standard output.")
    ] = "-",
    batch_size: Annotated[
        int | None,
        typer.Option(help="Prompts to decode side by side.", show_default="16, or 1 with --steady"),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Format of INPUT: text or jsonl.",
            show_default=f"jsonl with --field or if INPUT ends in {', '.join(JSON_SUFFIXES)}",
        ),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(help="Field of a JSON object that has the prompt.", show_default="text"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the records in OUTPUT and continue after them.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the contents of OUTPUT.")] = False,
    shard: Annotated[
        str, typer.Option(help="Use a part of INPUT: 2/8 is every eighth line, from the second on.")
    ] = "1/1",
    options: DecoderOptions,
    regular_decode: RegularDecode = False,
    sampling: SamplingOptions,
    shaping: ShapingOptions,
) -> None:
    """Generate for each line of a file of prompts; write one JSON record a line, in order.

    A line that cannot be used gets a record with its error; the run continues, and its exit code
    is 3. A record is written once it and all records before it are done. Sampling depends on the
    seed and the number of the line.
    """
    part = Shard.parse(shard)
    if resume and force:
        raise ValueError("--resume keeps OUTPUT and --force replaces it: give one of them")
    with open_input(source) as stream:
        writer = Output(output, stream, resume=resume, force=force)
        lines = read_lines(stream, *_format(source, form, field), part)
        total = count_lines(stream)
        chosen = choose(ctx, options, sampling, shaping)
        decoder = chosen.models.load(plain=is_plain(chosen, regular_decode=regular_decode))

        def generate(requests: Requests) -> Iterator[tuple[int, Generation]]:
            by_length = total is not None  # prompts from a pipe are decoded as they come
            return decoder.iter_batch(
                requests, batch_size=batch_size, by_length=by_length, **chosen.keywords
            )

        generate([])  # checks the options before anything is written
        expected = None if total is None else part.size(total)
        with writer:
            earlier = Earlier()
            if resume:
                lines, earlier = writer.resume(lines)
            most = chosen.keywords["max_tokens"]
            with _Progress(expected, earlier, most, resumable=writer.is_file) as progress:

                def emit(record: Record) -> None:
                    with signals_held():
                        writer.append(record)
                        progress.written += 1

                encode = partial(decoder.fit, max_tokens=most)
                process(lines, generate, encode, emit, watch=progress.count)
    if expected is not None and progress.written < expected:
        raise Failure(
            f"{source} had {expected} lines to do when the run began but {progress.written} when "
            "it was read: run this again once nothing changes it any more"
        )
    give_tips()
    if progress.failed:
        raise typer.Exit(SOME_FAILED)


class _Progress:
    """Shows on standard error how a run goes: a bar, errors, and a summary at the end."""

    def __init__(
        self, total: int | None, earlier: Earlier, max_tokens: int, *, resumable: bool
    ) -> None:
        self.written, self.failed, self._cut = earlier.done, earlier.failed, earlier.cut.copy()
        self._total = total
        self._earlier = earlier.done
        self._max_tokens = max_tokens
        self._resumable = resumable
        self._unknown: dict[str, None] = {}  # characters, in the order they were found
        self._lacking = 0  # prompts with some of them
        self._shown = self._tokens = self._rounds = self._drafted = self._accepted = 0
        self._began = time.perf_counter()
        self._bar = tqdm(total=total, initial=earlier.done, unit=" prompts", disable=None)

    def count(self, record: Record) -> None:
        """Count a record."""
        if record.done is None:
            self.failed += 1
            self._show(f"line {record.line.number}: {record.error}")
        else:
            for done in (record.done, *record.done.alternatives):
                stats = done.stats
                self._tokens += stats.emitted
                self._rounds += stats.rounds
                self._drafted += stats.drafted
                self._accepted += stats.accepted
            self._cut[record.done.stats.emitted] += record.done.finish_reason == "length"
            rate = self._tokens / (time.perf_counter() - self._began)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._lacking += bool(record.unknown)
        self._unknown |= dict.fromkeys(record.unknown)
        self._bar.update()

    def _show(self, error: str) -> None:
        self._shown += 1
        if self._shown <= MAX_ERRORS_SHOWN:
            tqdm.write(one_line(error), file=sys.stderr)
        elif self._shown == MAX_ERRORS_SHOWN + 1:
            tqdm.write("further errors are only in the output", file=sys.stderr)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the bar and show the summary."""
        self._bar.close()
        if self._lacking:
            note(
                f"prompts with characters that the model's vocabulary lacks: {self._lacking:,} "
                f"({a_few_of(self._unknown)}); it sees the unknown token instead"
            )
        note(f"[{', '.join(self._parts())}]")
        if kind is not None and self.written and self._resumable:
            note("the records written so far are kept; --resume continues after them")

    def _parts(self) -> Iterator[str]:
        seconds = time.perf_counter() - self._began
        share = "" if self._total in (None, self.written) else f" of {self._total:,}"
        yield f"{self.written:,}{share} prompts"
        if self._earlier:
            yield f"{self._earlier:,} of them earlier"
        if self.failed:
            yield f"{self.failed:,} with errors"
        if at_most := self._cut[self._max_tokens]:
            yield f"{at_most:,} {cut_at(self._max_tokens)}"
        if others := self._cut.total() - at_most:
            yield f"{others:,} {cut_at(None)}"
        if self._rounds:
            yield f"{self._tokens:,} tokens in {seconds:.1f} s"
            yield f"{self._tokens / seconds:,.0f} tokens/s"
            drafted = self._drafted
            yield f"acceptance {self._accepted / drafted:.0%}" if drafted else "no draft"
            yield f"{self._tokens / self._rounds:.1f} tokens per round"
            resident, arrays = peak_memory() / 1e6, mx.get_peak_memory() / 1e6
            yield f"peak memory {resident:,.0f} MB, MLX's {arrays:,.0f}"


def peak_memory() -> int:
    """Return the peak resident size of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _format(source: str, form: str | None, field: str | None) -> tuple[Format, str]:
    """Return the format of the input and the field of its prompts."""
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
