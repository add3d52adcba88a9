"""`SpeculativeDecoder`: what users call."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from .. import device
from ..checkpoints import load
from ..decoding import (
    WINDOW,
    AdaptiveSchedule,
    CombinedDrafter,
    Drafter,
    EmptyDrafter,
    FixedSchedule,
    LanguageModel,
    LookupDrafter,
    ModelDrafter,
    Padded,
    Plan,
    Request,
    Round,
    Sampler,
    Schedule,
    Verifier,
    calibrate,
    check_ngrams,
    decode,
    in_order_of_length,
    pair_probabilities,
)
from ..errors import check_integer, check_number
from ..tokenizers import Prompt as Prompt
from ..tokenizers import PromptEncoder, Source, Tokenizer, check_prompts
from .outputs import Chunk, Generation, as_chunks, as_generations
from .progress import with_bar

VerifyRule = Literal["auto", "token", "block"]
NumDraft = int | Literal["auto"]
MAX_BATCH = 2**16
LEARNED = ("_schedules", "_calibrating")  # attributes of a decoder that its copies make anew
REHEARSAL_TOKENS = 128  # of an output that only serves to measure costs


class SpeculativeDecoder:
    """Generates with a target that checks what a draft proposes.

    The output is distributed exactly as the target's own unless `delta` is above 0: at temperature
    0 it is the target's greedy output. That is up to rounding: a pass over several tokens and one
    over a single token may round differently, which shows in near-ties of 16-bit types.

    Args:
        model: The target.
        draft: A smaller model with the same tokenizer; "lookup" to draft without a model, by
            copying from the source and the output so far; or None to decode with the target alone.
        tokenizer: Needed for prompts and outputs as text; with None, prompts are ids and the
            texts of results are empty.
        num_draft: Tokens to draft for each pass of the target, at least 1; or "auto" to choose the
            number round by round, from what drafting and verifying cost here and from how many
            tokens have been accepted. The costs are measured once, on the first prompt.
        delta: Lenience in [0, 1]. When sampling, a drafted x is accepted with probability
            min(1, p(x) / q(x) + delta); at temperature 0, if the target gives it at least
            (1 - delta) times the largest probability.
        verify: "token" judges drafted tokens one by one, "block" the draft as a whole, which
            accepts more of it and is exact as well; "auto" is "block" unless delta is above 0. At
            temperature 0 the two are the same.
        lookup: Use lookups beside a draft model: up to `num_draft` tokens after the model's own.
        min_ngram: Fewest last tokens of the output that a lookup must find again, at least 1.
        max_ngram: The longest match that a lookup prefers to a shorter one.
        draft_vocab: Let the draft model propose only this many ids, the first ones, so that its
            output head costs less; None is all. Tokenizers that put frequent pieces first lose
            little acceptance, and the output is the target's own in any case.
        chat: Put prompts that are text into the form of a chat, as what its user says, by the chat
            template of the model's tokenizer.
        prefix: Put before each prompt that is text, unless it begins with it; "" is none, and None
            what the model's config.json names as `prefix`. Ids and chats are left alone.
        max_source_length: The longest prompt in tokens; None for what the model is made for. A
            longer one is an error. A T5 can read more than it was made for, a decoder-only model
            cannot.
        truncate: Cut longer prompts instead: those of a T5 at their end, those of a decoder-only
            model at their beginning, so that there is room for `max_tokens`.

    Raises:
        ValueError: If an option is out of its range or the models' tokenizers differ.
    """

    def __init__(
        self,
        model: LanguageModel,
        draft: LanguageModel | Literal["lookup"] | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        num_draft: NumDraft = 5,
        delta: float = 0.0,
        verify: VerifyRule = "auto",
        lookup: bool = False,
        min_ngram: int = 1,
        max_ngram: int = 8,
        draft_vocab: int | None = None,
        chat: bool = False,
        prefix: str | None = None,
        max_source_length: int | None = None,
        truncate: bool = False,
    ) -> None:
        if not 0 <= check_number("delta", delta) <= 1:
            raise ValueError(f"delta must be between 0 and 1, got {delta}")
        if verify not in ("auto", "token", "block"):
            raise ValueError(f"verify must be 'auto', 'token' or 'block', got {verify!r}")
        if verify == "block" and delta > 0:
            raise ValueError(
                f"verify 'block' is exact and takes no delta above 0, got {delta}: "
                "use verify 'token' or delta 0"
            )
        if isinstance(draft, str) and draft == "lookup":
            draft, lookup = None, True
        elif draft is not None and not hasattr(draft, "start"):
            raise ValueError(f"draft must be a loaded model, 'lookup' or None, got {draft!r}")
        check_ngrams(min_ngram, max_ngram)
        if num_draft != "auto" and (not isinstance(num_draft, int) or num_draft < 1):
            raise ValueError(
                f"num_draft must be an integer of at least 1 or 'auto', got {num_draft!r}"
            )
        # Where ids end with EOS, as GPT-2's do, a draft does without it.
        least = 0 if model.is_decoder_only else model.eos_token_id
        if draft_vocab is not None and check_integer("draft_vocab", draft_vocab, 1) <= least:
            raise ValueError(
                f"draft_vocab must be above {model.eos_token_id}, the id that ends outputs, "
                f"got {draft_vocab}"
            )
        if draft is not None:
            check_pair(model, draft)
        self.model = model
        self.draft = draft
        self.tokenizer = tokenizer
        self._num_draft = num_draft
        self._schedules: dict[Hashable, AdaptiveSchedule] = {}
        self._calibrating = threading.Lock()  # held while one is measured, made or looked up
        self._lookup = lookup
        self._draft_vocab = draft_vocab
        self._prompts = PromptEncoder(
            model,
            tokenizer,
            prefix=prefix,
            chat=chat,
            max_source_length=max_source_length,
            truncate=truncate,
        )
        self._ngrams = (min_ngram, max_ngram)
        self._delta = delta
        self._verify_in_blocks = verify != "token" and delta == 0

    def __getstate__(self) -> dict[str, Any]:
        """What copies have: all but what was learned here of costs and acceptance."""
        return {name: value for name, value in vars(self).items() if name not in LEARNED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._schedules, self._calibrating = {}, threading.Lock()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        draft: str | Path | None = None,
        *,
        num_draft: NumDraft = 5,
        delta: float = 0.0,
        verify: VerifyRule = "auto",
        lookup: bool = False,
        min_ngram: int = 1,
        max_ngram: int = 8,
        draft_vocab: int | None = None,
        chat: bool = False,
        prefix: str | None = None,
        max_source_length: int | None = None,
        truncate: bool = False,
        dtype: mx.Dtype | str | None = None,
    ) -> SpeculativeDecoder:
        """Load target and draft from folders, or by their names, which `load` looks up.

        The draft "lookup" is neither: it drafts without a model. The other options are those of the
        constructor, and `dtype` is that of `load`, for both models.
        """
        target, tokenizer = load(model, dtype=dtype)
        small: LanguageModel | None = None
        if draft == "lookup":
            lookup = True
        elif draft is not None:
            small, _ = load(draft, dtype=dtype)
        return cls(
            target, small, tokenizer, num_draft=num_draft, delta=delta, verify=verify,
            lookup=lookup, min_ngram=min_ngram, max_ngram=max_ngram, draft_vocab=draft_vocab,
            chat=chat, prefix=prefix, max_source_length=max_source_length, truncate=truncate,
        )  # fmt: skip

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        speculative: bool = True,
        probabilities: bool = False,
        progress: bool = False,
    ) -> Generation:
        """Generate the output for one prompt.

        Args:
            prompt: Text; source ids (EOS included, where a T5 reads them) as a list; or a chat as
                a list of messages, each with its "role" and "content".
            max_tokens: Upper bound on emitted tokens, EOS included.
            temperature: 0 is greedy; above 0 tokens are sampled.
            top_k: Sample from the k most probable tokens only; 0 is all of them.
            top_p: Then from the most probable ones that reach this sum; 1 is all of them.
            seed: For sampling; the same seed, options and machine give the same tokens. With
                num_draft "auto" that is as long as the calibration is kept, see `calibration`.
            speculative: False decodes with the target alone.
            probabilities: Tell for each token how probable it was to the target and to the draft
                model, see `Token`. That takes one more pass over the output by each of them.
            progress: Show a bar on standard error.

        Raises:
            ValueError: If the prompt is empty, too long or not a prompt, or an option is out of its
                range.
        """
        source, sampler = self.fit(prompt, max_tokens).ids, Sampler(temperature, top_k, top_p)
        rounds = self._rounds([(0, source)], sampler, max_tokens, seed, speculative, 1)
        ((_, done),) = as_generations(
            with_bar(rounds, max_tokens) if progress else rounds, self.tokenizer
        )
        if probabilities:
            odds = pair_probabilities(
                self.model, self.draft, source, done.tokens, sampler, self._draft_vocab
            )
            done = replace(done, probabilities=odds)
        return done

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int = 16,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        speculative: bool = True,
    ) -> list[Generation]:
        """Generate the outputs for many prompts, in the prompts' order.

        Args and errors are those of `iter_batch`; all prompts are checked before the first is
        decoded. At the same seed the first output is that of `generate`.
        """
        check_prompts(prompts)
        sampler = Sampler(temperature, top_k, top_p)
        sources = [self.fit(prompt, max_tokens).ids for prompt in prompts]
        # Rows of like length together pad less, and those that end last are short.
        requests = in_order_of_length(enumerate(sources), max(len(sources), 1))
        rounds = self._rounds(requests, sampler, max_tokens, seed, speculative, batch_size)
        done = dict(as_generations(rounds, self.tokenizer))
        return [done[index] for index in range(len(sources))]

    def iter_batch(
        self,
        prompts: Iterable[tuple[int, Prompt]],
        *,
        batch_size: int = 16,
        by_length: bool = True,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        speculative: bool = True,
    ) -> Iterator[tuple[int, Generation]]:
        """Generate the outputs for any number of prompts: index and output of each as it ends.

        `batch_size` of them are decoded side by side, each accepting what it can; when one ends the
        next takes its place. An output depends only on its prompt, its index and the seed, not on
        its neighbours, up to rounding, if `num_draft` is a number. (With "auto" all rows share one
        length, on which sampled tokens depend; the distribution is the target's in any case.)

        Args:
            prompts: An index, at least 0, and the prompt (see `generate`) of each, as `enumerate`
                makes them.
            batch_size: Rows at a time, 1 to `MAX_BATCH`. Up to as many prompts are taken ahead.
            by_length: Take `WINDOW` batches of prompts at a time, and begin them in order of
                length: rows of like length pad less. Else they begin as they come.
            max_tokens: See `generate`, as for all that follow.
            temperature: 0 is greedy.
            top_k: 0 is all tokens.
            top_p: 1 is all tokens.
            seed: For sampling, together with the prompt's index.
            speculative: False decodes with the target alone.

        Raises:
            ValueError: If an option is out of its range, or a prompt is empty, too long or not a
                prompt.
        """
        check_prompts(prompts)
        sampler = Sampler(temperature, top_k, top_p)
        requests: Iterator[Request] = (
            (check_integer("a prompt's index", index, 0), self.fit(prompt, max_tokens).ids)
            for index, prompt in map(_as_pair, prompts)
        )
        if by_length and check_integer("batch_size", batch_size, 1, MAX_BATCH) > 1:
            requests = in_order_of_length(requests, WINDOW * batch_size)
        rounds = self._rounds(requests, sampler, max_tokens, seed, speculative, batch_size)
        return as_generations(rounds, self.tokenizer)

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted, by a model or by lookups."""
        return self.draft is not None or self._lookup

    @property
    def prefix(self) -> str:
        """What is put before each prompt that is text and does not begin with it."""
        return self._prompts.prefix

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt, EOS included where the model is a T5; however many they are.

        Raises:
            ValueError: If it is empty or not a prompt, or text and there is no tokenizer, or a chat
                and there is no template for it, or an id is out of range.
        """
        return self._prompts.encode(prompt)

    def fit(self, prompt: Prompt, max_tokens: int = 256) -> Source:
        """A prompt as the model reads it when at most `max_tokens` are generated: cut if it may be.

        Raises:
            ValueError: See `encode`; and if it is too long and `truncate` is not set.
        """
        return self._prompts.fit(prompt, max_tokens)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        speculative: bool = True,
    ) -> Iterator[Chunk]:
        """Generate one output, a chunk for each pass of the target; as `generate` otherwise."""
        source = self.fit(prompt, max_tokens).ids
        sampler = Sampler(temperature, top_k, top_p)
        rounds = self._rounds([(0, source)], sampler, max_tokens, seed, speculative, 1)
        return as_chunks(rounds, self.tokenizer)

    def _rounds(
        self,
        requests: Iterable[Request],
        sampler: Sampler,
        max_tokens: int,
        seed: int,
        speculative: bool,
        batch_size: int,
    ) -> Iterator[Round]:
        """All rounds; options are checked at the call, not at the first of them."""
        check_integer("batch_size", batch_size, 1, MAX_BATCH)
        requests = iter(requests)
        first = list(islice(requests, batch_size)) if self._num_draft == "auto" else []
        plan = self.plan(first, sampler, max_tokens, seed, speculative)
        return decode(self.model, chain(first, requests), plan, batch_size=batch_size)

    def plan(
        self,
        first: Sequence[Request],
        sampler: Sampler,
        max_tokens: int,
        seed: int = 0,
        speculative: bool = True,
    ) -> Plan:
        """How `engine.decode` is to go about it.

        Args:
            first: Requests to measure on, where num_draft is "auto"; not used otherwise.
            sampler: See `generate`, as for all that follow.
            max_tokens: At least 1.
            seed: 0 to 2**63 - 1.
            speculative: False is for the target alone.

        Raises:
            ValueError: If an option is out of its range.
        """
        check_integer("seed", seed, 0, 2**63 - 1)
        check_integer("max_tokens", max_tokens, 1)
        verifier = Verifier(sampler, self._delta, self._verify_in_blocks)
        drafter = self._drafter(sampler) if speculative else None
        schedule: Schedule = FixedSchedule(0)
        if drafter is None:
            drafter = EmptyDrafter()
        elif self._num_draft != "auto":
            schedule = FixedSchedule(self._num_draft)
        elif first:
            schedule = self._adaptive(first, drafter, verifier)
        return Plan(
            drafter, schedule, verifier, max_tokens, seed if sampler.temperature else None,
            # T5's passes are compiled, and leave the host little to do meanwhile.
            ahead=isinstance(drafter, EmptyDrafter) and self.model.is_decoder_only,
        )  # fmt: skip

    def _adaptive(
        self, requests: Sequence[Request], drafter: Drafter, verifier: Verifier
    ) -> AdaptiveSchedule:
        """A schedule calibrated for these models and options, if need be on these prompts.

        Where outputs do not depend on draft lengths (greedy and exact), the schedule goes on
        learning from one generation to the next. Elsewhere each generation begins anew, or the same
        seed and options would not give the same tokens twice.
        """
        device.enter_thread()  # before the lock, which a fork may leave locked
        sampler, batch = verifier.sampler, 1 << (len(requests) - 1).bit_length()
        sampling = (float(sampler.temperature), sampler.top_k, float(sampler.top_p))
        rule = (verifier.block, float(verifier.delta))
        settings = (*sampling, *rule, self._lookup, *self._ngrams, self._draft_vocab, batch)

        def rehearse(schedule: Schedule, seed: int) -> Iterator[Round]:
            sampling_seed = seed if sampler.temperature else None
            plan = Plan(
                Padded(drafter), schedule, verifier, REHEARSAL_TOKENS, sampling_seed, timed=True
            )
            return decode(self.model, requests, plan, batch_size=len(requests))

        with self._calibrating:  # other threads wait, and would disturb what is measured
            if settings not in self._schedules:
                models = [m.fingerprint if m else None for m in (self.model, self.draft)]
                found = calibrate(rehearse, len(requests), *models, *settings)
                self._schedules[settings] = AdaptiveSchedule(found)
            schedule = self._schedules[settings]
        free = sampler.temperature == 0 and verifier.delta == 0
        return schedule if free else schedule.fresh()

    def _drafter(self, sampler: Sampler) -> Drafter | None:
        target, (min_ngram, max_ngram) = self.model, self._ngrams
        model = None
        if self.draft:
            model = ModelDrafter(self.draft, sampler, target.vocab_size, self._draft_vocab)
        if not self._lookup:
            return model
        lookup = LookupDrafter(
            target.eos_token_ids,
            target.special_tokens,
            min_ngram=min_ngram,
            max_ngram=max_ngram,
            is_decoder_only=target.is_decoder_only,
        )
        return CombinedDrafter(model, lookup, target.eos_token_ids) if model else lookup


def _as_pair(item: object) -> tuple[int, Prompt]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ValueError(
            "each of prompts must be an index with its prompt, as enumerate makes them, got "
            f"{type(item).__name__}"
        )
    index, prompt = item
    return index, prompt


def check_pair(model: LanguageModel, draft: LanguageModel) -> None:
    """Refuse a target and a draft whose tokens do not mean the same."""
    if model.is_decoder_only != draft.is_decoder_only:
        kinds = {True: "decoder-only", False: "an encoder-decoder"}
        raise ValueError(
            f"the target is {kinds[model.is_decoder_only]}, the draft is "
            f"{kinds[draft.is_decoder_only]}: choose another draft, or 'lookup'"
        )
    ours, theirs = model.vocabulary, draft.vocabulary
    if ours and theirs and ours != theirs:
        raise ValueError(
            "target and draft must share a tokenizer: "
            f"the target's has {ours}, the draft's has {theirs}; choose another draft, or 'lookup'"
        )
