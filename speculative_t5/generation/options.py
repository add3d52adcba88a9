"""Options as values: checked where they are made, and passed on whole.

An option of a call is a field of a dataclass here, and nothing else: methods take the fields as
keywords, see `options.takes`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal, get_args

import mlx.core as mx

from ..decoding import (
    MAX_NGRAM,
    BeamOptions,
    Constraints,
    EarlyStopping,
    LanguageModel,
    LogitsProcessor,
    LogitsTransform,
    Rule,
    Sampler,
)
from ..errors import check_utf8
from ..options import OptionError, check_integer, check_options, described, option, option_error
from ..tokenizers import Detokenizer, Tokenizer
from .outputs import StoppedText

VerifyRule = Literal["auto", "coupled", "token", "block"]
NumDraft = int | Literal["auto"]
Words = Sequence[str | Sequence[int]]

in_sampling, in_output, in_constraints, in_beam_search, in_drafting, in_prompts = (
    partial(option, panel=panel)
    for panel in ("Sampling", "Output", "Constraints", "Beam search", "Drafting", "Prompts")
)

BATCH, MAX_BATCH = 16, 2**16  # prompts side by side
NUM_DRAFT = 5  # tokens to draft where "auto" cannot choose
# Options that are lists, and what they may be given as.
ITEMS = {
    "suppress_tokens": "a list of ids",
    "begin_suppress_tokens": "a list of ids",
    "stop_token_ids": "a list of ids",
    "stop": "text or a list of texts",
    "bad_words": "text or a list of texts and of lists of ids",
    "logits_processors": "a list of functions",
}


@described
@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The options of a call, each in its range.

    `speculative=False` decodes with the target alone, and `max_new_tokens` is another name for
    `max_tokens`. `repetition_penalty` divides positive logits of the tokens in the output (of a
    decoder-only model also in the prompt), and multiplies negative ones. `bad_words` are ids, or
    text: the ids that the tokenizer gives it at the beginning of a text and after a space.
    `logits_processors` are functions of (tokens so far (T,) int32, logits (1, V) float32) that
    return logits (1, V), as mlx-lm's; they are called for each drafted token, too, and must depend
    on their arguments alone. `stop` is a text or several, which are not part of the output. Output
    j of prompt i samples as prompt `num_return_sequences` * i + j would. `scores` take one more
    pass over the output. A checkpoint may have its own `suppress_tokens`, `begin_suppress_tokens`,
    `forced_tokens` (its forced_bos_token_id) and `decoder_start_token_id`, for calls that give
    none. For a beam search see `BeamOptions`.
    """

    max_tokens: int = in_output(
        256, "Upper bound on the tokens of an output, EOS included.", least=1
    )
    temperature: float = in_sampling(0.0, "0 decodes greedily; above 0, tokens are sampled.")
    top_k: int = in_sampling(
        0,
        "Sample from the K most probable tokens, and any as probable as the last of them; 0 for "
        "all.",
        least=0,
    )
    top_p: float = in_sampling(
        1.0,
        "Of those, sample from the most probable tokens that together have probability P, and any "
        "as probable as the last of them; 1 for all.",
    )
    seed: int = in_sampling(
        0, "Seed for sampling; the same seed gives the same output.", least=0, most=2**63 - 1
    )
    speculative: bool = True
    max_new_tokens: int | None = None
    repetition_penalty: float = in_constraints(
        1.0,
        "Above 1, tokens that the output already has become less probable.",
        least=1e-4,
        most=1e4,
    )
    no_repeat_ngram_size: int = in_constraints(
        0, "Let no sequence of N tokens occur twice; 0 is off.", least=0, most=32
    )
    min_tokens: int = in_constraints(
        0, "Let no output end before it has this many tokens.", least=0
    )
    suppress_tokens: Sequence[int] = in_constraints(
        (), "Ids that no output may contain, separated by commas."
    )
    begin_suppress_tokens: Sequence[int] = in_constraints(
        (), "Ids that no output may begin with, separated by commas."
    )
    bad_words: Words = in_constraints(
        (),
        "Text that no output may contain, as the ids that the tokenizer gives it; may be repeated.",
    )
    logit_bias: Mapping[int, float] | None = in_constraints(
        None, "Bias to add to the logit of an id; -inf forbids it; may be repeated."
    )
    forced_tokens: str | Sequence[int] = in_constraints(
        (), "Ids that every output begins with, separated by commas."
    )
    decoder_start_token_id: int | None = in_constraints(
        None,
        "Id that the decoder reads before the output, as some models are told a language by it.",
        shown="the checkpoint's own",
        least=0,
    )
    logits_processors: Sequence[LogitsProcessor] = ()
    stop: str | Sequence[str] = in_output((), "End the output before this text; may be repeated.")
    stop_token_ids: Sequence[int] = in_output((), "Ids that end an output, separated by commas.")
    num_return_sequences: int = in_output(
        1, "Outputs for each prompt; greedy decoding has only one.", least=1
    )
    scores: bool = in_output(False, "Also give the logarithm of each output's probability.")
    num_beams: int = in_beam_search(
        1, "Width of a beam search, which uses no draft; 1 is no search.", least=1
    )
    length_penalty: float = in_beam_search(
        1.0, "Above 0 a search prefers long outputs, below 0 short ones.", least=-20.0, most=20.0
    )
    early_stopping: EarlyStopping = in_beam_search(
        False,
        "When to end a search that has as many outputs as beams: on (at once), off (when a "
        "better one is unlikely) or never (when none can be better).",
    )

    def __post_init__(self) -> None:
        _ = self.sampler  # which checks its own options
        check_options(self)
        if self.max_new_tokens is not None:
            check_integer("max_new_tokens", self.max_new_tokens, 1)
            if self.max_tokens not in (GenerationOptions.max_tokens, self.max_new_tokens):
                raise OptionError(
                    "{max_tokens} is {} and {max_new_tokens}, another name for it, is {}: give one "
                    "of them",
                    self.max_tokens,
                    self.max_new_tokens,
                )
            vars(self).update(max_tokens=self.max_new_tokens, max_new_tokens=None)
        values = {name: as_items(name, getattr(self, name)) for name in ITEMS}
        values["bad_words"] = tuple(
            word if isinstance(word, str) else as_items("each of {bad_words}", word)
            for word in values["bad_words"]
        )
        if not isinstance(self.forced_tokens, str):
            values["forced_tokens"] = as_items("forced_tokens", self.forced_tokens)
        vars(self).update(values)
        bias = self.logit_bias
        if not (bias is None or isinstance(bias, Mapping)):
            raise option_error("logit_bias", "a dict of ids and biases", bias)
        for token in self.stop_token_ids:
            check_integer("an id of {stop_token_ids}", token, 0)
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise ValueError(f"a stop string must be text that is not empty, got {string!r}")
            check_utf8("a stop string", string)
        self.transform(lambda name, text: ())  # which checks what it can without a tokenizer
        count = self.num_return_sequences
        if self.num_beams != 1:
            self._check_beams()
        elif count > 1 and self.temperature == 0:
            raise OptionError(
                "{num_return_sequences} is {}, and greedy decoding has only one output: give a "
                "{temperature} above 0, or {num_beams}",
                count,
            )

    def _check_beams(self) -> None:
        """Refuse what a beam search does not go with."""
        _ = self.beams  # which checks its own options
        if self.temperature != 0:
            raise OptionError(
                "{num_beams} is {} and {temperature} is {}, and a beam search does not sample: "
                "leave out one of the two",
                self.num_beams,
                self.temperature,
            )
        if self.stop:
            raise OptionError(
                "{num_beams} is {}, and a beam search has no stop strings: leave out {num_beams} "
                "or {stop}",
                self.num_beams,
            )

    @cached_property
    def sampler(self) -> Sampler:
        """Temperature, top-k and top-p; without the options that change logits."""
        return Sampler(self.temperature, self.top_k, self.top_p)

    @cached_property
    def beams(self) -> BeamOptions | None:
        """The options of a beam search; None for greedy decoding and sampling."""
        if self.num_beams == 1:
            return None
        return BeamOptions(
            self.num_beams, self.length_penalty, self.early_stopping, self.num_return_sequences
        )

    def detokenizer(self, tokenizer: Tokenizer | None) -> Detokenizer | None:
        """Return what makes text of one output's ids, up to a stop string; None without any."""
        return StoppedText(tokenizer, self.stop, self.min_tokens) if tokenizer else None

    @property
    def of_finished(self) -> list[str]:
        """The options that are set and that only finished outputs can have."""
        given = {
            "num_return_sequences": self.num_return_sequences > 1,
            "num_beams": self.num_beams != 1,
            "scores": self.scores,
        }
        return [name for name, is_set in given.items() if is_set]

    def check_stream(self, *, several: bool = False) -> None:
        """Refuse what only finished outputs can have; `several` outputs at a time may be fine."""
        for name in self.of_finished:
            if not (several and name == "num_return_sequences"):
                raise OptionError(
                    f"{{{name}}} is {{}}, which needs finished outputs, and here tokens are sent "
                    "as they are chosen: leave it out, or use generate",
                    getattr(self, name),
                )

    def transform(
        self,
        encode: Callable[[str, str], Sequence[Sequence[int]]],
        end_ids: Iterable[int] = (),
        own: Constraints | None = None,
    ) -> LogitsTransform | None:
        """Return the change of logits; None if there is none.

        `encode` takes an option's name and a text, and returns the ways that ids spell it. A bad
        word that is one of `end_ids` is ignored, as by transformers: an output may be empty. `own`
        are the checkpoint's constraints, for options that are empty.
        """
        own = own or Constraints()
        ends = frozenset(end_ids)
        words: list[tuple[int, ...]] = []
        for word in self.bad_words:
            ways = encode("bad_words", word) if isinstance(word, str) else [word]
            words += [tuple(way) for way in ways if not (len(way) == 1 and ends.issuperset(way))]
        forced = self.forced_tokens
        if isinstance(forced, str):
            forced = next(iter(encode("forced_tokens", forced)), ()) if forced else ()
        made = LogitsTransform(
            logit_bias=tuple((self.logit_bias or {}).items()),
            repetition_penalty=self.repetition_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            bad_words=tuple(dict.fromkeys(words)),
            min_tokens=self.min_tokens,
            end_ids=tuple(sorted(ends)),
            suppress_tokens=tuple(self.suppress_tokens) or own.suppress_tokens,
            begin_suppress_tokens=tuple(self.begin_suppress_tokens) or own.begin_suppress_tokens,
            forced_tokens=tuple(forced) or own.forced_tokens,
            processors=tuple(self.logits_processors),
        )
        return made or None


@dataclass(frozen=True, kw_only=True)
class SingleOptions(GenerationOptions):
    """The options of `generate`, which has one prompt."""

    # Adds each token's probabilities, see `Token`, by one more pass of each model over the output.
    probabilities: bool = False


@dataclass(frozen=True, kw_only=True)
class BatchOptions(GenerationOptions):
    """The options of `generate_batch` and `iter_batch`."""

    # Prompts to decode side by side, from 1 to 65,536; None is 16, or 1 if the decoder is steady.
    batch_size: int | None = None
    by_length: bool = True  # begins them in order of length: similar rows pad less


@described
@dataclass(frozen=True, kw_only=True)
class DraftingOptions:
    """How a decoder drafts and verifies.

    With num_draft "auto", the length and who drafts, a draft model or a lookup or one after the
    other, follow the costs and acceptance of the rounds so far, which are kept for later processes.
    The length is 5 where outputs depend on it (with a delta, or with verify
    "token" or "block"), where passes have one width (steady), and where processes that share a
    model must draft alike. At temperature 0, a drafted x is accepted if the target gives it at
    least (1 - delta) times the largest probability. Three rules verify sampled tokens, all of them
    exact without a delta: by "coupled" a seed gives the tokens of plain decoding; "token", which
    accepts x with probability min(1, p(x) / q(x) + delta), and "block", which judges a draft as a
    whole, accept a little more. "auto" is "coupled", and "token" with a delta. By default,
    `draft_vocab` has the ids that the draft was trained on.

    Steady passes have `num_draft` + 1 positions, padding included, or the next number whose rows
    this device computes alike, see `steady_width`. A lookup beside a draft model shares its
    `num_draft` tokens then. Make another decoder after changing the model's type or layers.
    """

    num_draft: NumDraft = in_drafting(
        "auto",
        "Tokens to draft for each pass of the target: a number; or auto, which learns what they "
        "cost and gain here and chooses for each pass, 0 where drafting does not pay.",
    )
    lookup: bool = in_drafting(
        False,
        "After the draft model's tokens, also propose tokens copied from the prompt or the output; "
        "with --num-draft auto, this is done where it pays.",
    )
    min_ngram: int = in_drafting(
        1, "Prompt lookup: fewest last tokens of the output that must match."
    )
    max_ngram: int = in_drafting(
        8, "Prompt lookup: most last tokens to match; it prefers longer matches."
    )
    delta: float = in_drafting(
        0.0,
        "Lenience from 0 to 1; above 0 the output is no longer exactly the target's.",
        least=0.0,
        most=1.0,
    )
    verify: VerifyRule = in_drafting(
        "auto",
        "Rule that verifies drafts when sampling: coupled (the output is that of plain decoding "
        "at the same seed), token, block, or auto: coupled if --delta is 0.",
    )
    draft_vocab: int | None = in_drafting(
        None,
        "Let the draft model propose only the first N ids, which is faster.",
        shown="all",
        least=1,
    )
    steady: bool = in_drafting(
        False,
        "Give all passes the same width, so that for a given --num-draft the greedy output is "
        "the same with any draft or none, in any --dtype; decodes one prompt at a time.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.verify not in get_args(VerifyRule):
            *rules, last = map(repr, get_args(VerifyRule))
            raise option_error("verify", f"{', '.join(rules)} or {last}", self.verify)
        if self.verify in ("coupled", "block") and self.delta > 0:
            raise OptionError(
                "{verify} {!r} is exact and takes no {delta} above 0, got {}: use {verify} {!r} or "
                "{delta} 0",
                self.verify,
                self.delta,
                "token",
            )
        check_integer("min_ngram", self.min_ngram, 1, MAX_NGRAM)
        check_integer("max_ngram", self.max_ngram, self.min_ngram, MAX_NGRAM)
        number = self.num_draft
        if number != "auto" and (not isinstance(number, int) or number < 1):
            raise option_error("num_draft", "an integer of at least 1 or 'auto'", number)
        if self.steady and self.delta > 0:
            raise OptionError(
                "{steady} outputs are the same for any draft, and {delta} {} lets them depend on "
                "it: leave out one of the two",
                self.delta,
            )

    @property
    def adapts(self) -> bool:
        """Whether the number of drafted tokens changes from pass to pass."""
        return self.num_draft == "auto" and self.rule == "coupled" and not self.steady

    @property
    def fixed(self) -> int:
        """The number of tokens to draft where it does not change."""
        return NUM_DRAFT if self.num_draft == "auto" else self.num_draft

    @property
    def rule(self) -> Rule:
        """The rule that verifies drafts when sampling."""
        if self.verify == "auto":
            return "token" if self.delta else "coupled"
        return self.verify

    def rows(self, batch_size: int | None) -> int:
        """Return how many prompts to decode side by side, given the number asked for."""
        if batch_size is None:
            return 1 if self.steady else BATCH
        if check_integer("batch_size", batch_size, 1, MAX_BATCH) > 1 and self.steady:
            raise OptionError(
                "{steady} decodes one prompt at a time, got {batch_size} {}: leave out one of the "
                "two",
                batch_size,
            )
        return batch_size


@described
@dataclass(frozen=True, kw_only=True)
class DecodingOptions(DraftingOptions):
    """How a decoder reads prompts, and how it drafts and verifies; see `DraftingOptions`.

    The prefix and the chat template are for prompts that are text: ids and chats are left alone.
    """

    chat: bool = in_prompts(False, "Apply the model's chat template to each prompt.")
    prefix: str | None = in_prompts(
        None,
        "Text to put before each prompt that lacks it, for example 'summarize: '.",
        shown="the prefix named in the model's config.json, if any",
    )
    to: str | None = in_prompts(
        None, "Language to translate to, in place of a prefix: a name or a code, such as pt-BR."
    )
    from_: str | None = in_prompts(
        None, "Language of the prompts, for a model that needs to know it."
    )
    max_source_length: int | None = in_prompts(
        None,
        "Longest prompt in tokens; a longer one is an error, unless --truncate cuts it.",
        shown="the length in the model's config.json, else 512 for a T5",
    )
    truncate: bool = in_prompts(False, "Cut prompts that are too long, at the end.")


@dataclass(frozen=True)
class MakingOptions(DecodingOptions):
    """What `SpeculativeDecoder` takes besides the target."""

    draft: LanguageModel | Literal["lookup"] | None = None
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True)
class LoadingOptions(DecodingOptions):
    """What `SpeculativeDecoder.from_pretrained` takes besides the target."""

    draft: str | Path | EllipsisType | None = ...
    _: KW_ONLY
    adapter: str | Path | None = None
    dtype: mx.Dtype | str | None = None
    group: mx.distributed.Group | None = None


def as_items(name: str, value: object) -> tuple[Any, ...]:
    """Return an option's items, of which a text is one; refuse what has none."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        expected = ITEMS.get(name, "text or a list of ids")
        raise option_error(name, expected, value)
    return tuple(value)
