"""Where each emitted token came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Origin = Literal["accepted", "recovered", "bonus", "regular"]

MEANINGS: dict[Origin, str] = {
    "accepted": "drafted",
    "recovered": "the target's, for a rejected draft",
    "bonus": "the target's, after a whole draft",
    "regular": "the target's, with nothing drafted",
}


@dataclass(frozen=True)
class Token:
    """One emitted token.

    Attributes:
        id: Its id.
        text: What it adds to the output's text; empty where a character is not complete yet, and
            without a tokenizer.
        origin: Where it came from, see `MEANINGS`.
        round: Its round, from 1.
        p: The target's probability of it, given all before it, after temperature, top-k and top-p;
            at temperature 0 that of temperature 1. None if it was not asked for.
        q: The draft model's, in the same way, even where a lookup proposed the token; None also
            without a draft model.
    """

    id: int
    text: str
    origin: Origin
    round: int
    p: float | None = None
    q: float | None = None


def origins_of_round(num_drafted: int, num_accepted: int, emitted: int) -> list[Origin]:
    """Where each token came from that a round emitted, EOS included.

    Example: five drafted, three accepted and the target's own after them, (5, 3, 4), are
    ["accepted", "accepted", "accepted", "recovered"]. A round that ends by an accepted EOS or at
    max_tokens, as (5, 3, 3), has no token of the target's own.
    """
    origins: list[Origin] = ["accepted"] * num_accepted
    if emitted > num_accepted:
        own: Origin = "recovered" if num_accepted < num_drafted else "bonus"
        origins.append(own if num_drafted else "regular")
    return origins
