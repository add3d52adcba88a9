"""Layers as single operations, against the same layers made of MLX's own."""

from __future__ import annotations

import ctypes
import io
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speculative_t5 import device
from speculative_t5.cpu import blocks
from speculative_t5.models.t5.config import T5Config
from speculative_t5.models.t5.model import T5, T5Session

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

pytestmark = pytest.mark.skipif(
    blocks.library is None,
    reason="built without a C++ compiler",  # the package is to work without, and slower
)

CONFIGS = {
    "relu": T5Config(24, 10, 40, 3, 2, 2, vocab_size=320),
    "gated": T5Config(
        64, 16, 48, 4, 1, 2, vocab_size=320, gated=True, activation="gelu_new", own_head=True
    ),
    "bias_per_layer": T5Config(
        40, 5, 33, 8, 2, 2, vocab_size=320, gated=True, activation="silu", bias_per_layer=True
    ),
    "gelu": T5Config(
        20, 33, 51, 2, 1, 1, vocab_size=320, activation="gelu", relative_attention_max_distance=20,
        relative_attention_num_buckets=8,
    ),
}  # fmt: skip
LENGTHS = [70, 41, 3]
RNG = np.random.default_rng(0)
SOURCES = [[*RNG.integers(3, 320, n - 1).tolist(), 1] for n in LENGTHS]
TARGET = RNG.integers(3, 320, (3, 60)).tolist()


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> T5:
    return random_model(CONFIGS[request.param])


@pytest.fixture(params=[0, 1, 2], ids=["plain", "avx2", "avx512"])
def level(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """Layers of a copy of the library that uses these instructions at most."""
    built = next(iter(sorted(device.FOLDER.glob("_products*.so"))))
    copy = ctypes.CDLL(str(shutil.copy(built, tmp_path / "copy.so")))
    copy.products_init(None, 0, 40, 2, request.param)
    copy.layers.restype = ctypes.c_void_p
    blocks.library.initialize(copy.layers())
    yield request.param
    assert device.products
    blocks.library.initialize(device.products.layers())


def random_model(config: T5Config, seed: int = 0) -> T5:
    """One whose attention looks at few places, and at others when positions change."""
    model = T5(config)
    mx.random.seed(seed)
    model.update(tree_map(lambda w: mx.random.normal(w.shape), model.parameters()))
    for name, width in (("shared", 0.7), ("position_bias", 1.5)):
        for path, module in model.named_modules():
            if path.endswith(name):
                module.weight = module.weight * width
    for path, module in model.named_modules():
        if path.split(".")[-1] in ("qkv", "q", "kv", "out", "wi", "wo", "lm_head"):
            module.weight = module.weight * 0.8 * module.weight.shape[1] ** -0.5
    return model


def decoded(model: T5, *, widths: tuple[int, ...] = (1, 9, 2, 48)) -> np.ndarray:
    """Logits of passes over a batch of rows whose lengths come to differ."""
    session, _ = model.start(SOURCES)
    found, taken = [], [0, 0, 0]
    for i, width in enumerate(widths):
        tokens = mx.array([TARGET[row][at : at + width] for row, at in enumerate(taken)])
        found.append(np.array(session.step(tokens)))
        taken = [at + width - (row if i == 1 else 0) for row, at in enumerate(taken)]
        session.truncate(taken)
    return np.concatenate(found, axis=1)


def composed(model: T5, **options: Any) -> np.ndarray:
    """As `decoded`, by MLX's own operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "library", None)
        model.forget()
        logits = decoded(model, **options)
    model.forget()
    return logits


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def operations(array: mx.array) -> str:
    """What an array comes of, as a graph in the language of dot."""
    text = io.StringIO()
    mx.export_to_dot(text, array)
    return text.getvalue()


def test_layers_are_single_operations() -> None:
    model = random_model(CONFIGS["relu"])
    graph = operations(model(mx.array([SOURCES[2]]), mx.array(TARGET[:1])))
    assert graph.count("Attention") == 2 + 2 * 2 and graph.count("FeedForward") == 2 + 2
    assert graph.count("Embed") == 2 and graph.count("Head") == 1
    assert "Softmax" not in graph and "Matmul" not in graph


def test_logits_are_those_of_the_composed_layers(model: T5, level: int) -> None:
    assert difference(decoded(model), composed(model)) < 2e-5


@pytest.mark.parametrize(
    "name", ["self_norm", "qkv", "q", "kv", "out", "cross_norm", "wi", "wo", "position_bias"]
)
def test_every_weight_counts(name: str) -> None:
    """A layer that overlooked one of its weights would not pass: each moves the logits."""
    model = random_model(CONFIGS["gated"])
    before = decoded(model)
    for path, module in model.named_modules():
        if path.endswith(name) and "decoder" in path:
            change = 1.05 if module.weight.ndim == 1 else mx.array([[1.0], [1.05]])
            rows = module.weight.shape[0]
            if module.weight.ndim == 2:
                change = mx.tile(change, (rows // 2, 1))
            module.weight = module.weight * change
    assert difference(decoded(model), before) > 1e-3
    assert difference(decoded(model), composed(model)) < 2e-5


def test_a_pass_over_several_tokens_gives_the_bits_of_passes_over_each(
    model: T5, level: int
) -> None:
    tokens = mx.array(TARGET)

    def passes(*widths: int) -> np.ndarray:
        session, _ = model.start(SOURCES)
        ends = np.cumsum(widths).tolist()
        logits = [
            session.step(tokens[:, end - n : end]) for n, end in zip(widths, ends, strict=True)
        ]
        return np.array(mx.concatenate(logits, axis=1))

    alone = passes(*[1] * 12)
    for widths in ((12,), (3, 4, 5), (2, 10)):
        assert (passes(*widths) == alone).all(), widths


def test_caches_that_others_hold_are_left_alone() -> None:
    model = random_model(CONFIGS["relu"])
    session, _ = model.start(SOURCES)
    assert isinstance(session, T5Session)
    mx.eval(session.step(mx.array(TARGET)[:, :5]))
    kept = [k for pair in session._cache.layers for k in pair]
    before = [np.array(k) for k in kept]
    logits = np.array(session.step(mx.array(TARGET)[:, 5:8]))
    assert all((np.array(k) == b).all() for k, b in zip(kept, before, strict=True))
    session, _ = model.start(SOURCES)
    assert (np.array(session.step(mx.array(TARGET)[:, :8]))[:, 5:] == logits).all()


def test_weights_may_lie_in_memory_as_they_like() -> None:
    model = random_model(CONFIGS["gated"])
    expected = decoded(model)
    for module in model.modules():
        if isinstance(getattr(module, "weight", None), mx.array) and module.weight.ndim == 2:
            module.weight = mx.array(np.array(module.weight).T).T
    assert (decoded(model) == expected).all()


def test_threads_decode_at_the_same_time() -> None:
    model = random_model(CONFIGS["gated"])
    expected = decoded(model)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: decoded(model), range(8)):
            assert (found == expected).all()


def test_what_does_not_fit_is_refused() -> None:
    x, norm, weight = mx.ones((6, 4)), mx.ones(4), mx.ones((4, 4))
    run = blocks.library.feed_forward
    for arguments, part in (
        ((x.astype(mx.float16), norm, weight, weight, "relu", False, 1e-6), "float32"),
        ((x, mx.ones(5), weight, weight, "relu", False, 1e-6), "(d,)"),
        ((x, norm, mx.ones((7, 4)), weight, "relu", False, 1e-6), "(d_ff, d)"),
        ((x, norm, weight, weight, "relu", True, 1e-6), "(d_ff, d)"),
        ((x, norm, weight, weight, "tanh", False, 1e-6), "tanh"),
    ):
        with pytest.raises(ValueError) as caught:
            run(*arguments)
        assert part in str(caught.value)
    keys, table, at = mx.ones((2, 2, 8, 2)), mx.ones((2, 9)), mx.zeros(1, dtype=mx.int32)
    attend = blocks.library.decoder_attention
    into = mx.ones((12, 4))
    attend(x, norm, into, weight, table, keys, keys, at, 1e-6)
    for arguments, part in (
        ((x, norm, weight, weight, table, keys, keys, at, 1e-6), "3 H D"),
        ((x, norm, into, weight, mx.ones((2, 8)), keys, keys, at, 1e-6), "reach"),
        ((x, norm, into, weight, mx.ones((1, 9)), keys, keys, at, 1e-6), "numbers of heads"),
        ((mx.ones((18, 4)), norm, into, weight, table, keys, keys, at, 1e-6), "places"),
        ((x, norm, into, weight, table, keys, keys[:, :1], at, 1e-6), "(B, H, T, D)"),
        ((mx.ones((5, 4)), norm, into, weight, table, keys, keys, at, 1e-6), "(B * L, d)"),
        ((x, norm, into, weight, table, keys, keys, mx.zeros(3, dtype=mx.int32), 1e-6), "(B,)"),
    ):
        with pytest.raises(ValueError) as caught:
            attend(*arguments)
        assert part in str(caught.value)


def test_keys_and_values_of_a_source_end_in_zeros(level: int) -> None:
    memory, weight = mx.random.normal((2 * 5, 12)), mx.random.normal((2 * 3 * 4, 12))
    keys, values = blocks.library.keys_values(memory, weight, 2, 3, 8)
    expected = np.array(memory @ weight.T).reshape(2, 5, 2, 3, 4).transpose(2, 0, 3, 1, 4)
    for found, heads in zip((keys, values), expected, strict=True):
        assert np.allclose(found[:, :, :5], heads, atol=1e-5)
        assert found.shape == (2, 3, 8, 4) and not np.array(found[:, :, 5:]).any()
    for arguments, part in (
        ((memory, weight, 3, 3, 8), "(B * L, d)"),
        ((memory, weight, 2, 5, 8), "2 H D"),
        ((memory, weight, 2, 3, 4), "as many keys"),
    ):
        with pytest.raises(ValueError) as caught:
            blocks.library.keys_values(*arguments)
        assert part in str(caught.value)


@pytest.mark.parametrize("num_ids", [320, 319, 100, 1])
def test_best_ids_are_those_of_the_logits(level: int, num_ids: int) -> None:
    model = random_model(CONFIGS["gated"])
    hidden = mx.random.normal((50, 64))
    logits = model.logits(hidden, num_ids)
    assert logits.shape == (50, num_ids)
    expected = model.decoder.norm(hidden) @ model.lm_head.weight[:num_ids].T
    assert np.allclose(logits, expected * 64**-0.5, atol=1e-5)
    assert (model.best(hidden, num_ids) == mx.argmax(logits, axis=-1)).all()


def test_of_equal_logits_the_first_is_the_best(level: int) -> None:
    model = random_model(CONFIGS["relu"])
    model.decoder.norm.weight = mx.ones(24)
    weight = np.array(model.shared.weight)
    weight[200] = weight[37] = 100 * weight[37]
    model.shared.weight = mx.array(weight)
    hidden = model.shared.weight[37:38] / 100
    assert model.best(hidden).tolist() == [37]
    weight[:37] = weight[38:200] = np.nan
    model.shared.weight = mx.array(weight)
    assert model.best(hidden).tolist() == [37]


def test_ids_beyond_the_embedding_give_no_numbers() -> None:
    weight = mx.random.normal((7, 5))
    ids = mx.array([[3, 0], [7, -1], [6, 6]])
    rows = np.array(blocks.library.embed(ids[::-1, :1], weight))
    assert (rows[[0, 2]] == np.array(weight)[[6, 3]]).all() and np.isnan(rows[1]).all()
    with pytest.raises(ValueError, match=r"\(B, L\), int32"):
        blocks.library.embed(ids[0], weight)
    x, norm = mx.ones((2, 5)), mx.ones(5)
    for size in (0, 8):
        with pytest.raises(ValueError, match="so many ids"):
            blocks.library.logits(x, norm, weight, 1.0, 1e-6, size)
    with pytest.raises(ValueError, match=r"\(V, d\)"):
        blocks.library.best(x, norm, weight[:, :4], 1.0, 1e-6, 7)


def test_parts_of_other_builds_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks.load()[0] is not None

    def without(name: str, value: Any) -> str:
        """Why the layers are not used where the extension has this in the place of its own."""
        extension = SimpleNamespace(**vars(blocks.library))
        setattr(extension, name, value)
        monkeypatch.setattr(blocks, "import_module", lambda *names: extension)
        found, why = blocks.load()
        assert found is None
        return why

    def refuse(*arguments: Any) -> None:
        raise ValueError("another version of the layers")

    assert without("mlx_version", "0.1.2").startswith("built for MLX 0.1.2, and ")
    assert without("initialize", refuse) == "not loaded: another version of the layers"
    # As nanobind has it: incompatible function arguments.
    assert without("feed_forward", lambda: None).startswith("not loaded: ")
    monkeypatch.undo()
    monkeypatch.setattr(device, "products", SimpleNamespace())  # older: without layers
    assert blocks.load()[0] is None


class Wrapped(nn.Module):
    """As adapters do it: a layer in a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        return 2 * self.inner(x)


def test_layers_put_in_the_place_of_ours_are_called() -> None:
    model = random_model(CONFIGS["relu"])
    before = decoded(model)
    layer = model.decoder.layers[0]
    biased = nn.Linear(24, 40)
    biased.weight = layer.feed_forward.wi.weight
    for parent, name, new in (
        (layer.feed_forward, "wi", biased),
        (layer.cross_attention, "q", Wrapped(layer.cross_attention.q)),
        (layer.self_attention, "qkv", Wrapped(layer.self_attention.qkv)),
    ):
        old = parent[name]
        setattr(parent, name, new)
        found = decoded(model)
        assert difference(found, before) > 1e-2
        assert difference(found, composed(model)) < 2e-5
        setattr(parent, name, old)
    assert (decoded(model) == before).all()


@pytest.mark.parametrize("name", ["position_bias", "encoder.norm", "wo", "shared"])
def test_weights_of_another_type_are_composed(name: str) -> None:
    model = random_model(CONFIGS["relu"])
    for path, module in model.named_modules():
        if path.endswith(name):
            module.weight = module.weight.astype(mx.bfloat16)
    assert difference(decoded(model), composed(model)) < 2e-2


def test_positions_that_are_not_in_the_cache_are_refused() -> None:
    x, norm, weight, into = mx.ones((4, 4)), mx.ones(4), mx.ones((4, 4)), mx.ones((12, 4))
    keys, table = mx.ones((1, 2, 8, 2)), mx.ones((2, 9))
    for at in (5, -1):
        start = mx.array([at], dtype=mx.int32)
        made = blocks.library.decoder_attention(
            x, norm, into, weight, table, keys, keys, start, 1e-6
        )
        with pytest.raises(RuntimeError, match="not in the cache"):
            mx.eval(made)


def test_one_mask_serves_all_rows() -> None:
    model = random_model(CONFIGS["relu"])
    source, target = mx.array([SOURCES[1]] * 2), mx.array(TARGET[:2])
    mask = mx.arange(source.shape[1])[None] < 20
    logits = model(source, target, encoder_mask=mask)
    expected = model(source[:, :20], target)
    assert difference(np.array(logits), np.array(expected)) < 2e-5


def test_what_is_not_a_number_stays_none() -> None:
    x, weight = mx.array([[mx.nan, 1.0]]), mx.eye(2)
    found = blocks.library.feed_forward(x, mx.ones(2), weight, weight, "relu", False, 1e-6)
    assert np.isnan(np.array(found)).all()


def test_models_of_other_types_are_made_of_mlx_operations() -> None:
    model = random_model(CONFIGS["relu"])
    model.set_dtype(mx.bfloat16)
    graph = operations(model(mx.array([SOURCES[2]]), mx.array(TARGET[:1])))
    assert "FeedForward" not in graph
