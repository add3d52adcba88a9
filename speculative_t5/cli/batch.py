"""The command `batch`: files of prompts."""

from __future__ import annotations

import hashlib
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn, cast, get_args

import mlx.core as mx
import typer
from tqdm import tqdm

from .. import tokenizers
from ..distributed import ProcessGroup
from ..errors import count
from ..files import is_special, open_input
from ..generation import BatchOptions, Generation, outcome_of, process_facts
from ..options import option
from ..tables import TABLES, pyarrow
from ..tokenizers import PROMPT_FIELD, PROMPT_SUFFIXES, Format, Line, Shard
from . import job, terminal
from .job import (
    NOT_DECODED,
    RESUME_ADVICE,
    Record,
    RecordCounts,
    RecordFile,
    Requests,
    check_record_file,
    process,
    shown_name,
)
from .options import DecoderOptions, Keywords, choose, with_options
from .terminal import note, one_line

PROMPT_FORMATS = get_args(Format)
REPLACE_ADVICE = "--force to replace it, or give another --output"
MAX_ERRORS_SHOWN = 10  # on standard error
COUNTED_STATS = ("emitted", "rounds", "drafted", "accepted")


@dataclass(frozen=True)
class FileOptions:
    """What is read, what is written, and which part of it by whom."""

    output: str = option(
        "-", "File to write: JSON Lines, or a .csv, .tsv or .parquet; - is standard output."
    )
    batch_size: int | None = option(
        None, "Prompts to decode side by side.", shown="16, or 1 with --steady"
    )
    format: str | None = option(
        None,
        f"Format of INPUT: {', '.join(PROMPT_FORMATS)}.",
        shown=f"jsonl with a field, or as INPUT ends in {', '.join(PROMPT_SUFFIXES)}",
    )
    prompt_field: str | None = option(
        None, "Field of each JSON object, or column, that holds the prompt.", shown=PROMPT_FIELD
    )
    id_field: str | None = option(None, "Field or column that holds a record's id.", shown="id")
    delimiter: str | None = option(
        None,
        "What stands between the cells of CSV, such as ; or tab.",
        shown="a comma, semicolon, tab or bar, as the first two rows have it",
    )
    resume: bool = option(False, "Keep the records in OUTPUT and continue after them.")
    force: bool = option(False, "Replace the records in OUTPUT and its parts.")
    shard: str = option("1/1", "Use a part of INPUT: 2/8 is every eighth line, from the second on.")
    parallel: str = option(
        "data",
        "What the processes that mlx.launch has started divide among themselves: data (the lines) "
        "or tensor (the model).",
    )
    join: bool = option(
        False,
        "Generate nothing; join the parts that several processes have written, such as "
        "OUTPUT.2-of-3, to make OUTPUT.",
    )

    def __post_init__(self) -> None:
        if self.parallel not in ("data", "tensor"):
            raise ValueError(f"--parallel must be data or tensor, got {self.parallel!r}")
        if self.resume and self.force:
            raise ValueError("--resume keeps OUTPUT and --force replaces it: give one of them")
        if self.format not in (None, *PROMPT_FORMATS):
            raise ValueError(
                f"--format must be one of {', '.join(PROMPT_FORMATS)}, got {self.format!r}"
            )
        if self.format == "text" and self.fields:
            raise ValueError(
                f"the field {self.fields[0]!r} is given, and lines of text have none: leave out "
                "--prompt-field and --id-field, or --format text"
            )
        if self.delimiter is not None:
            _separator(self.delimiter)
        if self.join and self.output == "-":
            raise ValueError("--join needs the --output whose parts it joins: give it")
        if self.join and self.resume:
            raise ValueError("--join replaces OUTPUT, which --resume keeps: leave out --resume")

    @property
    def separator(self) -> str | None:
        """The character between the cells of CSV, if it is given."""
        return None if self.delimiter is None else _separator(self.delimiter)

    @property
    def fields(self) -> list[str]:
        return [name for name in (self.prompt_field, self.id_field) if name is not None]


def _separator(text: str) -> str:
    """Return the character that an option names; refuse what cannot stand between cells."""
    found = {"tab": "\t", "\\t": "\t"}.get(text, text)
    if len(found) != 1 or found in '"\r\n\0' or found.isalnum():
        raise ValueError(f"--delimiter must be one character, such as ; or tab, got {text!r}")
    return found


@with_options
def batch(
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="File of prompts: lines of text, JSON Lines or a table; - is standard input.",
        ),
    ],
    *,
    files: FileOptions,
    options: DecoderOptions,
    keywords: Keywords,
) -> None:
    """Generate for each line of a file of prompts; write one JSON record per line, in order.

    A line that cannot be used gets a record with its error; the run continues, and its exit code
    is 3. If no line has a prompt, it stops at the first. A record is written once it and all
    records before it are done. Sampling depends on the seed and the line number.

    Each of several processes that mlx.launch has started writes a part, such as OUTPUT.2-of-3;
    --join makes OUTPUT of them. With --parallel tensor they share the model instead.
    """
    job_files = JobFiles.of(source, files)
    with open_input(source) as stream:
        job_files.stream = stream
        processes = terminal.process_group()
        if (processes is None or processes.is_first) and job_files.is_done(processes):
            return
        if files.join:
            _join(job_files, processes)
        total = tokenizers.count_lines(stream, job_files.form, delimiter=files.separator)
        if total is not None:
            _check_prompts(source, job_files.read(Shard()))
        options, keywords = choose(ctx, options, keywords)
        facts = _facts(job_files, options, keywords) if processes else {}
        work = Division(job_files.files, processes, facts)
        failed = _decode(job_files, work, total, options, keywords)
    terminal.give_tips()
    if failed:
        raise typer.Exit(terminal.EXIT_SOME_FAILED)


@dataclass
class JobFiles:
    """What a job reads and writes: lines of prompts, records, and perhaps a table made of them."""

    source: str
    files: FileOptions  # whose output is the file of records
    target: str  # the output that the user named
    is_table: bool  # whether that is made of the records when they are whole
    form: Format
    stream: BinaryIO = field(init=False)  # the open source
    start: int | None = field(init=False, default=None)  # where it began; None if it is a pipe

    @classmethod
    def of(cls, source: str, files: FileOptions) -> JobFiles:
        """Find out the formats, by the names of files where no option says them."""
        target, suffix = files.output, Path(files.output).suffix.lower()
        is_table = suffix in TABLES and not is_special(target)
        if suffix == ".parquet":
            pyarrow()
        usual = "jsonl" if files.fields else "text"
        form = cast(Format, files.format or PROMPT_SUFFIXES.get(Path(source).suffix.lower(), usual))
        if files.delimiter is not None and form not in ("csv", "tsv"):
            raise ValueError(
                f"--delimiter is for CSV, and {shown_input(source)} is read as {form}: leave it "
                "out, or give --format csv"
            )
        if is_table:
            files = replace(files, output=f"{target}.jsonl")
        return cls(source, files, target, is_table, form)

    def read(self, part: Shard) -> Iterator[Line]:
        """Yield the lines of a part of the input, from its beginning."""
        if self.start is None and self.stream.seekable():
            self.start = self.stream.tell()
        if self.start is not None:
            self.stream.seek(self.start)
        return tokenizers.read_lines(
            self.stream,
            self.form,
            self.files.prompt_field or PROMPT_FIELD,
            part,
            id_field=self.files.id_field,
            delimiter=self.files.separator,
        )

    def is_done(self, processes: ProcessGroup | None) -> bool:
        """Refuse what cannot be written; return whether an earlier run has made the table.

        What parts are joined to is only replaced.
        """
        files, output, force = self.files, self.files.output, self.files.force
        joins = files.join or (processes is not None and files.parallel == "data")
        begun = any(map(job.has_content, job.find_parts(output))) if joins else True
        advice = REPLACE_ADVICE if joins else RESUME_ADVICE
        check_record_file(
            output, self.stream, resume=files.resume and begun, force=force, advice=advice
        )
        if not self.is_table:
            return False
        resume = files.resume and (begun if joins else job.has_content(output))
        if files.resume and not resume and not processes and job.has_content(self.target):
            note(f"{self.target} is there, so nothing is left to do; --force starts over")
            return True
        check_record_file(
            self.target, self.stream, resume=resume, force=force, advice=REPLACE_ADVICE
        )
        return False


def _join(job_files: JobFiles, processes: ProcessGroup | None) -> NoReturn:
    """Make the output of the parts that several processes have written."""
    if processes:
        raise ValueError("--join is for one process: run it without a launcher")
    output, target = job_files.files.output, job_files.target
    joined = job.join_parts(output, job_files.read(Shard()), job.all_parts(output))
    if job_files.is_table:
        job.make_table(target, output)
    note(f"[{count(joined.done, 'record')} in {target}, {joined.failed:,} with errors]")
    raise typer.Exit(terminal.EXIT_SOME_FAILED if joined.failed else 0)


def _facts(job_files: JobFiles, options: DecoderOptions, keywords: Keywords) -> dict[str, str]:
    """Return what has to be the same in all processes of a job."""
    if not job_files.stream.seekable():
        raise ValueError(
            "several processes cannot read one pipe: write the prompts to a file, and give that"
        )
    facts = process_facts(
        options.model, options.draft, dtype=options.dtype, adapter=options.adapter
    )
    job_files.read(Shard())  # goes to the beginning
    digest = hashlib.file_digest(cast(BufferedReader, job_files.stream), "sha256").hexdigest()
    return facts | {"the options": str(keywords), "the input": f"SHA-256 {digest[:16]}"}


def _decode(
    job_files: JobFiles,
    work: Division,
    total: int | None,
    options: DecoderOptions,
    keywords: Keywords,
) -> int:
    """Decode the lines of this process; return how many records with errors decide how it ends."""
    outcome = outcome_of(keywords, truncate=options.truncate)
    writer = RecordFile(
        work.output, job_files.stream, resume=work.resume, force=work.force, outcome=outcome
    )
    lines, expected = job_files.read(work.shard), None if total is None else work.shard.size(total)
    decoder, batch_size = options.load(work.group), job_files.files.batch_size
    decoder.check_batch(BatchOptions(batch_size=batch_size, **keywords))

    def generate(requests: Requests) -> Iterator[tuple[int, Generation]]:
        by_length = total is not None  # prompts from a pipe are decoded as they come
        return decoder.iter_batch(requests, batch_size=batch_size, by_length=by_length, **keywords)

    if total is None:  # of a pipe, the first object has to do
        first = list(islice(lines, 1))
        _check_prompts(job_files.source, [line for line in first if line.columns is not None])
        lines = chain(first, lines)
    with writer:
        counts = RecordCounts()
        if work.resume:
            lines, counts = writer.resume(lines, gaps=work.group is None)
        skipped = work.start(counts.done)
        if skipped:
            lines, counts = islice(lines, skipped, None), RecordCounts(skipped)
        writer.begin()
        with Progress(expected, counts, work, writer.is_file) as progress:

            def emit(record: Record) -> None:
                writer.append_bytes(record.to_json())
                progress.written += record.error != NOT_DECODED

            process(
                lines,
                generate,
                decoder.fit,
                emit,
                watch=progress.count,
                kept=counts.kept,
                outcome=outcome,
            )
        if expected is not None and progress.written < expected:
            raise terminal.Failure(
                f"{job_files.source} changed during the run: it had {expected} lines to do, then "
                f"{progress.written}; run this again once nothing changes it any more"
            )
        if job_files.is_table and writer.is_file and not work.has_part:
            job.make_table(job_files.target, job_files.files.output)
    return work.finish(counts.failed)


class Division:
    """What this process does of a job: all of it, the shard that the user wants, or its share.

    Processes that share the model decode the same lines, and the first one writes the records.
    Otherwise each has some of the lines and writes a part of the records, and none of them waits
    for another one.
    """

    group: mx.distributed.Group | None = None  # the processes that share the model
    label = ""  # put before the summary
    has_part = False  # whether it is one of several that have lines of their own

    def __init__(
        self, files: FileOptions, processes: ProcessGroup | None, facts: dict[str, str]
    ) -> None:
        self.output, self.resume, self.force = files.output, files.resume, files.force
        self.shard = Shard.parse(files.shard)
        self.is_first = processes is None or processes.is_first
        self._whole, self._processes, self._facts = files.output, processes, facts
        if processes is None:
            return
        if files.parallel == "tensor":
            self.group = processes.group
            if not self.is_first:
                self.output, self.resume, self.force = os.devnull, False, False
            return
        if self._whole == "-" or is_special(self._whole):
            raise ValueError(
                f"several processes write parts beside their output, and {shown_name(self._whole)} "
                "is not a file: give an --output that is one"
            )
        rank, size = processes.group.rank(), processes.group.size()
        job.check_parts(self._whole, size)
        self.shard, self.has_part = Shard(rank + 1, size), True
        self.output = str(job.part_paths(self._whole, size)[rank])
        self.label = f"{processes.name}: "

    def start(self, done: int) -> int:
        """Begin, with `done` records there already; return how many lines to skip besides them."""
        if self._processes is None:
            return 0
        first = int(self._processes.compare(self._facts, {"done": done})["done"])
        self._processes.start({})
        if not self.has_part:
            return 0 if self.is_first else first
        terminal.handle_signals()  # from here on it waits for none of them
        return 0

    def finish(self, failed: int) -> int:
        """End the job; of its `failed` records with errors, return how many decide how it ends."""
        if self.has_part and self.is_first:
            note(
                "when all processes have ended, run the same command with --join and without a "
                "launcher: it makes OUTPUT of their parts"
            )
        # Launchers end all processes when one ends with an error.
        return failed if self.is_first and not self.has_part else 0


def _check_prompts(source: str, lines: Iterable[Line]) -> None:
    """Refuse lines of which none has a prompt, with what is wrong with the first."""
    wrong = None
    for line in lines:
        if line.prompt is not None:
            return
        if not line.is_empty:
            wrong = wrong or line
    if wrong:
        raise ValueError(f"{shown_input(source)}, {wrong.place}: {wrong.error}")


def shown_input(source: str) -> str:
    return "standard input" if source == "-" else source


@dataclass
class Progress(AbstractContextManager["Progress"]):
    """Shows on standard error how a run goes: a bar, errors, and a summary at the end."""

    total: int | None
    counts: RecordCounts  # of an earlier run, which go on
    work: Division
    resumable: bool

    def __post_init__(self) -> None:
        self.written = self.counts.done - len(self.counts.kept)
        self._unknown: dict[str, None] = {}  # characters, in the order they were found
        self._lacking = 0  # prompts with some of them
        self._errors = 0  # since the run began
        self._sums: Counter[str] = Counter()  # of the statistics in `COUNTED_STATS`
        self._began = time.perf_counter()
        hidden = None if self.work.is_first else True  # None: if it is not a terminal
        self._bar = tqdm(
            total=self.total, initial=self.counts.done, unit=" prompts", disable=hidden
        )

    def count(self, record: Record) -> None:
        """Count a record, unless an earlier run has made it."""
        if record.earlier:
            return
        if record.done is None:
            self.counts.failed += 1
            self._errors += 1
            text = one_line(f"{record.line.place}: {record.error}")
            if self._errors > MAX_ERRORS_SHOWN:
                text = "further errors are only in the output"
            if self._errors <= MAX_ERRORS_SHOWN + 1 and (self.work.is_first or self.work.has_part):
                tqdm.write(text, file=sys.stderr)
        else:
            for done in (record.done, *record.done.alternatives):
                self._sums.update({name: getattr(done.stats, name) for name in COUNTED_STATS})
            self.counts.cut += record.done.finish_reason == "length"
            rate = self._sums["emitted"] / (time.perf_counter() - self._began)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        unknown = record.source.unknown if record.source else ""
        self._lacking += bool(unknown)
        self._unknown |= dict.fromkeys(unknown)
        self._bar.update()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the bar and show the summary."""
        self._bar.close()
        if self._lacking:
            note(
                f"prompts with characters that the model's vocabulary lacks: {self._lacking:,} "
                f"({terminal.a_few_of(self._unknown)}); it sees the unknown token instead"
            )
        note(f"{self.work.label}[{', '.join(self._parts())}]")
        if kind is not None and self.written and self.resumable:
            note("the records written so far are kept; --resume decodes the other lines")

    def _parts(self) -> Iterator[str]:
        seconds = time.perf_counter() - self._began
        if self.total in (None, self.written):
            yield count(self.written, "prompt")
        else:
            yield f"{self.written:,} of {count(self.total, 'prompt')}"
        if self.counts.done:
            yield f"{self.counts.done:,} of them earlier"
        if self.counts.failed:
            yield f"{self.counts.failed:,} with errors"
        if self.counts.cut:
            yield f"{self.counts.cut:,} cut at --max-tokens or where the context ends"
        if self._sums["rounds"]:
            yield from terminal.rates(**self._sums, seconds=seconds)
            resident, arrays = peak_memory() / 1e6, mx.get_peak_memory() / 1e6
            yield f"peak memory {resident:,.0f} MB, MLX's {arrays:,.0f}"


def peak_memory() -> int:
    """Return the peak resident size of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
