"""Steady decoding: the same bits whatever was drafted, on kernels that change with the rows."""

import pickle
import random
from collections.abc import Iterator
from typing import Any

from speculative_t5 import SpeculativeDecoder, device
from speculative_t5.generation.steady import rows_are_alike, steady_width
from speculative_t5.models import t5
from speculative_t5.models.cache import SMALLEST_CAPACITY, KVCache

import mlx.core as mx
import pytest
from checkpoints import refused
from conftest import tiny, tiny_pair
from kernels import Growing, Kernels, Leftovers, change

SIZE = 60  # ids; those of a pair, 2 n and 2 n + 1, are almost equally probable
PROMPTS = [random.Random(n).choices(range(2, SIZE), k=5 + n) for n in range(3)]


@pytest.fixture(autouse=True, scope="module")
def uncompiled() -> Iterator[None]:
    """Compiling for each shape would take most of the time."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def near_ties(kind: str, dtype: mx.Dtype = mx.float32, kernels: type[Kernels] = Kernels) -> Any:
    """Return a tiny random model with near-ties and other kernels, and a draft for it."""
    model, draft = tiny_pair(kind, vocab_size=SIZE, layers=2, seed=4)
    change(model, dtype, kernels)
    if kind == "sharing":
        draft.set_dtype(dtype)
    return model, draft


def outputs(
    model: Any, draft: Any, way: str, temperature: float = 0.0, **options: Any
) -> list[list[int]]:
    lookup = way in ("lookup", "both")
    small = draft if way in ("model", "both") else None
    decoder = SpeculativeDecoder(model, small, None, lookup=lookup, **options)
    found = decoder.generate_batch(PROMPTS, batch_size=1, max_tokens=30, temperature=temperature)
    return [each.tokens for each in found]


@pytest.mark.parametrize(
    ("kind", "dtype", "num_draft", "ways"),
    [
        ("t5", mx.float32, 8, ("model", "lookup", "both")),
        ("t5", mx.bfloat16, 1, ("model",)),
        ("qwen3", mx.float32, 3, ("model",)),
        ("sharing", mx.float32, 5, ("model",)),
    ],
    ids=["t5", "t5-bfloat16", "qwen3", "sharing"],
)
def test_outputs_are_the_same_with_any_draft(
    kind: str, dtype: mx.Dtype, num_draft: int, ways: tuple[str, ...]
) -> None:
    model, draft = near_ties(kind, dtype)
    steady = {"steady": True, "num_draft": num_draft}
    for temperature in (0.0, 1.0):
        alone = outputs(model, draft, "none", temperature, **steady)
        for way in ways:
            assert outputs(model, draft, way, temperature, **steady) == alone
    plain = outputs(model, draft, "none")
    drafted = outputs(model, draft, "model", num_draft=num_draft)
    assert drafted != plain, "without it, some outputs depend on the draft"


@pytest.mark.linux  # rows of float32 products of any number are alike
def test_rows_that_are_left_over_take_a_wider_pass() -> None:
    model, draft = near_ties("t5", kernels=Leftovers)
    assert [n for n in range(1, 18) if rows_are_alike(model, n)] == [*range(1, 9), 16]
    assert [steady_width(model, n) for n in (2, 8, 9, 16)] == [2, 8, 16, 16]
    model = tiny()
    assert steady_width(model, 128) == 128
    assert steady_width(model, 129) == 16, "wider ones are not tried"


def test_rows_are_compared_twice_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels change with the length of the text, too."""
    model, plain = tiny(vocab_size=SIZE), t5.attend

    def attend(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
        out = plain(q, k, v, mask)
        far = q.shape[2] == 4 and k.shape[2] > 256
        return mx.concatenate([out[:, :, :3], out[:, :, 3:] * 1.01], axis=2) if far else out

    monkeypatch.setattr(t5, "attend", attend)
    monkeypatch.setattr(device, "on_cpu", lambda: False)  # nor are layers fused then
    model.recompile()
    assert rows_are_alike(model, 4) and not rows_are_alike(model, 4, 256)
    assert steady_width(model, 3) == 3 and steady_width(model, 4) == 8


def test_a_pass_is_split_where_no_wider_one_has_rows_alike() -> None:
    model, draft = near_ties("t5", kernels=Growing)
    assert steady_width(model, 6) == 4
    steady = {"steady": True, "num_draft": 5}
    alone = outputs(model, draft, "none", **steady)
    assert outputs(model, draft, "model", **steady) == alone


def test_a_pickled_decoder_finds_its_width_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpeculativeDecoder(tiny(), None, None, steady=True, num_draft=2)
    assert decoder.engine.plan().width == 3
    monkeypatch.setattr("speculative_t5.generation.engine.steady_width", lambda *_: 8)
    assert decoder.engine.plan().width == 3
    assert pickle.loads(pickle.dumps(decoder)).engine.plan().width == 8


def test_passes_follow_from_the_position_alone() -> None:
    """Fed in any pieces, every position has the same width and capacity."""
    rng, total, width = random.Random(0), 300, 6
    seen: set[tuple[int, int]] = set()

    for longest in (1, 2, 6, 40):
        cache = KVCache([mx.zeros((2, 1, 1, SMALLEST_CAPACITY, 2))], width)
        while cache.lengths[0] < total:
            length, stay, passes = rng.randint(1, longest), 0, list[tuple[int, int]]()
            for part, count in cache.parts(mx.zeros((1, length), mx.int32)):
                offsets, layers = cache.hand_over(width)
                capacity, first = layers[0].shape[-2], int(offsets.item())
                assert part.shape == (1, width) and first + width <= capacity
                passes.append((first, capacity))
                stay += count
                cache.take_back(layers, count)
            assert stay == length
            ends = [first for first, _ in passes[1:]] + cache.lengths
            for (first, capacity), end in zip(passes, ends, strict=True):
                assert 1 <= end - first <= width
                seen |= {(position, capacity) for position in range(first, end)}
            cache.truncate([max(0, cache.lengths[0] - rng.randint(0, length - 1))])
    found = dict(seen)
    assert len(seen) == len(found), "one capacity for each position"
    assert set(found.values()) == {32, 64, 128, 256, 512}


def test_probabilities_are_those_of_plain_decoding() -> None:
    model = tiny("t5", vocab_size=SIZE, layers=2)
    tokens = mx.array([[0, *PROMPTS[1] * 8]])
    plain, steady = (model.start([PROMPTS[0]], width=width)[0] for width in (None, 4))
    expected = plain.step(tokens)
    for first, last in ((0, 1), (1, 6), (3, 25), (24, 40)):
        steady.truncate([first])
        found = steady.step(tokens[:, first:last])
        assert found.shape[1] == last - first and steady.lengths == [last]
        assert mx.allclose(found, expected[:, first:last], atol=1e-4)


def test_prompts_are_decoded_one_at_a_time() -> None:
    decoder = SpeculativeDecoder(tiny(), None, None, steady=True)
    assert len(decoder.generate_batch([[3, 1], [4, 1]], max_tokens=4)) == 2
    with refused("one prompt at a time, got batch_size 2"):
        decoder.generate_batch([[3, 1]], batch_size=2)


def test_decoder_only_models_attend_to_whole_buffers() -> None:
    model, seen = tiny("qwen3", vocab_size=SIZE), []
    session, _ = model.start([[5, 6, 7, 8]], width=4)
    attention = model.model.layers[0].self_attn
    original = type(attention).__call__

    def watched(self: Any, x: mx.array, mask: mx.array, cache: Any) -> Any:
        seen.append((mask.shape, mx.sum(mask, axis=-1).flatten().tolist()))
        return original(self, x, mask, cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(attention), "__call__", watched)
        assert session.step(mx.array([[9, 10]])).shape[:2] == (1, 2)
    assert seen[0] == ((1, 1, 4, 32), [4, 5, 6, 7])
