"""Rewrites texts of any length: sentences go through the model, everything else stays."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..decoding import Sampler, Stats, pair_probabilities, total
from ..errors import check_options, check_utf8, count, described, option
from .comparison import as_page, as_table
from .layout import arranged, same_facts, similarity
from .splitting import (
    LANGUAGES,
    Breaks,
    Passage,
    clauses,
    is_label,
    keeps_lines,
    paragraphs,
    sentences,
)
from .translation import Translation, has_words, identifier

if TYPE_CHECKING:
    from ..generation import Generation, SpeculativeDecoder

By = Literal["sentence", "paragraph", "tokens"]
BEAMS = 4  # of the last try of a translation


@described
@dataclass(frozen=True, kw_only=True)
class RewriteOptions:
    """How a text is rewritten.

    By "paragraph", a long one is decoded as many of its sentences at a time as the model reads.
    Pieces of like length have the same `max_tokens` by default, and are decoded together.
    Similarity is difflib's ratio of letters and digits; set it to 0 for a model that does something
    other than correct or translate. `min_probability` is for any token of an output that changes
    its piece, as in GECToR (Omelianchuk et al. 2020, arXiv:2005.12592): the higher it is, the fewer
    wrong corrections are made, but also the fewer right ones.
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
        "Leave a piece as it is if the model gives a token of its output less than this, from 0 to "
        "1.",
        shown="the model's own, or 0",
        least=0.0,
        most=1.0,
    )

    def __post_init__(self) -> None:
        if self.by not in (None, *get_args(By)):
            names = ", ".join(map(repr, get_args(By)))
            raise ValueError(f"by is {self.by!r}, expected one of {names}")
        if self.language not in (None, *LANGUAGES):
            raise ValueError(
                f"there are no sentence rules for the language {self.language!r}: choose one of "
                f"{', '.join(LANGUAGES)}"
            )
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class TextOptions(RewriteOptions):
    """The options of `rewrite`."""

    batch_size: int | None = None  # pieces to decode side by side; None is 16, or 1 if steady
    speculative: bool = True  # False decodes with the target alone
    progress: bool = False  # shows a bar on standard error


@dataclass(frozen=True)
class Piece:
    """A part of a text, and what stands in its place."""

    line: int  # number of the line where it begins, from 1
    source: str  # the part as it was, line breaks included
    output: str  # what stands there now; `source` if nothing was changed
    reason: str | None = None  # why the model's output is not used, or none was made
    refused: str | None = None  # output not used, laid out as `source` if it has enough words
    retried: str | None = None  # how another try went well: "by clauses" or "by beams"
    stats: Stats | None = None  # what decoding it cost; None if it was not decoded in this run

    @property
    def status(self) -> Literal["changed", "same", "kept"]:
        """What became of it; "kept" is for what has a reason, and no other try went well."""
        if self.reason is not None and self.retried is None:
            return "kept"
        return "same" if self.output == self.source else "changed"


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


def rewrite(decoder: SpeculativeDecoder, text: str, options: TextOptions) -> Rewritten:
    r"""Rewrite a text of any length, and keep its lines and all that is not a sentence.

    Blank lines, indentation, line ends, list markers, quotation marks (>), headings, tables, code
    and labels stay as they are, see `paragraphs`. Sentences are decoded greedily, each with the
    decoder's prefix. One that spans several lines is read as one; in its output line breaks stand
    before the words that the first words of the lines became, see `arranged`.

    A piece stays as it was, and has a reason, if the vocabulary lacks one of its characters; if it
    is longer than the model reads; if its output did not end within `max_tokens`, is empty, has
    an unknown character or fewer words than the piece has lines, makes something else of a line
    (see `keeps_lines`), or is too different, see `min_similarity`; or if the model is not sure of
    its output, see `min_probability`.

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
    pieces = dict(done)
    return document.result(pieces, time.perf_counter() - began)


@dataclass(frozen=True)
class _Part:
    """A part of the text to rewrite."""

    passage: Passage
    ids: list[int]  # what the model reads, if it can
    limit: int  # the most tokens of its output
    reason: str | None = None  # why it cannot be read


class Document:
    """A text split into the pieces to rewrite; for errors see `rewrite`."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        text: str,
        options: RewriteOptions,
        breaks: Breaks = "wrapped",
    ) -> None:
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {type(text).__name__}")
        check_utf8("the text", text)
        if decoder.tokenizer is None:
            raise ValueError("a text needs a tokenizer, and this decoder has none: give it one")
        self.text, self._decoder, self._breaks = text, decoder, breaks
        self._translation: Translation | None = None
        if decoder.languages:
            source, target = decoder.languages
            self._translation = Translation(source or identifier().classify(text)[0], target)
            if options.min_similarity is not None:
                raise ValueError(
                    f"min_similarity is {options.min_similarity:g}, and a translation is not "
                    "similar to its source: leave one of them out"
                )
        self.options = self._with_defaults(options)
        self._parts = [*self._split()]

    def _with_defaults(self, options: RewriteOptions) -> RewriteOptions:
        """Fill in what depends on the decoder."""
        defaults: dict[str, Any] = {"by": "sentence", "language": "en", "min_similarity": 0.75}
        if self._translation:
            code = self._translation.source.partition("-")[0]
            language = code if code in LANGUAGES else "en"
            defaults = {"by": "tokens", "language": language, "min_similarity": 0.0}
        defaults["min_probability"] = self._decoder.min_probability
        missing = {name: v for name, v in defaults.items() if getattr(options, name) is None}
        return replace(options, **missing)

    def __len__(self) -> int:
        return len(self._parts)

    def _split(self) -> Iterator[_Part]:
        text, labels = self.text, self._translation is not None
        for paragraph in paragraphs(text, labels=labels, breaks=self._breaks):
            found = sentences(text, paragraph, self._language)
            # None stands between parts that are not to be joined.
            read = (self._read(each) if self._is_text(each.flat(text)) else None for each in found)
            for readable, group in groupby(read, key=lambda part: part and part.reason is None):
                several = [part for part in group if part is not None]
                pack = readable and self.options.by != "sentence"
                yield from self._packed(several) if pack else several

    @property
    def _language(self) -> str:
        return self.options.language or "en"

    def _is_text(self, flat: str) -> bool:
        """Whether a sentence, on one line, goes through the model."""
        return has_words(flat) if self._translation else not is_label(flat)

    def _read(self, passage: Passage) -> _Part:
        """Encode a passage, and find out whether the model can read it."""
        prompt, reason = self._decoder.prefix + passage.flat(self.text), None
        ids = self._decoder.encode(prompt)
        limit = self.options.max_tokens or 1 << (2 * len(ids) + 15).bit_length()
        try:
            source = self._decoder.fit(prompt, limit)
        except ValueError:  # encoding has succeeded, so it is too long
            source = None
        if source is None or source.cut:
            reason = f"it has {len(ids):,} tokens, more than the model reads"
        elif source.unknown:
            reason = f"the model's vocabulary lacks {' '.join(source.unknown)}"
        return _Part(passage, ids, limit, reason)

    def _packed(self, parts: Iterable[_Part]) -> Iterator[_Part]:
        """Join sentences of one paragraph to parts as long as may be."""
        most = self._decoder.trained_length or math.inf
        if self.options.by == "tokens":
            most = min(most, self.options.piece_tokens)
        pack, *others = parts
        for part in others:
            spans = pack.passage.spans + part.passage.spans
            joined = self._read(Passage(spans, pack.passage.line))
            if joined.reason or len(joined.ids) > most:
                yield pack
                joined = part
            pack = joined
        yield pack

    def rewrite(
        self,
        *,
        batch_size: int | None = None,
        speculative: bool = True,
        skip: Collection[int] = (),
    ) -> Iterator[tuple[int, Piece]]:
        """Yield the number and the piece of each part as it is done, in any order.

        The options are checked at the call. Parts whose numbers are in `skip` are left out.
        """
        decoder = self._decoder
        left = [(i, part) for i, part in enumerate(self._parts) if i not in skip]
        readable = [(i, part) for i, part in left if part.reason is None]
        readable.sort(key=lambda each: each[1].limit)
        decoder.iter_batch([], batch_size=batch_size, speculative=speculative)

        def pieces() -> Iterator[tuple[int, Piece]]:
            for i, part in left:
                if part.reason is not None:
                    yield i, self.piece(i, None, part.reason)
            failed = {}
            for i, done in self._decoded(readable, batch_size=batch_size, speculative=speculative):
                piece = self._judged(i, done)
                if piece.reason and self._translation:
                    failed[i] = piece
                else:
                    yield i, piece
            if failed:
                yield from self._retried(failed, batch_size=batch_size, speculative=speculative)

        return pieces()

    def _decoded(
        self, parts: Sequence[tuple[int, _Part]], **keywords: Any
    ) -> Iterator[tuple[int, Generation]]:
        """Decode parts in order of `limit`; yield the number of each, and its output."""
        by_limit = sorted(parts, key=lambda each: each[1].limit)
        for limit, group in groupby(by_limit, key=lambda each: each[1].limit):
            requests = [(i, part.ids) for i, part in group]
            yield from self._decoder.iter_batch(requests, max_tokens=limit, **keywords)

    def _retried(
        self, failed: dict[int, Piece], *, batch_size: int | None, speculative: bool
    ) -> Iterator[tuple[int, Piece]]:
        """Try pieces again clause by clause, then by a beam search; keep those that fail thrice."""
        parts: list[tuple[int, _Part]] = []
        for i in failed:
            found = clauses(self.text, self._parts[i].passage, self._language)
            parts += [(i, self._read(each)) for each in found if len(found) > 1]
        tries: dict[int, list[Generation]] = {i: [] for i in failed}
        numbered = [(n, part) for n, (_, part) in enumerate(parts)]
        outputs = dict(self._decoded(numbered, batch_size=batch_size, speculative=speculative))
        for n, (i, _) in enumerate(parts):
            tries[i].append(outputs[n])
        left = {}
        for i, piece in failed.items():
            joined = [_joined(tries[i])] if tries[i] else []
            again = self._first_good(i, piece, joined, "by clauses")
            if again.retried:
                yield i, again
            else:
                left[i] = again
        searches = self._decoded(
            [(i, self._parts[i]) for i in left if not self._decoder.is_steady],
            batch_size=batch_size, num_beams=BEAMS, num_return_sequences=BEAMS, speculative=False,
        )  # fmt: skip
        for i, done in searches:
            yield i, self._first_good(i, left.pop(i), [done, *done.alternatives], "by beams")
        yield from left.items()

    def _first_good(
        self, number: int, piece: Piece, tries: Sequence[Generation], how: str
    ) -> Piece:
        """Return the piece of the first output that is good; else the one that there is."""
        costs = [each for each in (piece.stats, *(done.stats for done in tries[:1])) if each]
        for done in tries:
            again = self._judged(number, done)
            if again.reason is None:
                piece = replace(again, reason=piece.reason, refused=piece.refused, retried=how)
                break
        return replace(piece, stats=total(costs))

    def piece(self, number: int, output: str | None, reason: str | None, **more: Any) -> Piece:
        """Return what stands in the place of a part; an output of None is what was there."""
        passage = self._parts[number].passage
        source = self.text[passage.start : passage.end]
        return Piece(passage.line, source, source if output is None else output, reason, **more)

    def laid_out(self, number: int, text: str) -> str | None:
        """Return a text for a part in the layout of its source; None if it has too few words."""
        words, gaps = self._parts[number].passage.words(self.text)
        output, joint = text.split(), " "
        if self._translation and len(output) == 1:  # also the whole output in some languages
            output, joint = [*output[0]], ""
        return arranged(words, gaps, output, joint) if output else None

    def _judged(self, number: int, done: Generation) -> Piece:
        """Return a piece with its output in the layout of its source, if the output is good."""
        part = self._parts[number]
        source, output = part.passage.flat(self.text), done.text.split()
        laid_out, reason = self.laid_out(number, done.text), None
        least = self.options.min_similarity or 0.0
        if done.finish_reason == "length":
            reason = f"its output did not end within {count(done.stats.emitted, 'token')}"
        elif not output:
            reason = "its output is empty"
        elif self._has_unknown(source, done):
            reason = "its output has an unknown character"
        elif fault := self._translation and self._translation.fault(source, done.text.strip()):
            reason = fault
        elif (found := similarity(source, done.text)) < least:
            reason = f"its output is too different, with a similarity of {found:.2f}"
        elif least and not same_facts(source, done.text):
            reason = "its output has other numbers or addresses"
        elif laid_out is None:
            reason = "its output has fewer words than it has lines"
        elif not keeps_lines(self.text, part.passage, laid_out):
            reason = "its output would make something else of a line, such as an item of a list"
        elif output != source.split():
            reason = self._doubt(part, done)
        if reason:
            refused = laid_out or done.text or None
            return self.piece(number, None, reason, refused=refused, stats=done.stats)
        return self.piece(number, laid_out, None, stats=done.stats)

    def _has_unknown(self, source: str, done: Generation) -> bool:
        """Whether an output has an unknown token, or bytes that spell no character."""
        unknown = getattr(self._decoder.tokenizer, "unknown_id", None)
        bad = "\N{REPLACEMENT CHARACTER}"
        return unknown in done.tokens or done.text.count(bad) > source.count(bad)

    def _doubt(self, part: _Part, done: Generation) -> str | None:
        """Say how unsure the target is of an output, if it is too unsure."""
        if not (least := self.options.min_probability):
            return None
        model, sampler = self._decoder.model, Sampler(temperature=0)
        found = pair_probabilities(model, None, part.ids, done.tokens, sampler)
        lowest = min((p for p, _ in found), default=1.0)
        if lowest >= least:
            return None
        return f"a token of its output has a probability of {lowest:.4f}, which is below {least:g}"

    def result(self, pieces: Mapping[int, Piece], seconds: float = 0.0) -> Rewritten:
        """Put the pieces of all parts in their places; `seconds` is for the statistics."""
        ordered = tuple(pieces[i] for i in range(len(self)))
        parts, at = [], 0
        for part, piece in zip(self._parts, ordered, strict=True):
            parts += [self.text[at : part.passage.start], piece.output]
            at = part.passage.end
        stats = total([piece.stats for piece in ordered if piece.stats is not None])
        text = "".join([*parts, self.text[at:]])
        return Rewritten(text, self.text, ordered, replace(stats, seconds=seconds))


def _joined(parts: Sequence[Generation]) -> Generation:
    """Return the outputs for the clauses of a piece as one."""
    ends = [done.finish_reason for done in parts if done.finish_reason != "eos"]
    return replace(
        parts[0],
        text=" ".join(done.text.strip() for done in parts),
        tokens=[token for done in parts for token in done.tokens],
        finish_reason=ends[0] if ends else "eos",
        stats=total([done.stats for done in parts]),
    )
