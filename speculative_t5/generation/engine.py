"""`Engine`: what a decoder does with ids, for itself and for those who drive the loop."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from .. import decoding, device
from ..decoding import AdaptiveSchedule, FixedSchedule, Indexed, LanguageModel, Plan, Request, Round
from ..errors import check_utf8
from ..models import SharingDraft
from ..options import OptionError
from ..tokenizers import Tokenizer
from . import outputs, schedule_store
from .decoder_options import DraftingOptions
from .drafting import pair_up, spelled
from .options import GenerationOptions
from .outputs import Generation
from .steady import steady_width

NO_DRAFT = FixedSchedule(0)
LEAST_COPIED = 2  # tokens by which a draft is copied from a prediction, and not a model's
MAX_LEARNED_TEMPERATURE = 2.0  # draft lengths are learned together for all from here on

# Of a schedule: an engine with a lock of its own could not be pickled.
_making_schedule = threading.Lock()


class Engine:
    """Decodes ids with a target, and with what drafts for it.

    `decode` of `speculative_t5.decoding` runs the loop by `requests` and a `plan`, as the server
    does, which drives a batch itself; `rounds` and `generations` do all of it. Draft lengths are
    learned from call to call.

    Args:
        model: The target.
        tokenizer: For options that are text, and for the texts of outputs; None if there is none.
        draft: The draft model, "lookup" or None.
        drafting: How to draft and verify.

    Raises:
        ValueError: If the models do not go together, or an option does not fit them.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None,
        draft: LanguageModel | Literal["lookup"] | None,
        drafting: DraftingOptions,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.draft, self.drafting = pair_up(model, draft, drafting)
        self.drafts = self.draft is not None or self.drafting.lookup  # whether anything is drafted
        self.draft_is_implied = False  # and so left out where none may be
        # Makes choices the same in all processes that share a target.
        self._broadcast = getattr(model, "broadcast", decoding.identity)
        drafting = self.drafting
        self._verifier = decoding.Verifier(drafting.delta, drafting.rule, self._broadcast)
        # None where draft lengths are learned.
        self._fixed: FixedSchedule | None = None
        if not drafting.adapts:
            self._fixed = FixedSchedule(drafting.fixed, halves=drafting.steady)
        self._schedules: dict[tuple[object, ...], AdaptiveSchedule] = {}  # by options
        self._width: int | None = None  # of steady passes, once it is known

    def __getstate__(self) -> dict[str, object]:
        # Another device has another width and other costs.
        return self.__dict__ | {"_width": None, "_schedules": {}}

    def check(self, options: GenerationOptions) -> None:
        """Refuse options of a call that do not go with the models or with how they draft.

        Raises:
            ValueError: As `bind` does; and if a beam search would draft, or be steady.
        """
        if options.beams:
            self._check_beams(options)
        self.bind(options)

    def bind(self, options: GenerationOptions) -> decoding.RowOptions:
        """Return what options mean for the target and its tokenizer.

        Raises:
            ValueError: If an option names an id that the model lacks, or is text and there is no
                tokenizer, or text that the vocabulary lacks.
        """
        info, tokenizer, start = self.model.info, self.tokenizer, options.decoder_start_token_id
        stop_ids, sampler = frozenset(options.stop_token_ids), options.sampler
        spell = partial(spelled, info, tokenizer)
        transform = options.transform(spell, stop_ids | info.eos_token_ids, info.constraints)
        if start is not None and info.is_decoder_only:
            raise OptionError(
                "{decoder_start_token_id} is {}, and this model is decoder-only, which reads the "
                "prompt first: leave it out",
                start,
            )
        self._check_ids("stop_token_ids", stop_ids)
        self._check_ids("decoder_start_token_id", [] if start is None else [start])
        if transform:
            for name, ids in transform.ids.items():
                self._check_ids(name, ids)
            sampler = replace(sampler, transform=transform)
        stop_checker = None
        if options.stop:
            if tokenizer is None:
                raise ValueError("stop strings need a tokenizer: give the decoder one")
            stop_checker = partial(outputs.StoppedText, tokenizer, options.stop, options.min_tokens)
        return decoding.RowOptions(
            sampler,
            options.max_tokens,
            options.seed,
            stop_ids,
            stop_checker,
            options.speculative,
            start,
            0 if options.scores and options.logprobs is None else options.logprobs,
            self.predicted(options.prediction) if options.prediction else (),
        )

    def predicted(self, prediction: str | Sequence[int]) -> tuple[int, ...]:
        """Return the ids of what an output is expected to be, as it would have them."""
        found, info = prediction, self.model.info
        if isinstance(found, str):
            if self.tokenizer is None:
                raise OptionError("{prediction} is text: give ids, or a tokenizer")
            check_utf8("prediction", found)
            found = self.tokenizer.encode(found)
        self._check_ids("prediction", found)
        first = next((i for i, token in enumerate(found) if token not in info.special_tokens), 0)
        return tuple(found[first:])

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        """Refuse ids of an option that the model lacks."""
        largest, size = max(ids, default=-1), self.model.info.vocab_size
        if largest >= size:
            raise OptionError(
                f"{{{name}}} has the id {largest}, and the model has ids below {size}: give ids of "
                "its tokenizer"
            )

    def requests(self, prompts: Iterable[Indexed], options: GenerationOptions) -> Iterator[Request]:
        """Bind options to prompts, which are pairs of an index and source ids."""
        own = self.bind(options)
        return (Request(index, source, own) for index, source in prompts)

    def plan(
        self,
        sampler: decoding.Sampler | None = None,
        *,
        speculative: bool = True,
        expects: bool = False,
    ) -> Plan:
        """Return the plan by which `decode` generates.

        Args:
            sampler: That of all rows, whose draft lengths are learned apart if num_draft is "auto".
                None stands for any.
            speculative: False decodes with the target alone.
            expects: Whether requests may have a `prediction`, which drafts then copy.
        """
        width = self._steady_width() if self.drafting.steady else None
        if not (speculative and self.drafts):
            return Plan(decoding.EmptyDrafter(), NO_DRAFT, self._verifier, width)
        sharing = self.draft if isinstance(self.draft, SharingDraft) else None
        schedule = self._fixed or self._learning_schedule(sampler)
        drafter = self._make_drafter(schedule, expects)
        return Plan(drafter, schedule, self._verifier, width, sharing)

    def rounds(
        self, prompts: Iterable[Indexed], options: GenerationOptions, batch_size: int = 1
    ) -> Iterator[Round]:
        """Check options, and decode prompts."""
        own = self.bind(options)
        expects = bool(own.prediction)
        plan = self.plan(own.sampler, speculative=options.speculative, expects=expects)
        requests = (Request(index, source, own) for index, source in prompts)
        return decoding.decode(self.model, requests, plan, batch_size=batch_size)

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
        if count > 1:
            several = outputs.Several(count)
            prompts = several.repeated(prompts)
        rounds = self.rounds(prompts, options, batch_size)
        return self._outputs(rounds, options, several)

    def _outputs(
        self, rounds: Iterator[Round], options: GenerationOptions, several: outputs.Several | None
    ) -> Iterator[tuple[int, Generation]]:
        for done in rounds:
            if done.finish_reason:
                detokenizer = options.detokenizer(self.tokenizer)
                made = outputs.as_generation(done, detokenizer, scores=options.scores)
                if several:
                    yield from several.gathered(done, made)
                else:
                    yield done.index, made

    def pair_probabilities(
        self, source: Sequence[int], tokens: Sequence[int], options: GenerationOptions
    ) -> tuple[tuple[float, float | None], ...]:
        """Return the target's and the draft model's probability of each token of an output."""
        return decoding.pair_probabilities(
            self.model,
            self.draft,
            source,
            tokens,
            self.bind(options).sampler,
            self.drafting.draft_vocab,
            options.decoder_start_token_id,
        )

    def _check_beams(self, options: GenerationOptions) -> None:
        """Refuse a beam search with drafts that were asked for, or with steady passes."""
        chosen = self.drafting.lookup or (self.drafts and not self.draft_is_implied)
        said = f"{{num_beams}} is {options.num_beams}, and a beam search does not go with"
        if chosen and options.speculative:
            raise OptionError(f"{said} a draft: give speculative=False")
        if self.drafting.steady:
            raise OptionError(f"{said} {{steady}} passes: leave out one of them")

    def _steady_width(self) -> int:
        """Return the width of the target's passes where they are steady."""
        if self._width is None:
            self._width = steady_width(self.model, self.drafting.fixed + 1)
        return self._width

    def _learning_schedule(self, sampler: decoding.Sampler | None) -> decoding.Schedule:
        """Return the schedule of draft lengths, which goes on learning from call to call."""
        drafting = self.drafting
        device.enter_thread()  # before the lock, which a fork may leave locked
        settings: tuple[object, ...] = drafting.lookup, drafting.min_ngram, drafting.max_ngram
        if sampler is not None:
            # Roughly: what is learned at one temperature is nearly right at the next.
            temperature = round(min(sampler.temperature, MAX_LEARNED_TEMPERATURE), 1)
            settings += sampler.greedy, temperature, sampler.top_k > 0, sampler.top_p < 1
            # A transform takes time, and changes what is accepted.
            settings += (sampler.transform.summary,) if sampler.transform else ()
        shares = decoding.SHARES if self.draft else (1.0,)
        with _making_schedule:
            if settings not in self._schedules:
                models = [each.fingerprint if each else None for each in (self.model, self.draft)]
                found = schedule_store.stored(
                    *models, drafting.draft_vocab, *settings, shares=shares
                )
                self._schedules[settings] = found
            schedule = self._schedules[settings]
        return decoding.SplitSchedule(schedule) if self.draft else schedule

    def _make_drafter(self, schedule: decoding.Schedule, expects: bool) -> decoding.Drafter:
        """Return a drafter for rounds by this schedule."""
        info, options, by_model = self.model.info, self.drafting, None
        if self.draft:
            by_model = decoding.ModelDrafter(
                self.draft, info.vocab_size, options.draft_vocab, self._broadcast
            )
        if by_model and self._fixed and not options.lookup:
            if not expects:
                return by_model
            # A single token that is the same would say little of what follows.
            sizes = max(options.min_ngram, LEAST_COPIED), max(options.max_ngram, LEAST_COPIED)
            return decoding.ExpectingDrafter(by_model, decoding.LookupDrafter(info, *sizes))
        lookup = decoding.LookupDrafter(info, options.min_ngram, options.max_ngram)
        if by_model is None:
            return lookup
        return decoding.CombinedDrafter(by_model, lookup, schedule.split)
