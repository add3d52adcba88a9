"""Results of decoding: read from the device, and counted round by round."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

import mlx.core as mx
import numpy as np

# Where processes share a target: returns the ids of the first process in all of them. Machines may
# round differently, and processes that chose different tokens would go on to run different passes.
Broadcast = Callable[[mx.array], mx.array]


def identity(ids: mx.array) -> mx.array:
    """Return ids as they are: no other process shares the target."""
    return ids


class Counters(threading.local):
    """What this thread has done so far."""

    syncs = 0  # calls of `read`
    extra_work = 0  # what few rounds wait for: a pass that is compiled, a prompt that is read


counters = Counters()


def read(array: mx.array, meanwhile: Callable[[], None] | None = None) -> list[list[int]]:
    """Wait for ids (B, L) int32 and return them as Python integers.

    The host does something `meanwhile`, while the device computes them.
    """
    counters.syncs += 1
    if meanwhile is not None:
        mx.async_eval(array)
        meanwhile()
    return cast(list[list[int]], array.tolist())


FinishReason = Literal["eos", "length", "stop"]
Origin = Literal["accepted", "recovered", "bonus", "regular"]


@dataclass(frozen=True, repr=False)
class Stats:
    """What one generation cost.

    In a batch, `seconds` runs from the row's first round to its last, for all rows together, and
    includes encoding only for the rows that begin the batch. The three sequences are tuples once
    the generation has finished, and `PerRound` views before.
    """

    num_draft: Sequence[int] = ()  # K of each round: how many tokens the drafter was asked for
    num_drafted: Sequence[int] = ()  # that it proposed; a lookup may find fewer
    num_accepted: Sequence[int] = ()  # and that were accepted and emitted, after a cut
    emitted: int = 0  # tokens, EOS included
    seconds: float = 0.0  # wall-clock time from the prompt's ids to the last token

    def __repr__(self) -> str:
        return (
            f"Stats(rounds={self.rounds}, drafted={self.drafted}, accepted={self.accepted}, "
            f"emitted={self.emitted}, seconds={self.seconds:.3f})"
        )

    @property
    def rounds(self) -> int:
        """Forward passes of the target's decoder, except one begun before the end was known."""
        return len(self.num_draft)

    @property
    def drafted(self) -> int:
        """Tokens proposed."""
        return sum(self.num_drafted)

    @property
    def accepted(self) -> int:
        """Proposed tokens that were accepted and emitted."""
        return sum(self.num_accepted)

    @property
    def last_round(self) -> tuple[int, int, int]:
        """The last counts of `num_draft`, `num_drafted` and `num_accepted`."""
        return self.num_draft[-1], self.num_drafted[-1], self.num_accepted[-1]

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0.0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """The share of accepted tokens among those drafted first, second, and so on."""
        positions = range(1, max(self.num_drafted, default=0) + 1)
        return tuple(
            sum(n >= position for n in self.num_accepted)
            / sum(n >= position for n in self.num_drafted)
            for position in positions
        )

    @property
    def tokens_per_round(self) -> float:
        """Block efficiency: emitted / rounds."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.emitted / self.seconds if self.seconds else 0.0

    def summary(self) -> str:
        """Describe the generation in one line."""
        tokens = f"{self.emitted} token{'s' if self.emitted != 1 else ''}"
        parts = [f"{self.tokens_per_second:.0f} tok/s", tokens]
        if self.drafted:
            parts.append(f"{self.acceptance_rate:.0%} of drafts accepted".replace("%", " %"))
            parts.append(f"{self.tokens_per_round:.1f} tokens per round")
        else:
            parts.append("no draft")
        return " - ".join(parts)

    def origins(self) -> Iterator[tuple[int, Origin]]:
        """Yield the round, from 1, and the origin of each emitted token, EOS included."""
        left = self.emitted
        counts = zip(self.num_drafted, self.num_accepted, strict=True)
        for number, (drafted, accepted) in enumerate(counts, start=1):
            # Only the last round may have been cut.
            emitted = min(accepted + 1, left)
            left -= emitted
            for origin in origins_of_round(drafted, accepted, emitted):
                yield number, origin


def total(done: Iterable[Stats | None]) -> Stats:
    """Return the statistics of several outputs as if they were one; None is for no output."""
    known = [stats for stats in done if stats is not None]
    return Stats(
        tuple(count for stats in known for count in stats.num_draft),
        tuple(count for stats in known for count in stats.num_drafted),
        tuple(count for stats in known for count in stats.num_accepted),
        sum(stats.emitted for stats in known),
        sum(stats.seconds for stats in known),
    )


class PerRound(Sequence[int]):
    """A count for each round so far, equal to the tuple of them; copies are tuples.

    Views share a list, which only grows, with the loop: the last one is made as fast as the first.
    """

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts
        self._length = len(counts)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return islice(self._counts, self._length)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        return self._counts[range(self._length)[index]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple | PerRound) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[type, tuple[tuple[int, ...]]]:
        return tuple, (tuple(self),)


class Tally:
    """Counts one output's rounds."""

    def __init__(self) -> None:
        self._counts: tuple[list[int], ...] = ([], [], [])  # of the sequences of Stats
        self.rounds = self.emitted = 0

    def add(self, num_draft: int, num_drafted: int, num_accepted: int, emitted: int) -> None:
        for counts, count in zip(self._counts, (num_draft, num_drafted, num_accepted), strict=True):
            counts.append(count)
        self.rounds += 1
        self.emitted += emitted

    def stats(self, seconds: float, *, final: bool = False) -> Stats:
        views = (tuple(counts) if final else PerRound(counts) for counts in self._counts)
        num_draft, num_drafted, num_accepted = views
        return Stats(num_draft, num_drafted, num_accepted, self.emitted, seconds)


class Logprob(NamedTuple):
    """How probable a token is by the target: at temperature 1, given all tokens before it.

    Options that change the distribution are left out.
    """

    value: float  # natural logarithm of the probability
    top: dict[int, float]  # the most probable ids and theirs, the best first; as many as asked for


def as_logprobs(positions: Sequence[Sequence[int]], top: int = 0) -> list[Logprob]:
    """Read what `judged` has of some positions, 1 + 2 N numbers each, with up to `top` ids."""
    if not positions:
        return []
    numbers = np.array(positions, dtype=np.int32)
    found = numbers.shape[1] // 2  # ids, which may be more, for a neighbour's sake
    ids, floats = numbers[:, 1 : 1 + min(top, found)].tolist(), numbers.view(np.float32).tolist()
    return [
        Logprob(value, dict(zip(some, others[found:], strict=False)))
        for some, (value, *others) in zip(ids, floats, strict=True)
    ]


@dataclass(frozen=True)
class Round:
    """What one pass of the target gave one row."""

    index: int  # of the prompt
    tokens: list[int]  # emitted ids, without the one that ended the output
    num_accepted: int  # of the emitted tokens, EOS included: those from the draft
    stats: Stats  # the row's totals so far, this round included
    finish_reason: FinishReason | None = None  # in the row's last round
    output: list[int] = field(default_factory=list)  # then: all ids emitted, as in `tokens`
    end_id: int | None = None  # then: the EOS or stop id that ended it, if one did
    error: str | None = None  # why no token can follow; the row has ended without a finish reason
    # If the row's options ask for them: of `tokens` and `end_id`; in the last round, of all tokens.
    logprobs: list[Logprob] | None = None
    output_logprobs: list[Logprob] | None = None


def origins_of_round(num_drafted: int, num_accepted: int, emitted: int) -> list[Origin]:
    """Return where each token that a round emitted came from, EOS included.

    The target's own token is "recovered" after a rejection, a "bonus" after a whole draft, and
    "regular" where nothing was drafted; a round that ends with an accepted EOS or at max_tokens has
    none.
    """
    origins: list[Origin] = ["accepted"] * num_accepted
    if emitted > num_accepted:
        own: Origin = "recovered" if num_accepted < num_drafted else "bonus"
        origins.append(own if num_drafted else "regular")
    return origins
