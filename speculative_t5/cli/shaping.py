"""The options about what outputs may contain, where they stop, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from ..errors import check_utf8
from .options import in_output

in_shaping = partial(typer.Option, rich_help_panel="Shaping")


@dataclass(frozen=True)
class ShapingOptions:
    """Options that change the target's distribution, stops, several outputs and scores."""

    repetition_penalty: Annotated[
        float,
        in_shaping(help="Above 1, tokens of the output so far become less probable."),
    ] = 1.0
    no_repeat_ngram_size: Annotated[
        int, in_shaping(help="No sequence of N tokens occurs twice; 0 is off.")
    ] = 0
    min_tokens: Annotated[
        int, in_shaping(help="Let no output end before it has this many tokens.")
    ] = 0
    suppress_tokens: Annotated[
        str | None,
        in_shaping(help="Ids that never occur, separated by commas.", show_default=False),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        in_shaping(
            help="Text that never occurs as the ids that the tokenizer gives it; may be repeated.",
            show_default=False,
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        in_shaping(
            metavar="ID=BIAS",
            help="Add to the logit of an id; -inf forbids it; may be repeated.",
            show_default=False,
        ),
    ] = None
    forced_tokens: Annotated[
        str | None,
        in_shaping(
            help="Ids that every output begins with, separated by commas.", show_default=False
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        in_output(help="End the output before this text; may be repeated.", show_default=False),
    ] = None
    stop_token_ids: Annotated[
        str | None,
        in_output(help="Ids that end an output, separated by commas.", show_default=False),
    ] = None
    num_return_sequences: Annotated[
        int,
        in_output("--num-return-sequences", "-n", help="Outputs for each prompt."),
    ] = 1
    scores: Annotated[
        bool,
        in_output("--scores", help="Add the logarithm of each output's probability."),
    ] = False

    def keywords(self) -> dict[str, Any]:
        """Return keywords for `SpeculativeDecoder.generate`; refuse what cannot be parsed."""
        for name in ("bad_words", "stop"):
            for text in getattr(self, name) or []:
                check_utf8("--" + name.replace("_", "-"), text)
        return {
            "repetition_penalty": self.repetition_penalty,
            "no_repeat_ngram_size": self.no_repeat_ngram_size,
            "min_tokens": self.min_tokens,
            "suppress_tokens": _ids("suppress_tokens", self.suppress_tokens),
            "bad_words": tuple(self.bad_words or ()),
            "logit_bias": dict(map(_bias, self.logit_bias or [])),
            "forced_tokens": _ids("forced_tokens", self.forced_tokens),
            "stop": tuple(self.stop or ()),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids),
            "num_return_sequences": self.num_return_sequences,
            "scores": self.scores,
        }


def _ids(name: str, text: str | None) -> tuple[int, ...]:
    """Parse ids separated by commas."""
    try:
        return tuple(int(part) for part in (text or "").split(",") if text)
    except ValueError:
        raise ValueError(f"{name} must be ids separated by commas, got {text!r}") from None


def _bias(text: str) -> tuple[int, float]:
    """Parse an id and its bias."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ValueError(f"logit_bias must be an id and a bias, as 17=-2.5, got {text!r}") from None
