"""Caches of keys and values: rows of several lengths, growth, and rows given away."""

from speculative_t5.models.cache import (
    GROWTH,
    SMALLEST_CAPACITY,
    SOURCE_STEP,
    EncodedPrompt,
    KVCache,
    SourceCache,
    source_width,
    write,
)

import mlx.core as mx


def written(batch: int, length: int, first: float) -> mx.array:
    """(B, 1, L, 1): row 0 holds first, first + 1, ..., row 1 the same plus 100."""
    row = mx.arange(length, dtype=mx.float32) + first
    return (row[None] + 100 * mx.arange(batch)[:, None])[:, None, :, None]


def make_cache(batch: int) -> KVCache:
    """Of two layers: one array of keys and values, as T5 has it, and two, as others do."""
    zeros = mx.zeros((2, batch, 1, SMALLEST_CAPACITY, 1))
    return KVCache([zeros, (zeros[0], zeros[1])])


def append(cache: KVCache, new: mx.array) -> list[list[float]]:
    offsets, (one, (keys, values)) = cache.hand_over(new.shape[2])
    one = write(one, mx.stack([new, -new]), offsets)
    pair = write(keys, new, offsets), write(values, -new, offsets)
    cache.take_back([one, pair], new.shape[2])
    one, (keys, values) = cache.layers
    assert mx.array_equal(keys, -values) and mx.array_equal(one, mx.stack([keys, values]))
    return keys[:, 0, : max(cache.lengths), 0].tolist()  # type: ignore[no-any-return]


def test_rows_of_different_lengths_are_written_in_their_places() -> None:
    cache = make_cache(2)
    append(cache, written(2, 3, 0))
    cache.truncate([3, 1])
    keys = append(cache, written(2, 2, 50))
    assert keys[0] == [0, 1, 2, 50, 51]
    assert keys[1][:3] == [100, 150, 151]
    assert cache.lengths == [5, 3]


def test_buffers_are_written_in_place() -> None:
    """Where nothing else holds them: a copy of all layers in each step would cost more than it."""
    cache = KVCache([mx.zeros((2, 1, 8, SMALLEST_CAPACITY, 64))])
    cache.fit(4096)
    new = mx.ones((2, 1, 8, 1, 64))

    mx.eval(cache.layers, new)
    size = cache.layers[0].nbytes // 2
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(3):
        at, layers = cache.hand_over(1)
        layers = [write(layer, new, at) for layer in layers]
        cache.take_back(layers, 1)
        del layers
        mx.eval(cache.layers)
    assert mx.get_peak_memory() - before < size


def test_memory_of_a_long_row_is_given_back() -> None:
    cache = make_cache(2)
    append(cache, written(2, 5 * GROWTH, 0))
    assert cache.capacity == 5 * GROWTH
    cache.truncate([5 * GROWTH, 3])
    cache.clear([0])
    keys = append(cache, written(2, 2, 50))
    assert cache.capacity == SMALLEST_CAPACITY
    assert keys[0][:2] == [50, 51] and keys[1] == [100, 101, 102, 150, 151]


def test_capacities_change_when_too_small_or_twice_too_large() -> None:
    cases = {
        64: {1: 64, 32: 64, 64: 64, 65: 128, 129: 256},
        256: {256: 256, 65: 256, 64: 64, 1: 32, 257: 512, 600: 768},
        768: {512: 768, 257: 768, 256: 256},
    }
    for capacity, expected in cases.items():
        for needed, found in expected.items():
            cache = make_cache(1)
            cache.resize(capacity)
            cache.fit(needed)
            assert cache.capacity == found


def sources(*rows: tuple[int, int]) -> SourceCache:
    """Of one layer; each row (length, value) holds that value, and 9 as padding behind it."""
    width = source_width([length for length, _ in rows])
    keys = mx.array([[v] * n + [9] * (width - n) for n, v in rows], dtype=mx.float32)
    keys = keys[:, None, :, None]
    return SourceCache([mx.stack([keys, -keys])], [length for length, _ in rows])


def seen(cache: SourceCache) -> list[list[float]]:
    """The keys that are not masked."""
    ((keys, values),) = cache.view(slice(None))  # along the first axis of one array
    assert mx.array_equal(keys, -values)
    rows = keys[:, 0, :, 0]
    if cache.mask is not None:
        assert cache.mask.shape == (len(keys), 1, 1, keys.shape[2])
        rows = mx.where(cache.mask[:, 0, 0] == 0, rows, mx.nan)
    return [[x for x in row if x == x] for row in rows.tolist()]


def test_rows_are_given_to_other_sources() -> None:
    cache = sources((3, 1), (2, 2), (3, 3))
    assert seen(cache) == [[1] * 3, [2] * 2, [3] * 3]
    cache.replace([0, 2], sources((2, 5), (9, 9), (1, 4)), [0, 2])
    assert seen(cache) == [[5] * 2, [2] * 2, [4]]
    assert cache.width == SOURCE_STEP, "no wider than the longest row needs"
    cache.replace([1], sources((100, 6)), [0])
    assert seen(cache) == [[5] * 2, [6] * 100, [4]]
    cache.select([2, 0])
    assert seen(cache) == [[4], [5] * 2]
    cache.replace([0], sources((2, 7)), [0])
    assert seen(cache) == [[7] * 2, [5] * 2]
    assert cache.capacity == SMALLEST_CAPACITY
    cache.replace([0, 1], sources((300, 1), (2, 2)), [0, 1])
    cache.replace([0], sources((2, 3)), [0])
    assert seen(cache) == [[3] * 2, [2] * 2] and cache.capacity == SMALLEST_CAPACITY


def test_rows_are_given_to_prompts_that_were_encoded_apart() -> None:
    cache, together = sources((3, 1), (1, 2), (2, 3), (5, 4)), sources((3, 5), (1, 6), (2, 7))
    items = [EncodedPrompt(together, row, []) for row in range(3)]
    items.append(EncodedPrompt(sources((40, 8)), 0, []))
    cache.give([3, 0, 1], [items[2], items[3], items[0]])
    assert seen(cache) == [[8] * 40, [5] * 3, [3] * 2, [7] * 2]
    cache = sources((9, 1))
    cache.select([0, 0])
    cache.give([1, 0], items[1:3])
    assert seen(cache) == [[7] * 2, [6]]
    assert sources((SOURCE_STEP, 1), (SOURCE_STEP, 2)).mask is None
