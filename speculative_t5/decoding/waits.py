"""The one place where decoding waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import cast

import mlx.core as mx


@dataclass
class Waits:
    """Counts the calls of `read`."""

    count: int = 0


# A context variable, so that each thread counts its own waits.
_counters: ContextVar[tuple[Waits, ...]] = ContextVar("_counters", default=())


def read(array: mx.array) -> list[list[int]]:
    """Wait for ids (B, L) int32 and return them as Python integers."""
    for waits in _counters.get():
        waits.count += 1
    return cast(list[list[int]], array.tolist())


@contextmanager
def count_waits() -> Iterator[Waits]:
    """Count this thread's waits inside the `with` block; the count grows while it runs."""
    waits = Waits()
    token = _counters.set((*_counters.get(), waits))
    try:
        yield waits
    finally:
        _counters.reset(token)
