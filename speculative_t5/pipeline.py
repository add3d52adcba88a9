"""Reading, working and writing at the same time: each waits on another part of the machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, Any, TypeVar, cast

Item = TypeVar("Item")
DEPTH = 2  # items that may wait between one thread and the other


def read_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """The same items, the next ones being made by a thread meanwhile; None is not an item."""
    iterator = iter(items)
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, iterator, None) for _ in range(DEPTH))
        while (item := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, iterator, None))
            yield item


@contextmanager
def write_behind(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """A file of the same contents, written by a thread: what is given to it must stay as it is."""
    with ThreadPoolExecutor(1) as thread:
        behind = _Behind(file, thread)
        yield cast(IO[bytes], behind)
        behind.flush()


class _Behind:
    """The parts of a file that `zipfile` writes to."""

    def __init__(self, file: IO[bytes], thread: ThreadPoolExecutor) -> None:
        self._file = file
        self._thread = thread
        self._waiting: deque[Future[int]] = deque()

    def write(self, data: Any) -> int:
        self._waiting.append(self._thread.submit(self._file.write, data))
        if len(self._waiting) > DEPTH:
            self._waiting.popleft().result()
        return memoryview(data).nbytes

    def flush(self) -> None:
        while self._waiting:
            self._waiting.popleft().result()
        self._file.flush()

    def seek(self, offset: int, whence: int = 0) -> int:
        self.flush()
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        self.flush()
        return self._file.tell()
