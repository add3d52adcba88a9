"""Several outputs for one prompt, and their scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..decoding import LanguageModel, Request, Round, log_probability
from .outputs import Generation


class Sequences:
    """Asks for several outputs of each request, and puts them together again.

    Output j of index i is asked for, and samples, under the index `count` * i + j.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._waiting: dict[int, dict[int, Generation]] = {}  # outputs that have come, by index

    def repeated(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield each request as often as outputs are wanted."""
        for index, source in requests:
            if index in self._waiting:
                raise ValueError(twice(index))
            self._waiting[index] = {}
            for j in range(self._count):
                yield self._count * index + j, source

    def gathered(
        self, outputs: Iterator[tuple[int, Generation]]
    ) -> Iterator[tuple[int, Generation]]:
        """Yield each index with its first output, which has the others with it."""
        for number, done in outputs:
            index, place = divmod(number, self._count)
            group = self._waiting[index]
            group[place] = done
            if len(group) == self._count:
                first, *others = (group[place] for place in range(self._count))
                del self._waiting[index]
                yield index, replace(first, alternatives=tuple(others))


def twice(index: int) -> str:
    """Say that an index was given again before the outputs of the first prompt had come."""
    return f"two prompts have the index {index}, and outputs could be mixed up: give each its own"


class Sources:
    """Passes requests on, and keeps each prompt until its outputs have their scores."""

    def __init__(self, model: LanguageModel, requests: Iterable[Request], count: int) -> None:
        self._model = model
        self._requests = requests
        self._count = count
        self._kept: dict[int, tuple[Request, int]] = {}  # with the number of outputs to come

    def __iter__(self) -> Iterator[Request]:
        for request in self._requests:
            if request[0] in self._kept:
                raise ValueError(twice(request[0]))
            self._kept[request[0]] = request, self._count
            yield request

    def score(self, done: Round) -> float:
        """Return the log-probability of an output, whose index is that of `repeated`."""
        index = done.index // self._count
        request, left = self._kept.pop(index)
        if left > 1:
            self._kept[index] = request, left - 1
        end = [] if done.end_id is None else [done.end_id]
        return log_probability(self._model, request[1], [*done.output, *end])
