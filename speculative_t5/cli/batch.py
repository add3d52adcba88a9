"""The command `batch`: files of prompts."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Annotated, cast

import mlx.core as mx
import typer
from tqdm import tqdm

from ..distributed import process_group
from ..errors import count
from ..generation import Generation
from ..tokenizers import (
    JSON_SUFFIXES,
    PROMPT_FIELD,
    Format,
    Line,
    Shard,
    count_lines,
    open_input,
    read_lines,
)
from .job import Earlier, Output, Record, Requests, process
from .options import (
    DecoderOptions,
    Keywords,
    RegularDecode,
    Task,
    choose,
    is_plain,
    with_groups,
)
from .parts import Division, Shown, divide, join_parts
from .terminal import SOME_FAILED, Failure, a_few_of, cut_at, give_tips, note, one_line, rates

MAX_ERRORS_SHOWN = 10  # on standard error
COUNTED = ("emitted", "rounds", "drafted", "accepted")


@with_groups
def batch(
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="File of prompts, one per line, as text or JSON Lines; - is standard input.",
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        str, typer.Option(help="File to write, one JSON record per line; - is standard output.")
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
        typer.Option(
            help="Field of each JSON object that holds the prompt.", show_default=PROMPT_FIELD
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the records in OUTPUT and continue after them.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the records in OUTPUT and its parts.")
    ] = False,
    shard: Annotated[
        str, typer.Option(help="Use a part of INPUT: 2/8 is every eighth line, from the second on.")
    ] = "1/1",
    parallel: Annotated[
        str,
        typer.Option(
            help="What the processes that mlx.launch has started divide among themselves: data "
            "(the lines) or tensor (the model)."
        ),
    ] = "data",
    join: Annotated[
        bool,
        typer.Option(
            "--join",
            help="Generate nothing; join the parts that several processes have written, such as "
            "OUTPUT.2-of-3, to make OUTPUT.",
        ),
    ] = False,
    options: DecoderOptions,
    regular_decode: RegularDecode = False,
    keywords: Keywords,
    task: Task = None,
) -> None:
    """Generate for each line of a file of prompts; write one JSON record per line, in order.

    A line that cannot be used gets a record with its error; the run continues, and its exit code
    is 3. If no line has a prompt, it stops at the first. A record is written once it and all
    records before it are done. Sampling depends on the seed and the line number.

    Each of several processes that mlx.launch has started writes a part, such as OUTPUT.2-of-3, and
    the first one joins the parts at the end. With --parallel tensor they share the model instead.
    """
    if resume and force:
        raise ValueError("--resume keeps OUTPUT and --force replaces it: give one of them")
    with open_input(source) as stream:
        kind, at = _format(source, form, field), stream.tell() if stream.seekable() else None

        def read(part: Shard) -> Iterator[Line]:
            if at is not None:
                stream.seek(at)
            return read_lines(stream, *kind, part)

        processes = process_group()
        if processes is None or processes.is_first:
            # Refuses what cannot be written.
            advice = {"advice": "--force to replace it, or give another --output"} if join else {}
            Output(output, stream, resume=resume, force=force, **advice)
        if join:
            _check_join(output, launched=processes is not None, resume=resume)
            joined = join_parts(output, read(Shard()))
            note(f"[{count(joined.done, 'record')} in {output}, {joined.failed:,} with errors]")
            raise typer.Exit(SOME_FAILED if joined.failed else 0)
        total = count_lines(stream)
        if total is not None:
            _check_prompts(source, read(Shard()))
        options, keywords = choose(ctx, options, keywords, task)

        def facts() -> dict[str, str]:
            return options.facts() | {"the options": str(keywords)}

        alone = Division(output, Shard.parse(shard), resume=resume, force=force)
        work = divide(processes, parallel, alone, stream, facts)
        if work.is_done(read):
            return
        writer = Output(work.output, stream, resume=work.resume, force=work.force)
        lines, expected = read(work.shard), None if total is None else work.shard.size(total)
        plain = is_plain(options, keywords["num_beams"], regular_decode=regular_decode)
        decoder = options.load(plain=plain, group=work.group)

        def generate(requests: Requests) -> Iterator[tuple[int, Generation]]:
            by_length = total is not None  # prompts from a pipe are decoded as they come
            return decoder.iter_batch(
                requests, batch_size=batch_size, by_length=by_length, **keywords
            )

        generate([])  # checks the options before anything is written
        if total is None:  # of a pipe, the first object has to do
            first = list(islice(lines, 1))
            _check_prompts(source, [line for line in first if line.columns is not None])
            lines = chain(first, lines)
        with writer:
            earlier = Earlier()
            if work.resume:
                lines, earlier = writer.resume(lines, gaps=work.group is None)
            skipped = work.start(earlier.done)
            if skipped:
                lines, earlier = islice(lines, skipped, None), Earlier(skipped)
            writer.begin()
            most = keywords["max_tokens"]
            with Progress(
                expected,
                earlier,
                most,
                resumable=writer.is_file,
                shown=work.shown,
                label=work.label,
            ) as progress:

                def emit(record: Record) -> None:
                    writer.append(record)
                    progress.written += not record.is_undone

                encode = partial(decoder.fit, max_tokens=most)
                process(lines, generate, encode, emit, watch=progress.count, kept=earlier.kept)
        if expected is not None and progress.written < expected:
            raise Failure(
                f"{source} changed during the run: it had {expected} lines to do, then "
                f"{progress.written}; run this again once nothing changes it any more"
            )
        failed = work.finish(read, progress.failed)
    give_tips()
    if failed:
        raise typer.Exit(SOME_FAILED)


def _check_prompts(source: str, lines: Iterable[Line]) -> None:
    """Refuse lines of which none has a prompt, with what is wrong with the first."""
    wrong = None
    for line in lines:
        if line.prompt is not None:
            return
        if not line.is_empty:
            wrong = wrong or line
    if wrong:
        name = "standard input" if source == "-" else source
        raise ValueError(f"{name}, line {wrong.number}: {wrong.error}")


def _check_join(output: str, *, launched: bool, resume: bool) -> None:
    """Refuse options that do not go with --join."""
    if launched:
        raise ValueError("--join is for one process: run it without a launcher")
    if output == "-":
        raise ValueError("--join needs the --output whose parts it joins: give it")
    if resume:
        raise ValueError("--join replaces OUTPUT, which --resume keeps: leave out --resume")


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
    return cast(Format, form), field or PROMPT_FIELD


class Progress:
    """Shows on standard error how a run goes: a bar, errors, and a summary at the end."""

    def __init__(
        self,
        total: int | None,
        earlier: Earlier,
        max_tokens: int,
        *,
        resumable: bool,
        shown: Shown = "all",
        label: str = "",
    ) -> None:
        self.written = earlier.done - len(earlier.kept)
        self.failed, self._cut = earlier.failed, earlier.cut.copy()
        self._total = total
        self._earlier = earlier.done
        self._max_tokens = max_tokens
        self._resumable = resumable
        self._unknown: dict[str, None] = {}  # characters, in the order they were found
        self._lacking = 0  # prompts with some of them
        self._shown = 0  # errors
        self._sums: Counter[str] = Counter()  # of the statistics in `COUNTED`
        self._began = time.perf_counter()
        self._label = label
        self._shows_errors = shown != "nothing"
        hidden = None if shown == "all" else True  # None: if it is not a terminal
        self._bar = tqdm(total=total, initial=earlier.done, unit=" prompts", disable=hidden)

    def count(self, record: Record) -> None:
        """Count a record, unless an earlier run has made it."""
        if record.earlier:
            return
        if record.done is None:
            self.failed += 1
            self._show(f"line {record.line.number}: {record.error}")
        else:
            for done in (record.done, *record.done.alternatives):
                self._sums.update({name: getattr(done.stats, name) for name in COUNTED})
            self._cut[record.done.stats.emitted] += record.done.finish_reason == "length"
            rate = self._sums["emitted"] / (time.perf_counter() - self._began)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._lacking += bool(record.unknown)
        self._unknown |= dict.fromkeys(record.unknown)
        self._bar.update()

    def _show(self, error: str) -> None:
        if not self._shows_errors:
            return
        self._shown += 1
        if self._shown <= MAX_ERRORS_SHOWN:
            tqdm.write(one_line(error), file=sys.stderr)
        elif self._shown == MAX_ERRORS_SHOWN + 1:
            tqdm.write("further errors are only in the output", file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the bar and show the summary."""
        self._bar.close()
        if self._lacking:
            note(
                f"prompts with characters that the model's vocabulary lacks: {self._lacking:,} "
                f"({a_few_of(self._unknown)}); it sees the unknown token instead"
            )
        note(f"{self._label}[{', '.join(self._parts())}]")
        if kind is not None and self.written and self._resumable:
            note("the records written so far are kept; --resume decodes the other lines")

    def _parts(self) -> Iterator[str]:
        seconds = time.perf_counter() - self._began
        if self._total in (None, self.written):
            yield count(self.written, "prompt")
        else:
            yield f"{self.written:,} of {count(self._total, 'prompt')}"
        if self._earlier:
            yield f"{self._earlier:,} of them earlier"
        if self.failed:
            yield f"{self.failed:,} with errors"
        if at_most := self._cut[self._max_tokens]:
            yield f"{at_most:,} {cut_at(self._max_tokens)}"
        if others := self._cut.total() - at_most:
            yield f"{others:,} {cut_at(None)}"
        if self._sums["rounds"]:
            yield from rates(**self._sums, seconds=seconds)
            resident, arrays = peak_memory() / 1e6, mx.get_peak_memory() / 1e6
            yield f"peak memory {resident:,.0f} MB, MLX's {arrays:,.0f}"


def peak_memory() -> int:
    """Return the peak resident size of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
