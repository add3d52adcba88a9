"""Outputs of sentences that were decoded lately, so that an edited text costs what has changed."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from ..generation import Generation, GenerationOptions

# Of an entry, about: what Python takes for its objects, and for each id, probability and round.
ENTRY_BYTES, ID_BYTES, LOGPROB_BYTES, ROUND_BYTES = 1_700, 36, 200, 24

Key = Hashable


def key_of_sentence(model: Hashable, options: GenerationOptions, source: Sequence[int]) -> Key:
    """Return all that a greedy output depends on: what it is kept by.

    `model` tells one loading of a model from another.
    """
    return model, options, tuple(source)


class KeptOutputs:
    """The outputs of one key holder, of which the least recently used make room for others."""

    def __init__(self, most: float) -> None:
        self._most = most  # bytes
        self._outputs: OrderedDict[Key, tuple[Generation, int]] = OrderedDict()
        self.size = 0  # of all, in bytes, as they are counted here

    def __len__(self) -> int:
        return len(self._outputs)

    def get(self, key: Key) -> Generation | None:
        """Return the output that is kept by a key, if there is one."""
        if key not in self._outputs:
            return None
        self._outputs.move_to_end(key)
        return self._outputs[key][0]

    def keep(self, key: Key, output: Generation, num_source: int) -> None:
        """Keep an output by its key; `num_source` ids are part of that."""
        size = size_of(output, num_source)
        if key in self._outputs or size > self._most:
            return
        self._outputs[key] = output, size
        self.size += size
        while self.size > self._most:
            _, (_, freed) = self._outputs.popitem(last=False)
            self.size -= freed


class SentenceCache:
    """The outputs of all key holders, each with an equal part of the room.

    So nobody can tell by the time of an answer, nor by what has made room, that another key's
    holder has asked for the same.
    """

    def __init__(self, most: float, keys: Sequence[str] = ()) -> None:
        self._most = most / max(len(keys), 1)  # bytes of each
        self._of: dict[str | None, KeptOutputs] = {}

    def of(self, holder: str | None) -> KeptOutputs:
        """Return what is kept for the holder of a key; for None, where there are no keys."""
        return self._of.setdefault(holder, KeptOutputs(self._most))


def size_of(output: Generation, num_source: int) -> int:
    """Return about how many bytes an entry takes."""
    return (
        ENTRY_BYTES
        + ID_BYTES * (num_source + len(output.tokens))
        + LOGPROB_BYTES * len(output.logprobs or ())
        + ROUND_BYTES * output.stats.rounds
        + sys.getsizeof(output.text)
    )
