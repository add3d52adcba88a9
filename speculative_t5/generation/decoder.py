"""`SpeculativeDecoder`: the class that users call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import EllipsisType
from typing import Literal, Unpack

import mlx.core as mx

from .. import __version__
from ..checkpoints import as_dtype, digest_of, dtype_name, load, locate, named_draft
from ..decoding import (
    WINDOW,
    LanguageModel,
    Request,
    in_order_of_length,
    pair_probabilities,
)
from ..device import default_dtype
from ..errors import check_integer
from ..processes import check_same
from ..tokenizers import Prompt, PromptEncoder, Source, Tokenizer, check_prompts
from .drafting import pair_up
from .engine import Engine
from .keywords import (
    DecoderKeywords,
    GenerationKeywords,
    MoreKeywords,
    split_keywords,
    with_hints,
)
from .options import DraftingOptions, GenerationOptions, NumDraft, VerifyRule, as_pair
from .outputs import Chunk, Generation, as_chunks, with_bar
from .rewriting import rewrite


class SpeculativeDecoder(Engine):
    """Generates with a target that verifies what a draft proposes.

    The output is distributed exactly as the target's own unless `delta` is above 0; at temperature
    0 it is the target's greedy output. This holds up to rounding: a pass over several tokens and
    one over a single token may round differently, which shows in near-ties: in 16-bit types, on
    GPUs, and in float32 where the C parts are not used. `steady` prevents it.

    Args:
        model: The target.
        draft: A smaller model with the same tokenizer; "lookup" to copy from the source and the
            output so far, without a model; or None to decode with the target alone.
        tokenizer: Needed for prompts and outputs as text. With None, prompts are ids and the texts
            of results are empty.
        num_draft: Tokens to draft for each pass of the target, at least 1; or "auto" to choose the
            number round by round, from the costs of drafting and verifying on this machine and from
            the acceptance so far. The costs are measured once, on the first prompt.
        delta: Lenience in [0, 1]. When sampling, a drafted x is accepted with probability
            min(1, p(x) / q(x) + delta); at temperature 0, if the target gives it at least
            (1 - delta) times the largest probability.
        verify: "token" judges drafted tokens one by one, "block" the draft as a whole, which
            accepts more of it and is exact as well; "auto" is "block" unless delta is above 0. At
            temperature 0 the two are the same.
        lookup: Use prompt lookup (n-gram) beside a draft model: up to `num_draft` tokens after the
            model's own.
        min_ngram: The fewest last tokens of the output that a lookup must find again, at least 1.
        max_ngram: The longest match that a lookup prefers to a shorter one.
        draft_vocab: Let the draft model propose only the first ids, so that its output head costs
            less; None for all, or for those that it was trained to propose. Tokenizers that put
            frequent pieces first lose little acceptance, and the output stays the target's own.
        steady: Give every pass of the target the same width: `num_draft` + 1 positions, padding
            included, or the next number whose rows this device computes alike, which the first
            generation finds out. A token's probabilities then have the same bits whatever was
            drafted before it, in any dtype: at one `num_draft`, the greedy output is the same with
            any draft and with none. Prompts are decoded one at a time, and `lookup` beside a draft
            model shares its `num_draft` tokens. `num_draft` must be a number, and `delta` 0. Make
            another decoder after changing the model's type or layers.
        chat: Treat prompts that are text as a user's message, and apply the chat template of the
            model's tokenizer.
        prefix: Put before each prompt that is text and does not begin with it; "" for none, None
            for the `prefix` of the model's config.json. Ids and chats are left alone.
        max_source_length: The longest prompt in tokens; None for the length that the model is made
            for. A longer prompt is an error. A T5 can read more than it was made for, a
            decoder-only model cannot.
        truncate: Cut longer prompts instead: a T5's at the end, a decoder-only model's at the
            beginning, to leave room for `max_tokens`.

    Raises:
        ValueError: If an option is out of its range or the models' tokenizers differ.
    """

    @with_hints(DecoderKeywords)
    def __init__(
        self,
        model: LanguageModel,
        draft: LanguageModel | Literal["lookup"] | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        num_draft: NumDraft = 5,
        delta: float = 0.0,
        verify: VerifyRule = "auto",
        **options: Unpack[DecoderKeywords],
    ) -> None:
        drafting, prompts = split_keywords(options)
        chosen = DraftingOptions(num_draft, delta, verify, **drafting)
        super().__init__(model, *pair_up(model, draft, chosen), tokenizer)
        self._prompts = PromptEncoder(model, tokenizer, **prompts)

    @classmethod
    @with_hints(DecoderKeywords)
    def from_pretrained(
        cls,
        model: str | Path,
        draft: str | Path | EllipsisType | None = ...,
        *,
        num_draft: NumDraft = 5,
        delta: float = 0.0,
        verify: VerifyRule = "auto",
        dtype: mx.Dtype | str | None = None,
        group: mx.distributed.Group | None = None,
        **options: Unpack[DecoderKeywords],
    ) -> SpeculativeDecoder:
        """Load target and draft from folders, or by names that `load` looks up.

        Without `draft`, it is the one that the target's config.json names, if any, as for the
        commands; None decodes with the target alone. The draft "lookup" needs no model. `dtype` is
        passed to `load` for both models; all other options are the constructor's. With a `group` of
        processes (`mx.distributed.init()`), the target is split among them, and each has the whole
        draft; all must then make the same calls. What they would do is compared before the models
        are loaded.

        Raises:
            StartError: In all processes, if their versions, weights or options differ.
        """
        if implied := draft is ...:
            draft = named_draft(locate(model))
        if group is not None:
            chosen = {"num_draft": num_draft, "delta": delta, "verify": verify} | options
            check_same(group, process_facts(model, draft, dtype=dtype, **chosen))
        target, tokenizer = load(model, dtype=dtype, group=group)
        small: LanguageModel | Literal["lookup"] | None = None
        if draft == "lookup":
            small = "lookup"
        elif draft is not None:
            small, _ = load(draft, dtype=dtype, target=target)
        made = cls(
            target, small, tokenizer, num_draft=num_draft, delta=delta, verify=verify, **options
        )
        made._draft_is_implied = implied
        return made

    @with_hints(MoreKeywords)
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
        **more: Unpack[MoreKeywords],
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
                num_draft "auto" this holds as long as the stored calibration is kept.
            speculative: False decodes with the target alone.
            probabilities: Add each token's probability by the target and by the draft model, see
                `Token`. This takes one more pass over the output by each of them.
            progress: Show a bar on standard error, for one output.
            more: See `MoreKeywords`: penalties, forbidden and forced tokens, stops, several
                outputs, scores. The output is distributed as the target's own with these options.

        Raises:
            ValueError: If the prompt is empty, too long or not a prompt, or an option is out of its
                range.
            TypeError: If there is no such option.
        """
        options = GenerationOptions(
            max_tokens, temperature, top_k, top_p, seed, speculative, **more
        )
        source = self.fit(prompt, options.max_tokens).ids
        if progress and (options.beams or options.num_return_sequences > 1):
            raise ValueError("a bar shows the progress of one output: leave out progress")
        bar = partial(with_bar, max_tokens=options.max_tokens) if progress else None
        rows = min(options.num_return_sequences, self._drafting.rows(None))
        ((_, done),) = self.generations([(0, source)], options, rows, bar)
        if not probabilities:
            return done
        sampler = self.shaping(options).sampler

        def explained(done: Generation) -> Generation:
            vocab, tokens = self._drafting.draft_vocab, done.tokens
            found = pair_probabilities(self.model, self.draft, source, tokens, sampler, vocab)
            return replace(done, probabilities=found)

        others = tuple(map(explained, done.alternatives))
        return replace(explained(done), alternatives=others)

    @with_hints(GenerationKeywords)
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> list[Generation]:
        """Generate the outputs for many prompts, in the prompts' order.

        Options and errors are those of `generate`; all prompts are checked before the first is
        decoded. At the same seed the first output is that of `generate`.
        """
        check_prompts(prompts)
        batch_size = self._drafting.rows(batch_size)
        chosen = GenerationOptions(**options)
        sources = [self._fit(i, each, chosen.max_tokens) for i, each in enumerate(prompts)]
        # Rows of similar length pad less, and those that end last are short.
        requests = in_order_of_length(enumerate(sources), max(len(sources), 1))
        done = dict(self.generations(requests, chosen, batch_size))
        return [done[index] for index in range(len(sources))]

    @with_hints(GenerationKeywords)
    def iter_batch(
        self,
        prompts: Iterable[tuple[int, Prompt]],
        *,
        batch_size: int | None = None,
        by_length: bool = True,
        **options: Unpack[GenerationKeywords],
    ) -> Iterator[tuple[int, Generation]]:
        """Generate the outputs for any number of prompts; yield index and output as each ends.

        `batch_size` prompts are decoded side by side, each with its own acceptance; when one ends,
        the next takes its row. If `num_draft` is a number, an output depends only on its prompt,
        its index and the seed, up to rounding, and not on its neighbours. (With "auto" all rows
        share one draft length, on which sampled tokens depend; they follow the target's
        distribution all the same.)

        `prompts` are pairs of an index, at least 0, and a prompt, as `enumerate` makes them.
        `batch_size` is from 1 to 65,536; by default 16, or 1 if the decoder is steady. As many
        prompts are taken ahead. `by_length` takes `WINDOW` batches of prompts at a time and begins
        them in order of length, since rows of similar length pad less; without it they begin as
        they come. The other options, and the errors, are those of `generate`, except its last two.
        """
        check_prompts(prompts)
        batch_size = self._drafting.rows(batch_size)
        chosen = GenerationOptions(**options)
        requests: Iterator[Request] = (
            (
                check_integer("a prompt's index", index, 0),
                self._fit(index, prompt, chosen.max_tokens),
            )
            for index, prompt in map(as_pair, prompts)
        )
        if by_length and batch_size > 1:
            requests = in_order_of_length(requests, WINDOW * batch_size)
        return self.generations(requests, chosen, batch_size)

    @with_hints(GenerationKeywords)
    def stream(
        self,
        prompt: Prompt,
        **options: Unpack[GenerationKeywords],
    ) -> Iterator[Chunk]:
        """Generate one output, a chunk for each pass of the target; otherwise as `generate`.

        What needs finished outputs is refused here: `num_return_sequences`, `scores`, `num_beams`.
        """
        chosen = GenerationOptions(**options)
        chosen.check_stream()
        source = self.fit(prompt, chosen.max_tokens).ids
        shaping = self.shaping(chosen)
        rounds = self.rounds([(0, source)], chosen)
        return as_chunks(rounds, self.tokenizer, shaping.filter)

    rewrite = rewrite  # texts of any length, piece by piece

    @property
    def draft_vocab(self) -> int | None:
        """The draft model proposes only ids below this; None for all."""
        return self._drafting.draft_vocab

    @property
    def prefix(self) -> str:
        """The prefix of each prompt that is text and does not begin with it."""
        return self._prompts.prefix

    @property
    def min_probability(self) -> float:
        """The default of `rewrite`: the `min_probability` of the model's config.json, or else 0."""
        return float(getattr(self.model, "min_probability", 0))

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt of any length, EOS included where the model is a T5.

        Raises:
            ValueError: If the prompt is empty or not a prompt, if it is text and there is no
                tokenizer or a chat and there is no template, or if an id is out of range.
        """
        return self._prompts.encode(prompt)

    def fit(self, prompt: Prompt, max_tokens: int = 256) -> Source:
        """Encode a prompt for an output of `max_tokens`; cut it if it is too long and may be cut.

        Raises:
            ValueError: See `encode`; and if the prompt is too long and `truncate` is not set.
        """
        return self._prompts.fit(prompt, max_tokens)

    def _fit(self, index: int, prompt: Prompt, max_tokens: int) -> list[int]:
        """Return the ids of one of many prompts; errors name its index."""
        try:
            return self.fit(prompt, max_tokens).ids
        except ValueError as error:
            error.args = (f"at index {index}, {error}",)
            raise


def process_facts(
    model: str | Path,
    draft: str | Path | None,
    *,
    dtype: mx.Dtype | str | None = None,
    **options: object,
) -> dict[str, str]:
    """Return the facts that must be the same in all processes, see `check_same`."""
    facts = {"the version of speculative_t5": __version__, "the version of MLX": version("mlx")}
    facts["the type to compute in"] = dtype_name(as_dtype(dtype) or default_dtype())
    for role, name in (("the target", model), ("the draft", draft)):
        if name is None or name == "lookup":
            facts[role] = name or "none"
        else:
            facts[role] = f"weights {digest_of(locate(name))}"
    return facts | {name: repr(value) for name, value in options.items()}
