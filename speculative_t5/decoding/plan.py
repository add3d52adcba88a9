"""How to decode: a plan, and requests with or without options of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from .drafters import Drafter
from .protocols import Agree, SharingModel, alone
from .rows import RowOptions
from .schedule import Schedule
from .verify import Verifier

WINDOW = 4  # batches of prompts to put in order of length

Request = tuple[int, Sequence[int]]  # index of a prompt, and its ids


class OwnRequest(NamedTuple):
    """A request with options of its own, whatever those of its neighbours are."""

    prompt_index: int
    source: Sequence[int]
    options: RowOptions


@dataclass(frozen=True)
class Plan:
    """How to decode.

    Attributes:
        drafter: Proposes tokens; not started yet.
        verifier: Has the sampler of `options`, or `RowSamplers` if rows may differ; the drafter
            has the same one.
        options: Of rows that bring none; None if each brings its own.
        ahead: Nothing is drafted and no logits are transformed, and a single row's next pass
            begins before the last one's token is read, so that the device does not wait for the
            host. It is wasted after an EOS.
        width: Positions of every pass of the target, padding included; see `LanguageModel.start`.
        sharing: The draft model, if it shares the target's encoder.
        timed: Wait for each draft, to tell its time from that of verifying. A round then has a
            second wait, and takes longer.
        agree: Applied to what a round has found; the drafter has it, too.
    """

    drafter: Drafter
    schedule: Schedule
    verifier: Verifier
    options: RowOptions | None = None
    ahead: bool = False
    width: int | None = None
    sharing: SharingModel | None = None
    timed: bool = False
    agree: Agree = alone

    def options_of(self, request: Request | OwnRequest) -> RowOptions:
        """Return the options that a request is decoded with."""
        options = request.options if isinstance(request, OwnRequest) else self.options
        assert options is not None
        return options


def in_order_of_length(requests: Iterable[Request], window: int) -> Iterator[Request]:
    """Sort `window` requests at a time by length, alternately longest and shortest first."""
    waiting, longest_first = iter(requests), True
    while part := list(islice(waiting, window)):
        yield from sorted(part, key=lambda request: len(request[1]), reverse=longest_first)
        longest_first = not longest_first
