"""Several outputs for one prompt, and their scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..decoding import LanguageModel, Request, Round, log_probability
from .outputs import Generation


def repeated(requests: Iterable[Request], count: int) -> Iterator[Request]:
    """Repeat each request `count` times; the j-th of index i gets the index count * i + j."""
    for index, source in requests:
        for j in range(count):
            yield count * index + j, source


def gathered(
    outputs: Iterator[tuple[int, Generation]], count: int
) -> Iterator[tuple[int, Generation]]:
    """Undo `repeated`: yield each index with its first output, which has the others with it."""
    if count == 1:
        yield from outputs
        return
    waiting: dict[int, dict[int, Generation]] = {}
    for number, done in outputs:
        index, place = divmod(number, count)
        group = waiting.setdefault(index, {})
        group[place] = done
        if len(group) == count:
            first, *others = (group[place] for place in range(count))
            del waiting[index]
            yield index, replace(first, alternatives=tuple(others))


class Sources:
    """Passes requests on, and keeps each prompt until its outputs have their scores."""

    def __init__(self, model: LanguageModel, requests: Iterable[Request], count: int) -> None:
        self._model = model
        self._requests = requests
        self._count = count
        self._kept: dict[int, tuple[Request, int]] = {}  # with the number of outputs to come

    def __iter__(self) -> Iterator[Request]:
        for request in self._requests:
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
