"""Threads that are used again: MLX keeps streams and compiled functions for each that computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Computed = TypeVar("Computed")


class Threads:
    """Runs each work in a thread of its own, which then waits for another work.

    The threads are daemons: none keeps the program from ending.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[tuple[Future[Any], Callable[[], Any]]]] = []

    def run(self, work: Callable[[], Computed]) -> Future[Computed]:
        """Begin some work in a thread that has none; return what will have its result."""
        found: Future[Computed] = Future()
        with self._lock:
            own = self._idle.pop() if self._idle else None
        if own is None:
            own = SimpleQueue()
            threading.Thread(target=self._serve, args=(own,), name="decoding", daemon=True).start()
        own.put((found, work))
        return found

    def _serve(self, own: SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
        while True:
            self._do(*own.get(), own)

    def _do(self, found: Future[Any], work: Callable[[], Any], own: Any) -> None:
        """Do some work; nothing of it is kept."""
        failure, result = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with self._lock:  # before anybody can know that it is done, and have more
            self._idle.append(own)
        if failure is None:
            found.set_result(result)
        else:
            found.set_exception(failure)


SHARED_THREADS = Threads()
