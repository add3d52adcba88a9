"""Reads, computes and writes at the same time, as each waits on another part of the machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, TypeVar

Item = TypeVar("Item")
DEPTH = 2  # items that may wait between one thread and the other


def read_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the same items while a thread makes the next ones; no item may be None."""
    iterator = iter(items)
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, iterator, None) for _ in range(DEPTH))
        while (item := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, iterator, None))
            yield item


class WriteBehind:
    """Writes to a file in a thread; data must not change once they are given to it.

    As a context manager it waits for pending writes on a clean exit.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[int]] = deque()
        self.written = 0

    def write(self, data: bytes | memoryview) -> None:
        self._waiting.append(self._thread.submit(self._file.write, data))
        self.written += data.nbytes if isinstance(data, memoryview) else len(data)
        if len(self._waiting) > DEPTH:
            self._waiting.popleft().result()

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._thread:
            while self._waiting and kind is None:
                self._waiting.popleft().result()
