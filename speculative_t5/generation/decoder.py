"""`SpeculativeDecoder`: the class that users call."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .. import decoding, device
from .._version import __version__
from ..checkpoints import as_dtype, default_type_of, dtype_name, load, locate, named_draft
from ..decoding import AdaptiveSchedule, FixedSchedule, Indexed, LanguageModel, Plan, Request, Round
from ..distributed import ProcessGroup
from ..models import SharingDraft
from ..options import OptionError, check_integer, takes
from ..tokenizers import Prompt, PromptEncoder, Source, check_prompts
from . import outputs
from .drafting import pair_up, spelled
from .options import (
    BatchOptions,
    DecodingOptions,
    GenerationOptions,
    LoadingOptions,
    MakingOptions,
    SingleOptions,
)
from .outputs import Chunk, Generation
from .steady import steady_width

if TYPE_CHECKING:
    from ..documents import Rewritten, TextOptions

NO_DRAFT = FixedSchedule(0)
HOTTEST = 2.0  # draft lengths are learned together for all temperatures from here on

_beginning = threading.Lock()  # of a schedule: a decoder with one of its own could not be pickled


class _Rewrite:
    """The method `rewrite` for texts of any length, which `documents` has, the package above."""

    def __get__(self, decoder: object, owner: type) -> Any:
        from ..documents import rewrite  # imported when it is asked for

        return rewrite.__get__(decoder, owner)


class SpeculativeDecoder:
    """Generates with a target that verifies what a draft proposes.

    The output is distributed exactly as the target's own unless `delta` is above 0; at temperature
    0 it is the target's greedy output. This holds up to rounding: a pass over several tokens and
    one over a single token may round differently, which shows in near-ties: in 16-bit types, on
    GPUs, and in float32 where the C parts are not used. `steady` prevents it.

    Args:
        model: The target.
        draft: A smaller model with the same tokenizer; "lookup" to copy from the source and the
            output so far, without a model; or None to decode with the target alone.
        tokenizer: Needed for prompts and outputs as text; without it prompts are ids and texts of
            results are empty.
        options: Given as keywords, all of them optional; see `DecodingOptions`.

    `model` and `tokenizer` are attributes, and `draft`, which is the draft model or None.

    Raises:
        ValueError: If an option is out of its range or the models' tokenizers differ.
    """

    @takes(MakingOptions)
    def __init__(self, model: LanguageModel, options: MakingOptions) -> None:
        self.model = model
        self.draft, self._drafting = pair_up(model, options.draft, options)
        self.tokenizer = options.tokenizer
        self._prompts = PromptEncoder(
            model,
            options.tokenizer,
            prefix=options.prefix,
            to=options.to,
            from_=options.from_,
            chat=options.chat,
            max_source_length=options.max_source_length,
            truncate=options.truncate,
        )
        self.prefix = self._prompts.prefix or ""  # of prompts, where they do not begin with it
        self.languages = self._prompts.languages  # to translate from, "" if unknown, and to
        self.trained_length = self._prompts.trained_length  # tokens, if the model says so
        self.is_steady = options.steady  # and prompts are decoded one at a time
        self.drafts = self.draft is not None or self._drafting.lookup  # whether anything is drafted
        self.draft_vocab = self._drafting.draft_vocab  # ids that the draft model proposes are below
        self.min_probability = float(getattr(model, "min_probability", 0))  # for `rewrite`
        self._draft_is_implied = False  # and so left out where none may be
        # Makes choices the same in all processes that share a target.
        self._broadcast = getattr(model, "broadcast", decoding.identity)
        self._verifier = decoding.Verifier(options.delta, self._drafting.rule, self._broadcast)
        self._schedules: dict[tuple[object, ...], AdaptiveSchedule] = {}  # by options
        self._width: int | None = None  # of steady passes, once it is known

    @classmethod
    @takes(LoadingOptions)
    def from_pretrained(cls, model: str | Path, options: LoadingOptions) -> SpeculativeDecoder:
        """Load target and draft from folders, or by names that `load` looks up.

        Without `draft`, it is the one that the target's config.json names, if any, and if no
        `adapter` changes the target; None decodes with the target alone. `adapter` and `dtype` are
        passed to `load`, the latter for both models. With a `group` of
        processes (`mx.distributed.init()`), the target is split among them, and each has the whole
        draft; all must then make the same calls. What they would do is compared before the models
        are loaded. The other options are those of the class.

        Raises:
            StartError: In all processes, if their versions, weights or options differ.
        """
        own = {each.name: getattr(options, each.name) for each in fields(DecodingOptions)}
        draft, adapter, dtype, group = options.draft, options.adapter, options.dtype, options.group
        if implied := draft is ...:
            draft = named_draft(locate(model, adapter))
        if group is not None:
            facts = process_facts(model, draft, dtype=dtype, adapter=adapter, **own)
            ProcessGroup(group).compare(facts)
        target, tokenizer = load(model, adapter=adapter, dtype=dtype, group=group)
        small: Any = draft
        if draft is not None and draft != "lookup":
            small, _ = load(draft, dtype=dtype, target=target)
        made = cls(target, small, tokenizer, **own)
        made._draft_is_implied = implied
        return made

    def __getstate__(self) -> dict[str, object]:
        # Another device has another width and other costs.
        return self.__dict__ | {"_width": None, "_schedules": {}}

    @takes(SingleOptions)
    def generate(self, prompt: Prompt, options: SingleOptions) -> Generation:
        """Generate the output for one prompt.

        Args:
            prompt: Text; source ids (EOS included, where a T5 reads them) as a list; or a chat as
                a list of messages, each with its "role" and "content".
            options: Given as keywords; see `GenerationOptions` and `SingleOptions`.

        Raises:
            ValueError: If the prompt is empty, too long or not a prompt, or an option is out of its
                range.
        """
        source = self.fit(prompt).ids
        rows = min(options.num_return_sequences, self._drafting.rows(None))
        ((_, done),) = self.generations([(0, source)], options, rows)
        if not options.probabilities:
            return done
        sampler, start = self.bind(options).sampler, options.decoder_start_token_id

        def explained(done: Generation) -> Generation:
            found = decoding.pair_probabilities(
                self.model, self.draft, source, done.tokens, sampler, self.draft_vocab, start
            )
            return replace(done, probabilities=found)

        others = tuple(map(explained, done.alternatives))
        return replace(explained(done), alternatives=others)

    @takes(BatchOptions)
    def generate_batch(self, prompts: Sequence[Prompt], options: BatchOptions) -> list[Generation]:
        """Generate the outputs for many prompts, in the prompts' order.

        All prompts are checked before the first is decoded. At the same seed the first output is
        that of `generate`.
        """
        check_prompts(prompts)
        batch_size = self._drafting.rows(options.batch_size)
        sources = [self._fit(i, each) for i, each in enumerate(prompts)]
        # Rows of similar length pad less, and those that end last are short.
        window = max(len(sources), 1) if options.by_length else 1
        requests = decoding.in_order_of_length(enumerate(sources), window)
        done = dict(naming_rows(self.generations(requests, options, batch_size), options))
        return [done[index] for index in range(len(sources))]

    @takes(BatchOptions)
    def iter_batch(
        self, prompts: Iterable[tuple[int, Prompt]], options: BatchOptions
    ) -> Iterator[tuple[int, Generation]]:
        """Generate the outputs for any number of prompts; yield index and output as each ends.

        When one of the prompts that are decoded side by side ends, the next takes its row. An
        output depends only on its prompt, its index and the seed, up to rounding.

        `prompts` are pairs of an index, at least 0, and a prompt, as `enumerate` makes them. As
        many prompts as rows are taken ahead, with `by_length` `WINDOW` times as many.
        """
        check_prompts(prompts)
        batch_size = self._drafting.rows(options.batch_size)
        requests: Iterator[Indexed] = (
            (index, self._fit(index, prompt)) for index, prompt in map(checked_pair, prompts)
        )
        if options.by_length and batch_size > 1:
            requests = decoding.in_order_of_length(requests, decoding.WINDOW * batch_size)
        return naming_rows(self.generations(requests, options, batch_size), options)

    def check_batch(self, options: BatchOptions) -> None:
        """Refuse options that `iter_batch` would refuse, before anything is decoded.

        Raises:
            ValueError: If an option does not fit the models, or another option.
        """
        self._drafting.rows(options.batch_size)
        if options.beams:
            self._check_beams(options)
        self.bind(options)

    @takes(GenerationOptions)
    def stream(self, prompt: Prompt, options: GenerationOptions) -> Iterator[Chunk]:
        """Generate one output, a chunk for each pass of the target; otherwise as `generate`.

        What needs finished outputs is refused here: `num_return_sequences`, `scores`, `num_beams`.
        """
        options.check_stream()
        source = self.fit(prompt).ids
        detokenizer = options.detokenizer(self.tokenizer)
        return (outputs.as_chunk(done, detokenizer) for done in self.rounds([(0, source)], options))

    if TYPE_CHECKING:

        @takes(TextOptions)
        def rewrite(self, text: str, options: TextOptions) -> Rewritten:
            """Rewrite a text of any length, piece by piece; see `documents.rewrite`."""
            raise NotImplementedError

    else:
        rewrite = _Rewrite()

    def translating(self, to: str, from_: str | None = None) -> SpeculativeDecoder:
        """Return a decoder of the same models whose prompts are translated to another language.

        Languages are names or codes; see `Languages` for errors.
        """
        prompts = self._prompts.translating(to, from_)
        other = object.__new__(type(self))  # and no copy, which would learn schedules for itself
        vars(other).update(vars(self), _prompts=prompts, prefix=prompts.prefix)
        other.languages = prompts.languages
        return other

    @property
    def prompts(self) -> PromptEncoder:
        """What makes ids of prompts."""
        return self._prompts

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt of any length, EOS included where the model is a T5.

        Raises:
            ValueError: If the prompt is empty or not a prompt, if it is text and there is no
                tokenizer or a chat and there is no template, or if an id is out of range.
        """
        return self._prompts.ids(prompt)

    def fit(self, prompt: Prompt) -> Source:
        """Encode a prompt; cut it if it is too long and may be cut.

        Raises:
            ValueError: See `encode`; and if the prompt is too long and `truncate` is not set.
        """
        return self._prompts.fit(prompt)

    def log_probabilities(
        self,
        source: Sequence[int],
        tokens: Sequence[int],
        top: int = 0,
        *,
        decoder_start_token_id: int | None = None,
    ) -> list[tuple[float, dict[int, float]]]:
        """Return the natural logarithm of the target's probability for each token of an output.

        `source` are the ids of a prompt. With each come the `top` most probable ids and theirs. All
        are those of temperature 1, given all tokens before.
        """
        start = decoder_start_token_id
        return decoding.log_probabilities(self.model, source, tokens, top, start)

    def _fit(self, index: int, prompt: Prompt) -> list[int]:
        """Return the ids of one of many prompts; errors name its index."""
        try:
            return self.fit(prompt).ids
        except OptionError as error:
            error.put_before(f"at index {index}, ")
            raise
        except ValueError as error:
            error.args = (f"at index {index}, {error}",)
            raise

    def generations(
        self, prompts: Iterable[Indexed], options: GenerationOptions, batch_size: int
    ) -> Iterator[tuple[int, Generation]]:
        """Check options, decode prompts, and yield each one's index and output as it ends."""
        if beams := options.beams:
            self._check_beams(options)
            requests = self.requests(prompts, options)
            searches = max(1, batch_size // beams.num_beams)
            results = decoding.beam_search(self.model, requests, beams, searches, self._broadcast)
            return ((done.index, outputs.best_beam(done, self.tokenizer)) for done in results)
        several, count = None, options.num_return_sequences
        if options.scores or count > 1:
            model, start = self.model if options.scores else None, options.decoder_start_token_id
            several = outputs.Several(count, model, start)
            prompts = several.repeated(prompts)
        rounds = self.rounds(prompts, options, batch_size)
        return self._outputs(rounds, options, several)

    def _outputs(
        self, rounds: Iterator[Round], options: GenerationOptions, several: outputs.Several | None
    ) -> Iterator[tuple[int, Generation]]:
        for done in rounds:
            if done.finish_reason:
                made = outputs.as_generation(done, options.detokenizer(self.tokenizer))
                if several:
                    yield from several.gathered(done, made)
                else:
                    yield done.index, made

    def _check_beams(self, options: GenerationOptions) -> None:
        """Refuse a beam search with drafts that were asked for, or with steady passes."""
        chosen = self._drafting.lookup or (self.drafts and not self._draft_is_implied)
        said = f"{{num_beams}} is {options.num_beams}, and a beam search does not go with"
        if chosen and options.speculative:
            raise OptionError(f"{said} a draft: give speculative=False")
        if self.is_steady:
            raise OptionError(f"{said} {{steady}} passes: leave out one of them")

    def bind(self, options: GenerationOptions) -> decoding.RowOptions:
        """Return what options mean for the target and its tokenizer.

        Raises:
            ValueError: If an option names an id that the model lacks, or is text and there is no
                tokenizer, or text that the vocabulary lacks.
        """
        info, tokenizer = self.model.info, self.tokenizer
        stop_ids = frozenset(options.stop_token_ids)
        spell = partial(spelled, info, tokenizer)
        transform = options.transform(spell, stop_ids | info.eos_token_ids, info.constraints)
        start = options.decoder_start_token_id
        if start is not None and info.is_decoder_only:
            raise OptionError(
                "{decoder_start_token_id} is {}, and this model is decoder-only, which reads the "
                "prompt first: leave it out",
                start,
            )
        named: dict[str, Collection[int]] = {"stop_token_ids": stop_ids}
        named["decoder_start_token_id"] = [] if start is None else [start]
        if transform:
            named |= transform.ids
        for name, ids in named.items():
            if (largest := max(ids, default=-1)) >= info.vocab_size:
                raise OptionError(
                    f"{{{name}}} has the id {largest}, and the model has ids below "
                    f"{info.vocab_size}: give ids of its tokenizer"
                )
        stop_checker = None
        if options.stop:
            if tokenizer is None:
                raise ValueError("stop strings need a tokenizer: give the decoder one")
            stop_checker = partial(outputs.StoppedText, tokenizer, options.stop, options.min_tokens)
        sampler = replace(options.sampler, transform=transform) if transform else options.sampler
        return decoding.RowOptions(
            sampler,
            options.max_tokens,
            options.seed,
            stop_ids,
            stop_checker,
            options.speculative,
            start,
        )

    def requests(self, prompts: Iterable[Indexed], options: GenerationOptions) -> Iterator[Request]:
        """Bind options to prompts, which are pairs of an index and source ids."""
        own = self.bind(options)
        return (Request(index, source, own) for index, source in prompts)

    def rounds(
        self, prompts: Iterable[Indexed], options: GenerationOptions, batch_size: int = 1
    ) -> Iterator[Round]:
        """Check options, and decode prompts."""
        own = self.bind(options)
        plan = self.plan(own.sampler, speculative=options.speculative)
        requests = (Request(index, source, own) for index, source in prompts)
        return decoding.decode(self.model, requests, plan, batch_size=batch_size)

    def plan(self, sampler: decoding.Sampler | None = None, *, speculative: bool = True) -> Plan:
        """Return the plan by which `decode` generates.

        Args:
            sampler: That of all rows, whose draft lengths are learned apart if num_draft is "auto".
                None stands for any.
            speculative: False decodes with the target alone.
        """
        if not (speculative and self.drafts):
            return Plan(decoding.EmptyDrafter(), NO_DRAFT, self._verifier, self._steady_width())
        sharing = self.draft if isinstance(self.draft, SharingDraft) else None
        schedule = self._schedule_for(sampler)
        drafter = self._make_drafter(schedule)
        return Plan(drafter, schedule, self._verifier, self._steady_width(), sharing)

    def _steady_width(self) -> int | None:
        """Return the width of the target's passes; None if they need not be steady."""
        if self._width is None and self.is_steady:
            self._width = steady_width(self.model, self._drafting.fixed + 1)
        return self._width

    def _schedule_for(self, sampler: decoding.Sampler | None) -> decoding.Schedule:
        """Return the schedule of draft lengths, which goes on learning from call to call."""
        drafting = self._drafting
        if not drafting.adapts:
            return FixedSchedule(drafting.fixed, halves=drafting.steady)
        device.enter_thread()  # before the lock, which a fork may leave locked
        settings: tuple[object, ...] = drafting.lookup, drafting.min_ngram, drafting.max_ngram
        if sampler is not None:
            # Roughly: what is learned at one temperature is nearly right at the next.
            temperature = round(min(sampler.temperature, HOTTEST), 1)
            settings += sampler.greedy, temperature, sampler.top_k > 0, sampler.top_p < 1
            # A transform takes time, and changes what is accepted.
            settings += (sampler.transform.summary,) if sampler.transform else ()
        shares = decoding.SHARES if self.draft else (1.0,)
        with _beginning:
            if settings not in self._schedules:
                models = [each.fingerprint if each else None for each in (self.model, self.draft)]
                found = decoding.stored(*models, self.draft_vocab, *settings, shares=shares)
                self._schedules[settings] = found
            schedule = self._schedules[settings]
        return decoding.SplitSchedule(schedule) if self.draft else schedule

    def _make_drafter(self, schedule: decoding.Schedule) -> decoding.Drafter:
        """Return a drafter for rounds by this schedule."""
        info, options, by_model = self.model.info, self._drafting, None
        if self.draft:
            by_model = decoding.ModelDrafter(
                self.draft, info.vocab_size, self.draft_vocab, self._broadcast
            )
        if by_model and not (options.lookup or options.adapts):
            return by_model
        lookup = decoding.LookupDrafter(info, options.min_ngram, options.max_ngram)
        if by_model is None:
            return lookup
        return decoding.CombinedDrafter(by_model, lookup, schedule.split)


def naming_rows(
    outputs: Iterator[tuple[int, Generation]], options: GenerationOptions
) -> Iterator[tuple[int, Generation]]:
    """Yield outputs; name the index of the prompt in the error of one that cannot go on."""
    try:
        yield from outputs
    except decoding.RowError as error:
        # Beams of a prompt have its index, and samples one each.
        count = 1 if options.beams else options.num_return_sequences
        error.index //= count
        error.args = (f"at index {error.index}, {error.reason}",)
        raise


def checked_pair(item: object) -> tuple[int, Prompt]:
    """Return an index and its prompt; refuse anything else in their place."""
    if isinstance(item, tuple | list) and len(item) == 2:
        return check_integer("a prompt's index", item[0], 0), item[1]
    raise ValueError(
        "each of prompts must be an index with its prompt, as enumerate makes them, got "
        f"{type(item).__name__}"
    )


def process_facts(
    model: str | Path,
    draft: str | Path | None,
    *,
    dtype: mx.Dtype | str | None = None,
    adapter: str | Path | None = None,
    **options: object,
) -> dict[str, str]:
    """Return the facts that must be the same in all processes, see `ProcessGroup.compare`."""
    facts = {"the version of speculative_t5": __version__, "the version of MLX": version("mlx")}
    target = locate(model, adapter)
    facts["the type to compute in"] = dtype_name(as_dtype(dtype) or default_type_of(target).dtype)
    facts["the target"] = f"weights {target.digest()}"
    if draft is None or draft == "lookup":
        facts["the draft"] = str(draft or "none")
    else:
        facts["the draft"] = f"weights {locate(draft).digest()}"
    return facts | {name: repr(value) for name, value in options.items()}
