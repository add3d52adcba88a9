"""The options that a decoder is made with: how it drafts, and how it reads prompts."""

from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Literal, get_args

import mlx.core as mx

from ..decoding import MAX_NGRAM, LanguageModel, Rule
from ..options import (
    OptionError,
    check_integer,
    check_options,
    described,
    option,
    option_error,
    python_option,
)
from ..tokenizers import Tokenizer

VerifyRule = Literal["auto", "coupled", "token", "block"]
NumDraft = int | Literal["auto"]

for_drafting, for_prompts = (partial(option, panel=panel) for panel in ("Drafting", "Prompts"))

NUM_DRAFT = 5  # tokens to draft where "auto" cannot choose


@described
@dataclass(frozen=True, kw_only=True)
class DraftingOptions:
    """How a decoder drafts and verifies.

    Make another decoder after changing the model's type or layers.
    """

    num_draft: NumDraft = for_drafting(
        "auto",
        "Tokens to draft for each pass of the target: a number; or auto, which learns what they "
        "cost and gain here and chooses for each pass, 0 where drafting does not pay.",
        python="Tokens to draft for each pass of the target: a number; or 'auto', which learns "
        "from the rounds so far what they cost and gain here, and keeps that for later processes. "
        "It chooses for each pass how many to draft, 0 where that does not pay, and who drafts "
        "them: a draft model, a lookup, or one after the other. It is 5 where outputs depend on "
        "the number (with a delta, or with verify 'token' or 'block'), where passes have one width "
        "(steady), and where processes that share a model must draft alike.",
    )
    lookup: bool = for_drafting(
        False,
        "After the draft model's tokens, also propose tokens copied from the prompt or the output; "
        "where --num-draft auto chooses, it does so without this option, if it pays.",
        python="After the draft model's tokens, also propose tokens copied from the prompt or the "
        "output. Where num_draft 'auto' chooses, it does so without this option, if it pays; with "
        "steady, both share num_draft tokens.",
    )
    min_ngram: int = for_drafting(
        1, "Prompt lookup: fewest last tokens of the output that must match."
    )
    max_ngram: int = for_drafting(
        8, "Prompt lookup: most last tokens to match; it prefers longer matches."
    )
    delta: float = for_drafting(
        0.0,
        "Lenience from 0 to 1; above 0 the output is no longer exactly the target's.",
        python="Lenience from 0 to 1; above 0 the output is no longer exactly the target's. At "
        "temperature 0, a drafted token is then accepted if the target gives it at least (1 - "
        "delta) times the largest probability.",
        least=0.0,
        most=1.0,
    )
    verify: VerifyRule = for_drafting(
        "auto",
        "Rule that verifies drafts when sampling: coupled (the output is that of plain decoding "
        "at the same seed), token, block, or auto: coupled if --delta is 0.",
        python="Rule that verifies drafts when sampling, exact without a delta: by 'coupled' a "
        "seed gives the tokens of plain decoding; 'token', which accepts x with probability "
        "min(1, p(x) / q(x) + delta), and 'block', which judges a draft as a whole, accept a "
        "little more. 'auto' is 'coupled', and 'token' with a delta.",
    )
    draft_vocab: int | None = for_drafting(
        None,
        "Let the draft model propose only the first N ids, which is faster.",
        python="Let the draft model propose only the first N ids, which is faster; by default "
        "those that it was trained on.",
        shown="all",
        least=1,
    )
    steady: bool = for_drafting(
        False,
        "Give all passes the same width, so that for a given --num-draft the greedy output is "
        "the same with any draft or none, in any --dtype; decodes one prompt at a time.",
        python="Give all passes the same width, so that for a given num_draft the greedy output "
        "is the same with any draft or none, in any type; decodes one prompt at a time. Passes "
        "have num_draft + 1 positions, padding included, or the next number whose rows this device "
        "computes alike, see `steady_width`.",
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


@described
@dataclass(frozen=True, kw_only=True)
class DecodingOptions(DraftingOptions):
    """How a decoder reads prompts, and how it drafts and verifies; see `DraftingOptions`.

    The prefix and the chat template are for prompts that are text: ids and chats are left alone.
    """

    chat: bool = for_prompts(False, "Apply the model's chat template to each prompt.")
    prefix: str | None = for_prompts(
        None,
        "Text to put before each prompt that lacks it, for example 'summarize: '.",
        shown="the prefix named in the model's config.json, if any",
    )
    to: str | None = for_prompts(
        None, "Language to translate to, in place of a prefix: a name or a code, such as pt-BR."
    )
    from_: str | None = for_prompts(
        None, "Language of the prompts, for a model that needs to know it."
    )
    max_source_length: int | None = for_prompts(
        None,
        "Longest prompt in tokens; a longer one is an error, unless --truncate cuts it.",
        shown="the length in the model's config.json, else 512 for a T5",
    )
    truncate: bool = for_prompts(False, "Cut prompts that are too long, at the end.")


@dataclass(frozen=True)
class MakingOptions(DecodingOptions):
    """What `SpeculativeDecoder` takes besides the target."""

    draft: LanguageModel | Literal["lookup"] | None = python_option(
        None,
        "A smaller model with the same tokenizer; 'lookup' to copy from the source and the output "
        "so far, without a model; or None to decode with the target alone.",
    )
    tokenizer: Tokenizer | None = python_option(
        None,
        "Makes ids of prompts and texts of outputs; without it prompts are ids, and texts of "
        "results are empty.",
    )


@dataclass(frozen=True)
class LoadingOptions(DecodingOptions):
    """What `SpeculativeDecoder.from_pretrained` takes besides the target."""

    draft: str | Path | EllipsisType | None = python_option(
        ...,
        "Folder or name of the draft, or 'lookup'; None decodes with the target alone. If it is "
        "left out, the draft is the one that the target's config.json names, if any, and if no "
        "adapter changes the target.",
    )
    _: KW_ONLY
    adapter: str | Path | None = python_option(None, "A LoRA adapter for the target; see `load`.")
    dtype: mx.Dtype | str | None = python_option(
        None, "The type of both models' weights and arithmetic; see `load`."
    )
    group: mx.distributed.Group | None = python_option(
        None,
        "Processes, as mx.distributed.init() returns them: the target is split among them, and "
        "each has the whole draft.",
    )
