"""The command `document`: whole texts, sentence by sentence, with their layout kept."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from ..documents import (
    DOCUMENT_SUFFIXES,
    Document,
    Piece,
    RewriteOptions,
    Rewritten,
    Written,
    check_rewriting,
)
from ..exchange import copy_file, replace_unchanged
from ..files import (
    clear_temporaries,
    digest,
    is_special,
    json_line,
    json_object,
    private_mode,
    write_whole,
)
from ..generation import BatchOptions, SpeculativeDecoder
from ..options import option
from . import terminal
from .options import DecoderOptions, with_base, with_options
from .pieces import PIECE_FIELDS, PartialFile
from .report import PIECE_UNITS, report, where
from .review import review
from .targets import (
    OutputOptions,
    Reading,
    Target,
    TypedText,
    find_targets,
    is_several,
    partial_file_of,
    text_target,
)
from .terminal import DISK_ERRORS, note, one_line

# What `correct` and `translate` take, and an option of all three.
TextOrFiles = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TEXT_OR_FILES...",
        help="A text in quotation marks; or files and folders: text, Markdown, subtitles or HTML "
        "in UTF-8, or documents of Word; - is standard input, which is read if nothing is given.",
    ),
]
ROWS_OPTION = option(None, "Pieces to decode side by side.", shown="16, or 1 with --steady")


@with_options(changes={"task": None})
def document(
    ctx: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Text, Markdown, subtitles or HTML in UTF-8, or documents of Word; folders, for "
            f"all files in them that end in {', '.join(DOCUMENT_SUFFIXES)}; - is standard input.",
        ),
    ],
    *,
    files: OutputOptions,
    wanted: RewriteOptions,
    batch_size: int | None = ROWS_OPTION,
    options: DecoderOptions,
) -> None:
    """Rewrite texts of any length, for example to correct or translate them.

    Only sentences change: blank lines, indentation, line ends, list markers and code stay as they
    are; without --to, headings, labels and tables as well. Sentences that the model cannot read, or
    whose outputs lost something, stay, too, and are listed at the end.
    """
    rewrite_all(ctx, sources, None, files, wanted, batch_size, options)


def rewrite_all(
    ctx: typer.Context,
    sources: Sequence[str],
    text: str | None,
    files: OutputOptions,
    wanted: RewriteOptions,
    batch_size: int | None,
    options: DecoderOptions,
) -> None:
    """Rewrite files, or a text that was typed."""
    if options.truncate:
        raise ValueError("--truncate would lose a part of the text: leave it out")
    files = files.as_meant()
    job = partial_file_of(sources, files) if text is None else None
    targets = find_targets(sources, files) if text is None else [text_target(text, files)]
    several = is_several(sources, targets)
    first = None if several else targets[0].read()  # what is wrong is said before models load
    decoder = with_base(ctx, options).load()
    _check_options(decoder, wanted, batch_size)
    kept = _pieces_file(job, decoder, wanted, options, files, targets) if job else None
    run = FilesRun(decoder, wanted, files, batch_size, kept, several=several)
    with kept or nullcontext():
        if kept:
            clear_temporaries(Path(each.output).resolve() for each in targets if each.output)
        for target in targets:
            run.rewrite(target, first)
            if run.quits:
                break
    run.list_bad()
    terminal.give_tips()
    if run.bad or (files.check and run.changed):
        raise typer.Exit(terminal.EXIT_FAILED)


def _check_options(
    decoder: SpeculativeDecoder, wanted: RewriteOptions, batch_size: int | None
) -> None:
    """Refuse options that do not fit the models, before any text is decoded."""
    check_rewriting(decoder, wanted)
    decoder.check_batch(BatchOptions(batch_size=batch_size))


def _pieces_file(
    path: Path,
    decoder: SpeculativeDecoder,
    wanted: RewriteOptions,
    options: DecoderOptions,
    files: OutputOptions,
    targets: Sequence[Target],
) -> PartialFile:
    """Return the file of pieces of a run, which goes on only with the same models and options."""
    given = options.keywords | {"dtype": options.dtype, "to": decoder.languages, "from_": None}
    given |= {"prefix": decoder.prefix, "trained_length": decoder.trained_length}
    given |= {name: True for name, is_set in asdict(files.reading).items() if is_set}
    header = {
        "model": [decoder.model.fingerprint, decoder.draft and decoder.draft.fingerprint],
        "set of options": asdict(wanted) | given,
    }
    mode = private_mode(path, [target.stat() for target in targets])
    return PartialFile(path, json_object(json_line(header)), files, mode=mode)


@dataclass
class FilesRun:
    """Files one after the other, each read when its turn comes.

    Of several, one that cannot be read or written does not keep the others from being done.
    """

    decoder: SpeculativeDecoder
    wanted: RewriteOptions
    files: OutputOptions
    batch_size: int | None
    kept: PartialFile | None
    several: bool = field(kw_only=True)
    bad: list[str] = field(default_factory=list)  # what was wrong with the files that are not done
    changed: bool = False
    quits: bool = False

    def rewrite(self, target: Target, reading: Reading | None = None) -> None:
        """Do all for one file; `reading` is what was read of it, if it was."""
        is_done, whole = True, None
        with self._alone(target, keep=True):
            is_done = self._is_done(target)
        if is_done:
            return
        with self._alone(target):
            if reading is None or target.in_place:
                reading = target.read()
            if self.kept:
                self.kept.narrow(target.mode(self.kept.path, reading.found))
            self._check_backup(target, reading.data)
            form, is_typed = reading.form, isinstance(target, TypedText)
            if self.decoder.languages:
                form.translate_into(self.decoder.languages[1])
            whole = Document(
                self.decoder,
                form.text,
                self.wanted,
                form.lines,
                labels=is_typed,  # what people type is to be read, also if it is no sentence
            )
        if whole is None or reading is None:
            return
        pieces, seconds = _decode_pieces(whole, self.kept, self.batch_size, target, reading)
        with self._alone(target, keep=True):
            if self.files.review:
                place = partial(where, target, reading.form, self.several)
                pieces, self.quits = review(pieces, place)
            result = whole.result(pieces, seconds)
            self.changed |= result.text != result.source
            data = reading.data
            if result.text != result.source:
                data = reading.form.rewritten(result.text)
            if isinstance(target, TypedText):  # the end of the line on which it was typed
                data += b"\n"
            written = []
            if not self.files.check:
                written = self._write_all(target, reading, data, result)
            report(target, reading.form, whole, result, self.files, written, several=self.several)

    def _is_done(self, target: Target) -> bool:
        """Finish what an earlier run left half done; return whether it has done the file."""
        if self.kept:
            if target.in_place:
                with terminal.signals_held():
                    self.kept.recover(target)
            if self.kept.is_done(target):
                note(f"{target.name}: done in an earlier run")
                return True
        if target.in_place and (aside := target.aside(backup=False)).exists():
            raise ValueError(
                f"{aside} holds an earlier text of {target.name}, which a killed run has left: "
                "delete it once you have compared them"
            )
        return False

    @contextmanager
    def _alone(self, target: Target, *, keep: bool = False) -> Iterator[None]:
        """Let an error of one file of several not end the run, unless nothing can be written.

        With `keep` the pieces stay, as the file may be done when this is run again.
        """
        try:
            yield
        except (ValueError, OSError, terminal.Failure) as error:
            is_last = (
                isinstance(error, BrokenPipeError) or getattr(error, "errno", 0) in DISK_ERRORS
            )
            if not self.several or is_last:
                raise
            self.bad.append(terminal.failure(error))
            if self.kept and keep:
                self.kept.stays = True
            if self.files.json:
                _write(json_line({"file": target.source, "error": self.bad[-1]}), None)

    def list_bad(self) -> None:
        """Say at the end which files are not done."""
        for said in self.bad:
            note(f"not done: {one_line(said)}")

    def _write_all(
        self, target: Target, reading: Reading, data: bytes, result: Rewritten
    ) -> list[str]:
        """Write what belongs to a file, and return the names of new files.

        The record that it is done comes first, see `is_done`.
        """
        for name in filter(None, (target.output, target.page)):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
        if self.kept:
            self.kept.append({"file": reading.key, "done": digest(data)})
        if target.page is not None:
            title = f"Changes in {'the text' if target.source in ('', '-') else target.source}"
            mode = target.mode(target.page, reading.found)
            _write(result.to_html(title).encode(), target.page, mode)
        if target.in_place:
            if data != reading.data:
                self._write_in_place(target, reading, data)
        elif target.output is not None or not self.files.json:
            mode = target.mode(target.output, reading.found) if target.output else 0
            _write(data, target.output, mode)
        names = (None if target.in_place else target.output, target.page)
        return [name for name in names if name is not None and not is_special(name)]

    def _check_backup(self, target: Target, data: bytes) -> None:
        """Refuse to replace another backup, unless it says nothing that the file does not."""
        old = target.backup
        if self.files.backup and not self.files.force and old.exists() and old.read_bytes() != data:
            raise ValueError(f"{old} exists: use --force to replace it, or rename it")

    def _write_in_place(self, target: Target, reading: Reading, data: bytes) -> None:
        """Replace a file by its new text, unless another program has written to it meanwhile."""
        place, backup = target.place, self.files.backup
        self._check_backup(target, reading.data)
        if backup and place.read_bytes() == reading.data:  # else it is refused below
            target.backup.unlink(missing_ok=True)
        is_moved = backup and target.has_backup_beside
        aside = target.aside(backup=is_moved)

        def begin() -> None:
            if self.kept:
                self.kept.begin(place, aside, reading.key, digest(data))

        with terminal.signals_held():
            if backup and not is_moved:
                copy_file(place, target.backup, reading.data, over=False)
            done = replace_unchanged(
                place, aside, data, reading.data, keep=is_moved, over=False, ready=begin
            )
            if backup and not (is_moved or done):
                target.backup.unlink()
            if self.kept:
                self.kept.end(place)
        if not done:
            raise terminal.Failure(
                f"{target.name} stays as it is, as another program has written to it since it was "
                "read: run this again, with --resume"
            )


def _decode_pieces(
    whole: Document,
    kept: PartialFile | None,
    batch_size: int | None,
    target: Target,
    reading: Reading,
) -> tuple[list[Piece], float]:
    """Decode all pieces that are left, and keep each as it is done; return the seconds, too."""
    done: dict[int, Piece] = {}
    for record in kept.earlier.get(reading.key, ()) if kept else ():
        source = whole.text[record["start"] : record["end"]]
        fields = {name: record[name] for name in PIECE_FIELDS}
        fields["written"] = record["written"] and Written(*record["written"])
        done[record["start"]] = Piece(source=source, **fields)
    began = time.perf_counter()
    pieces, unit = [*done.values()], f" {PIECE_UNITS[str(whole.options.by)]}s"
    with tqdm(
        total=len(whole),
        initial=len(done),
        unit=unit,
        desc=target.name,
        disable=None,
    ) as bar:
        for piece in whole.rewrite(batch_size=batch_size, done=done):
            pieces.append(piece)
            if kept:
                record = {name: getattr(piece, name) for name in PIECE_FIELDS}
                end = piece.start + len(piece.source)
                kept.append({"file": reading.key, "end": end} | record)
            bar.update()
    return whole.settled(pieces), time.perf_counter() - began


def _write(data: bytes, output: str | None, mode: int = 0o666) -> None:
    """Write a file as a whole, or to standard output or what is no plain file."""
    if output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    elif is_special(output):
        Path(output).write_bytes(data)
    else:
        write_whole(output, data, mode)
