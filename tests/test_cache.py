from __future__ import annotations

from speculative_t5.cache import GROWTH, KVCache
from speculative_t5.schedule import FixedSchedule

import mlx.core as mx
import pytest


def written(batch: int, length: int, first: float) -> mx.array:
    """(B, 1, L, 1): row 0 holds first, first + 1, ..., row 1 the same plus 100."""
    row = mx.arange(length, dtype=mx.float32) + first
    return (row[None] + 100 * mx.arange(batch)[:, None])[:, None, :, None]


def append(cache: KVCache, new: mx.array) -> list[list[float]]:
    cache.reserve(new.shape[2])
    keys, values = cache.append(0, new, -new)
    assert mx.array_equal(keys, -values)
    cache.advance(new.shape[2])
    return keys[:, 0, :, 0].tolist()  # type: ignore[no-any-return]


def test_rows_of_different_lengths_are_written_in_their_places() -> None:
    cache = KVCache(1, 1, 1, batch=2, dtype=mx.float32)
    append(cache, written(2, 3, 0))
    cache.truncate([3, 1])
    keys = append(cache, written(2, 2, 50))
    assert keys[0] == [0, 1, 2, 50, 51]
    assert keys[1][:3] == [100, 150, 151]
    assert cache.lengths == [5, 3]
    cache.truncate([5, 3])
    assert cache.lengths == [5, 3]


def test_selected_rows_keep_their_contents() -> None:
    cache = KVCache(1, 1, 1, batch=3, dtype=mx.float32)
    append(cache, written(3, 2, 0))
    cache.truncate([2, 1, 2])
    cache.select([2, 1])
    assert cache.lengths == [2, 1]
    keys = append(cache, written(2, 1, 7))
    assert keys[0] == [200, 201, 7] and keys[1][:2] == [100, 107]


def test_growing_keeps_what_was_written() -> None:
    cache = KVCache(1, 1, 1, batch=2, dtype=mx.float32)
    rows = append(cache, written(2, GROWTH - 1, 0))
    grown = append(cache, written(2, 3, 1000))
    assert cache.capacity >= GROWTH + 2
    assert [row[: GROWTH - 1] for row in grown] == rows
    assert grown[0][-3:] == [1000, 1001, 1002]


def test_writing_past_the_end_is_caught() -> None:
    cache = KVCache(1, 1, 1, batch=1, dtype=mx.float32)
    with pytest.raises(AssertionError):
        cache.append(0, written(1, GROWTH + 1, 0), written(1, GROWTH + 1, 0))


def test_rewinding_forward_is_caught() -> None:
    cache = KVCache(1, 1, 1, batch=1, dtype=mx.float32)
    with pytest.raises(AssertionError):
        cache.truncate([1])


def test_the_schedule_drafts_less_near_the_end() -> None:
    schedule = FixedSchedule(5)
    assert [schedule.next(remaining) for remaining in (20, 6, 5, 2, 1)] == [5, 5, 4, 1, 0]
