"""Rewrites texts of any length: sentences go through the model, everything else stays."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal, get_args

from ..decoding import Stats, total
from ..errors import check_utf8, count
from ..generation import TRANSFORMERS_NAMES, BatchOptions, Generation
from ..options import OptionError, check_options, described, option, python_option, takes
from .comparison import as_page, as_table
from .judging import Judge, Written, least_in_text
from .layout import arranged, as_within
from .splitting import (
    PLAIN_LINES,
    SENTENCE_LANGUAGES,
    FileLines,
    Passage,
    clauses,
    ends_as_sentence,
    identifier,
    is_label,
    keeps_lines,
    paragraphs,
    passage_lines,
    sentences,
)
from .text_decoder import TextDecoder
from .translation import Translation, has_words

By = Literal["sentence", "paragraph", "tokens"]
RETRY_BEAMS = 4  # of the last try of a translation
MAX_READ = 20_000  # characters that are encoded at a time: no sentence has as many


@described
@dataclass(frozen=True, kw_only=True)
class RewriteOptions:
    """How a text is rewritten.

    By "paragraph", a long one is decoded as many of its sentences at a time as the model reads.
    Pieces of like length have the same `max_tokens` by default, and are decoded together.
    Similarity is difflib's ratio of letters and digits; set it to 0 for a model that does something
    other than correct or translate. `min_probability` is for any token of a change that a
    correction makes, and for those beside it (see `judging`); of other outputs, for all their
    tokens. The higher it is, the fewer wrong corrections are made, but also the fewer right ones.
    """

    by: By | None = option(
        None,
        "What to decode at a time: sentence, paragraph, or tokens (as many sentences as fit in "
        "--piece-tokens).",
        shown="tokens with --to, else sentence",
    )
    language: str | None = option(
        None,
        "Code of the language whose rules split the text into sentences, such as en or de.",
        shown="what --to translates from, or en",
    )
    piece_tokens: int = option(128, "With --by tokens: most tokens to decode at a time.", least=2)
    max_tokens: int | None = option(
        None,
        "Upper bound on the tokens of each piece's output, EOS included.",
        shown="twice the piece's and 16 more, rounded up",
        least=1,
    )
    min_similarity: float | None = option(
        None,
        "Leave a piece as it is if its output is less similar to it than this, from 0 to 1; above "
        "0, also if numbers or addresses in it would change.",
        shown="0.75; with --to, translations are checked instead",
        least=0.0,
        most=1.0,
    )
    min_probability: float | None = option(
        None,
        "Leave out a change, or an output that is no correction, if the model gives a token of it "
        "less than this, from 0 to 1.",
        shown="the model's own, adapted to how many sentences have errors; or 0",
        least=0.0,
        most=1.0,
    )

    guard: bool = option(
        True,
        "Leave a piece as it is if its output looks wrong; --no-guard uses any output that ends "
        "and has a word for each line.",
    )

    def __post_init__(self) -> None:
        if not self.guard and (self.min_similarity or self.min_probability):
            name = "min_similarity" if self.min_similarity else "min_probability"
            raise OptionError(
                f"{{{name}}} belongs to the guard, which is off: leave one of them out"
            )
        if self.by not in (None, *get_args(By)):
            names = ", ".join(map(repr, get_args(By)))
            raise OptionError("{by} is {!r}, expected one of {}", self.by, names)
        if self.language not in (None, *SENTENCE_LANGUAGES):
            raise ValueError(
                f"there are no sentence rules for the language {self.language!r}: choose one of "
                f"{', '.join(SENTENCE_LANGUAGES)}"
            )
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class TextOptions(RewriteOptions):
    """The options of `rewrite`."""

    batch_size: int | None = python_option(
        None, "Pieces to decode side by side; None is 16, or 1 if the decoder is steady."
    )
    speculative: bool = python_option(True, "False decodes with the target alone.")
    progress: bool = python_option(False, "Show a bar on standard error.")


@dataclass(frozen=True)
class Piece:
    """A part of a text, and what stands in its place."""

    line: int  # number of the line where it begins, from 1
    source: str  # the part as it was, line breaks included
    output: str  # what stands there now; `source` if nothing was changed
    reason: str | None = None  # why the model's output is not used, or not all of it
    refused: str | None = None  # output not used, laid out as `source` if it has enough words
    retried: str | None = None  # how another try went well: "by clauses" or "by beams"
    start: int = 0  # where it begins in the text, in characters
    stats: Stats | None = None  # what decoding it cost; None if it was not decoded in this run
    surest: float = 0.0  # how probable its most probable change is, if no rule forbids it
    written: Written | None = None  # what is judged again once the whole text is known

    @property
    def status(self) -> Literal["changed", "same", "kept"]:
        """What became of it; "kept" is for what has a reason and stayed as it was."""
        if self.output != self.source:
            return "changed"
        return "kept" if self.reason is not None and self.retried is None else "same"


@dataclass(frozen=True, repr=False)
class Rewritten:
    """A text that was rewritten; notebooks show both texts side by side."""

    text: str  # with as many lines as `source`
    source: str
    pieces: tuple[Piece, ...]  # the parts that the model read or should have read, in order
    stats: Stats  # of all pieces; `seconds` is the wall-clock time of decoding them

    def __repr__(self) -> str:
        return f"Rewritten({self.summary()})"

    @property
    def kept(self) -> list[Piece]:
        """The pieces that stayed as they were although the model should have rewritten them."""
        return [piece for piece in self.pieces if piece.status == "kept"]

    def summary(self) -> str:
        """Say how many pieces there are, and what became of them."""
        changed = sum(piece.status == "changed" for piece in self.pieces)
        parts = [f"{changed:,} of {count(len(self.pieces), 'piece')} changed"]
        if retried := sum(piece.retried is not None for piece in self.pieces):
            parts.append(f"{retried:,} at another try")
        if self.kept:
            parts.append(f"{len(self.kept):,} kept unchanged")
        return ", ".join(parts)

    def to_html(self, title: str = "Changes") -> str:
        """Return a page of HTML with both texts side by side and their differences marked."""
        return as_page(self, title)

    def _repr_html_(self) -> str:
        return as_table(self)


@takes(TextOptions, TRANSFORMERS_NAMES)
def rewrite(decoder: TextDecoder, text: str, options: TextOptions) -> Rewritten:
    r"""Rewrite a text of any length, and keep its lines and all that is not a sentence.

    Blank lines, indentation, line ends, list markers, quotation marks (>), headings, tables, code
    and labels stay as they are, see `paragraphs`. Sentences are decoded greedily, each with the
    decoder's prefix. One that spans several lines is read as one; in its output line breaks stand
    before the words that the first words of the lines became, see `arranged`.

    A piece stays as it was, and has a reason, if the vocabulary lacks one of its characters; if it
    is longer than the model reads; if its output did not end within `max_tokens`, is empty, has
    an unknown character or fewer words than the piece has lines, makes something else of a line
    (see `keeps_lines`), or is too different, see `min_similarity`. Changes of a correction that are
    not good are left out, see `judging`, and the reason says why the first of them is.

    The options are given as keywords; see `RewriteOptions` and `TextOptions`.

    Raises:
        ValueError: If the decoder has no tokenizer, the text is not a string or an option is out
            of its range.
    """
    document = Document(decoder, text, options)
    began = time.perf_counter()
    done = document.rewrite(batch_size=options.batch_size, speculative=options.speculative)
    if options.progress:
        from tqdm import tqdm  # only where a bar is wanted

        done = tqdm(done, total=len(document), unit="piece", desc="rewriting")
    pieces = document.settled(done)
    return document.result(pieces, time.perf_counter() - began)


def check_rewriting(decoder: TextDecoder, options: RewriteOptions) -> None:
    """Refuse a decoder that reads no text, and options that do not go with what it does."""
    if decoder.tokenizer is None:
        raise ValueError("a text needs a tokenizer, and this decoder has none: give it one")
    if decoder.languages and options.min_similarity is not None:
        raise OptionError(
            "{min_similarity} is {:g}, and a translation is not similar to its source: "
            "leave one of them out",
            options.min_similarity,
        )


@dataclass(frozen=True, eq=False)
class _Part:
    """A part of the text to rewrite."""

    passage: Passage
    ids: list[int]  # what the model reads, if it can
    limit: int  # the most tokens of its output
    reason: str | None = None  # why it cannot be read


class Document:
    """A text split into the pieces to rewrite; for errors see `rewrite`.

    With `labels`, headings and other words that are no sentence are pieces, as in a translation.
    `lines` says what the file of the text knows of its lines.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        text: str,
        options: RewriteOptions,
        lines: FileLines = PLAIN_LINES,
        *,
        labels: bool = False,
    ) -> None:
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {type(text).__name__}")
        check_utf8("the text", text)
        check_rewriting(decoder, options)
        self.text, self._decoder, self._lines, self._breaks = text, decoder, lines, lines.breaks
        self._labels = labels or bool(decoder.languages)
        self._translation: Translation | None = None
        if decoder.languages:
            source, target = decoder.languages
            self._translation = Translation(source or identifier().classify(text)[0], target)
        self.options = self._with_defaults(options)
        self._judge = Judge(decoder, self.options, self._translation)
        # A bound that is asked for is the same in each text.
        self._adapts = options.min_probability is None and self._judge.judges_changes
        self._language = self.options.language or "en"
        self._parts = [*self._split()]

    def _with_defaults(self, options: RewriteOptions) -> RewriteOptions:
        """Fill in what depends on the decoder."""
        defaults: dict[str, Any] = {"by": "sentence", "language": "en", "min_similarity": 0.75}
        if self._translation:
            code = self._translation.source.partition("-")[0]
            language = code if code in SENTENCE_LANGUAGES else "en"
            defaults = {"by": "tokens", "language": language, "min_similarity": 0.0}
        defaults["min_probability"] = self._decoder.min_probability
        if not options.guard:
            defaults |= {"min_similarity": 0.0, "min_probability": 0.0}
        missing = {name: v for name, v in defaults.items() if getattr(options, name) is None}
        return replace(options, **missing)

    def __len__(self) -> int:
        return len(self._parts)

    def _split(self) -> Iterator[_Part]:
        text = self.text
        for paragraph in paragraphs(
            text, labels=self._labels, breaks=self._breaks, unread=self._lines.unread
        ):
            found = sentences(text, paragraph, self._language)
            # None stands between parts that are not to be joined.
            read = (
                part
                for each in found
                for part in (self._readable(each) if self._is_text(each.flat(text)) else [None])
            )
            for readable, group in groupby(read, key=lambda part: part and part.reason is None):
                several = [part for part in group if part is not None]
                pack = readable and self.options.by != "sentence"
                yield from self._packed(several) if pack else several

    def _is_text(self, flat: str) -> bool:
        """Whether a sentence, on one line, goes through the model."""
        return has_words(flat) if self._labels else not is_label(flat, self._breaks)

    def _read(self, passage: Passage) -> _Part:
        """Encode a passage, and find out whether the model can read it."""
        flat, reason = passage.flat(self.text), None
        if len(flat) > MAX_READ:
            reason = f"it has {len(flat):,} characters, more than the {MAX_READ:,} read at a time"
            return _Part(passage, [], 0, reason)
        prompt = self._decoder.prefix + flat
        ids = self._decoder.encode(prompt)
        limit = self.options.max_tokens or 1 << (2 * len(ids) + 15).bit_length()
        try:
            source = self._decoder.fit(prompt)
        except ValueError:  # encoding has succeeded, so it is too long
            source = None
        if source is None or source.cut:
            reason = f"it has {len(ids):,} tokens, more than the model reads"
        elif source.unknown:
            reason = f"the model's vocabulary lacks {' '.join(source.unknown)}"
        return _Part(passage, ids, limit, reason)

    def _readable(self, passage: Passage) -> Sequence[_Part]:
        """Encode a sentence; one of subtitles that is too long is divided where cues end.

        Captions that are made by machines have no full stops. They are translated in runs of cues.
        """
        part = self._read(passage)
        most = min(self._decoder.trained_length or math.inf, self.options.piece_tokens)
        if self._breaks != "cues" or (part.reason is None and len(part.ids) <= most):
            return [part]
        cues = [self._read(each) for each in passage_lines(self.text, passage)]
        return [*self._packed(cues, self.options.piece_tokens)] if self._translation else cues

    def _packed(self, parts: Sequence[_Part], longest: float = math.inf) -> Iterator[_Part]:
        """Join sentences of one paragraph to parts as long as may be.

        Twice as many are tried each time, then numbers between those that fit and those that don't:
        one more each time would encode a long part again for each sentence in it. Joined parts have
        no more than `longest` tokens.
        """
        most = min(self._decoder.trained_length or math.inf, longest)
        if self.options.by == "tokens":
            most = min(most, self.options.piece_tokens)
        start = 0
        while start < len(parts):
            pack, size, too_many = parts[start], 1, len(parts) - start + 1
            while size + 1 < too_many:
                tried = min(2 * size, (size + too_many) // 2)
                several = parts[start : start + tried]
                spans = tuple(span for part in several for span in part.passage.spans)
                joined = self._read(Passage(spans, pack.passage.line))
                if joined.reason or len(joined.ids) > most:
                    too_many = tried
                else:
                    pack, size = joined, tried
            yield pack
            start += size

    def rewrite(
        self,
        *,
        batch_size: int | None = None,
        speculative: bool = True,
        done: Mapping[int, Piece] = MappingProxyType({}),
    ) -> Iterator[Piece]:
        """Yield the piece of each part that is not `done` (by `start`), in any order.

        The options are checked at the call.
        """
        keywords: dict[str, Any] = {
            "batch_size": batch_size,
            "speculative": speculative,
            "logprobs": 0 if self.options.min_probability else None,
        }
        self._decoder.check_batch(BatchOptions(**keywords))

        def pieces() -> Iterator[Piece]:
            left = [*self._left(done)]
            for part in left:
                if part.reason is not None:
                    yield self._piece(part, None, part.reason)
            failed = []
            for part, output in self._decoded([p for p in left if p.reason is None], **keywords):
                piece = self._judged(part, output)
                if piece.reason and self._translation:
                    failed.append((part, piece))
                else:
                    yield piece
            if failed:
                yield from self._retried(failed, keywords)

        return pieces()

    def _left(self, done: Mapping[int, Piece]) -> Iterator[_Part]:
        """Yield the parts that are left, or their sentences if some of them are done."""
        for part in self._parts:
            start, end = part.passage.start, part.passage.end
            if done and start in done and len(done[start].source) == end - start:
                continue
            several = self._sentences(part) if done else []
            begun = any(each.passage.start in done for each in several)
            yield from (p for p in several if p.passage.start not in done) if begun else [part]

    def _sentences(self, part: _Part) -> list[_Part]:
        return [*map(self._read, sentences(self.text, part.passage, self._language))]

    def _decoded(
        self, parts: Iterable[_Part], **keywords: Any
    ) -> Iterator[tuple[_Part, Generation]]:
        """Decode parts in order of `limit`; yield each with its output."""
        by_limit = sorted(parts, key=lambda part: part.limit)
        for limit, group in groupby(by_limit, key=lambda part: part.limit):
            alike = list(group)
            requests = [(i, part.ids) for i, part in enumerate(alike)]
            for i, output in self._decoder.iter_batch(requests, max_tokens=limit, **keywords):
                yield alike[i], output

    def _retried(
        self, failed: Sequence[tuple[_Part, Piece]], keywords: dict[str, Any]
    ) -> Iterator[Piece]:
        """Try parts again sentence by sentence, then by clauses, then by a beam search.

        What fails in the end stays as it was, with the reason of its first output as a sentence.
        """
        alone = []
        for part, piece in failed:
            several = self._sentences(part)
            if len(several) < 2:
                alone.append((part, piece))
                continue
            spent = piece.stats
            for sentence, output in self._decoded(several, **keywords):
                piece = self._judged(sentence, output)
                piece, spent = replace(piece, stats=total([spent, piece.stats])), None
                if piece.reason:
                    alone.append((sentence, piece))
                else:
                    yield piece
        for part, piece in alone:
            found = clauses(self.text, part.passage)
            parts = dict(self._decoded(map(self._read, found), **keywords)) if found[1:] else {}
            ordered = sorted(parts, key=lambda each: each.passage.start)
            tries = [_as_one_output([parts[each] for each in ordered])] if parts else []
            again = self._first_good(part, piece, tries, "by clauses")
            if not again.retried and not self._decoder.is_steady:
                search = {
                    "num_beams": RETRY_BEAMS,
                    "num_return_sequences": RETRY_BEAMS,
                    "speculative": False,
                    "logprobs": None,
                }
                best = dict(self._decoded([part], **(keywords | search)))[part]
                again = self._first_good(part, again, [best, *best.alternatives], "by beams")
            yield again

    def _first_good(
        self, part: _Part, piece: Piece, tries: Sequence[Generation], how: str
    ) -> Piece:
        """Return the piece of the first output that is good; else the one that there is."""
        stats = total([piece.stats, *(output.stats for output in tries[:1])])
        for output in tries:
            again = self._judged(part, output)
            if again.reason is None:
                piece = replace(again, reason=piece.reason, refused=piece.refused, retried=how)
                break
        return replace(piece, stats=stats)

    def _piece(self, part: _Part, output: str | None, reason: str | None, **more: Any) -> Piece:
        """Return what stands in the place of a part; an output of None is what was there."""
        start, source = part.passage.start, self.text[part.passage.start : part.passage.end]
        output = source if output is None else output
        return Piece(part.passage.line, source, output, reason, start=start, **more)

    def _laid_out(self, part: _Part, text: str) -> str | None:
        """Return a text for a part in the layout of its source; None if it has too few words."""
        words, gaps = part.passage.words(self.text)
        output, joint = text.split(), " "
        if self._translation and len(output) == 1:  # also the whole output in some languages
            output, joint = [*output[0]], ""
        return arranged(words, gaps, output, joint) if output else None

    def settled(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return all pieces, each judged again by how many others have errors.

        See `least_in_text`. Pieces stay as they are where `min_probability` was given.
        """
        done, parts = [*pieces], {part.passage.start: part for part in self._parts}
        if not self._adapts:
            return done
        surest = [each.surest for each in done if each.reason is None or each.written]
        errors, count, base = sum(surest), len(surest), self.options.min_probability or 0.0
        for i, each in enumerate(done):
            if each.written:
                least = least_in_text(base, errors - each.surest, count - 1)
                judge = Judge(self._decoder, replace(self.options, min_probability=least), None)
                again = self._judged(parts[each.start], each.written.generation(), judge)
                done[i] = replace(again, stats=each.stats)
        return done

    def _judged(self, part: _Part, done: Generation, judge: Judge | None = None) -> Piece:
        """Return a piece with its output in the layout of its source, as far as that is good."""
        judge = judge or self._judge
        source = part.passage.flat(self.text)
        begins, ends = self._lines.within(self.text, part.passage)
        # A heading, a short item of a list and the like.
        is_part = self.options.guard and not (self._labels or ends_as_sentence(source))
        is_item = self.options.guard and self._lines.begins_item(self.text, part.passage)
        text = as_within(source, done.text, begins or is_part or is_item, ends or is_part)
        laid_out = refused = self._laid_out(part, text)
        reason = judge.fault(source, done) or self._fault_of_layout(part, laid_out)
        more: dict[str, Any] = {}
        if reason is None and text.split() != source.split():
            judged = judge.good_words(part.ids, source, text, done)
            laid_out = self._laid_out(part, " ".join(judged.words))
            reason = self._fault_of_layout(part, laid_out) or next(iter(judged.reasons), None)
            if self._adapts and judged.surest:
                more = {"surest": judged.surest, "written": Written.of(done)}
        elif reason:
            laid_out = None
        if reason:
            more["refused"] = refused or text or None
        return self._piece(part, laid_out, reason, stats=done.stats, **more)

    def _fault_of_layout(self, part: _Part, laid_out: str | None) -> str | None:
        """Say why an output cannot stand where its source was, if it cannot."""
        if laid_out is None:
            return "its output has fewer words than it has lines"
        if not keeps_lines(self.text, part.passage, laid_out):
            return "its output would make something else of a line, such as an item of a list"
        return None

    def result(self, pieces: Iterable[Piece], seconds: float = 0.0) -> Rewritten:
        """Put the pieces of all parts in their places; `seconds` is for the statistics."""
        ordered = tuple(sorted(pieces, key=lambda piece: piece.start))
        parts, at = [], 0
        for piece in ordered:
            parts += [self.text[at : piece.start], piece.output]
            at = piece.start + len(piece.source)
        text = "".join([*parts, self.text[at:]])
        stats = replace(total([piece.stats for piece in ordered]), seconds=seconds)
        return Rewritten(text, self.text, ordered, stats)


def _as_one_output(outputs: Sequence[Generation]) -> Generation:
    """Return the outputs for the clauses of a sentence as one."""
    ends = [each.finish_reason for each in outputs if each.finish_reason != "eos"]
    return replace(
        outputs[0],
        text=" ".join(each.text.strip() for each in outputs),
        tokens=[token for each in outputs for token in each.tokens],
        finish_reason=ends[0] if ends else "eos",
        logprobs=None,
        stats=total([each.stats for each in outputs]),
    )
