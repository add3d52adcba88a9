"""The tokens of an output, each with where it came from."""

from dataclasses import dataclass

from ..decoding import Origin

ORIGIN_MEANINGS: dict[Origin, str] = {
    "accepted": "drafted",
    "recovered": "the target's, for a rejected draft",
    "bonus": "the target's, after a whole draft",
    "regular": "the target's, with nothing drafted",
}


@dataclass(frozen=True)
class Token:
    """One emitted token.

    Its probabilities are those after all tokens before it, after temperature, top-k and top-p; at
    temperature 0, those at temperature 1. They are None unless `probabilities` was set, and q also
    without a draft model; q is the draft model's even where a lookup proposed the token.
    """

    id: int
    text: str  # that it adds to the output; empty where a character is not complete yet
    origin: Origin  # see `ORIGIN_MEANINGS`
    round: int  # from 1
    p: float | None = None  # by the target
    q: float | None = None  # by the draft model
