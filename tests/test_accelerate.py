"""Accelerated models against the plain ones that they were made from, and the layers in C."""

import io
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from speculative_t5 import device, libraries
from speculative_t5.kernels import accelerate, extension, layers
from speculative_t5.models.config import Quantization, T5Config
from speculative_t5.models.quantization import quantize
from speculative_t5.models.t5 import T5, DecoderLayer

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import needs_layers
from mlx.utils import tree_flatten, tree_map
from test_products import own_copy, using_layers

pytestmark = pytest.mark.cpu

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
RNG = np.random.default_rng(0)
SOURCES = [[*RNG.integers(3, 320, n - 1).tolist(), 1] for n in (70, 41, 3)]
TARGET = RNG.integers(3, 320, (3, 60)).tolist()
SCORED = mx.array([SOURCES[2]]), mx.array(TARGET[:1])


@pytest.fixture(params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[0, 1, 2], ids=["plain", "avx2", "avx512"])
def level(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """Layers of a copy of the library that uses these instructions at most."""
    if layers.library is None:
        pytest.skip("the layers were not built")
    copy: Any = own_copy(tmp_path, rows=40, level=request.param).library  # type: ignore
    with using_layers(copy):
        yield request.param


def plain_model(name: str) -> T5:
    """One whose attention looks at few places, and at others when positions change."""
    model = T5(CONFIGS[name])
    mx.random.seed(0)
    model.update(tree_map(lambda w: mx.random.normal(w.shape), model.parameters()))
    for path, module in model.named_modules():
        last = path.split(".")[-1]
        if last in ("qkv", "q", "kv", "out", "wi", "wo", "lm_head"):
            module.weight = module.weight * 0.8 * module.weight.shape[1] ** -0.5
        elif last in ("shared", "position_bias"):
            module.weight = module.weight * (0.7 if last == "shared" else 1.5)
    return model


def pair(name: str) -> tuple[T5, T5]:
    """A plain model, and an accelerated one with the same weights."""
    plain, fast = plain_model(name), plain_model(name)
    accelerate(fast)
    return plain, fast


def decoded(model: T5) -> np.ndarray:
    """Logits of passes over a batch of rows whose lengths come to differ."""
    model.recompile()
    session, _ = model.start(SOURCES)
    found, taken = [], [0, 0, 0]
    for i, width in enumerate((1, 9, 2, 48)):
        tokens = mx.array([TARGET[row][at : at + width] for row, at in enumerate(taken)])
        found.append(np.array(session.step(tokens)))
        taken = [at + width - (row if i == 1 else 0) for row, at in enumerate(taken)]
        session.truncate(taken)
    return np.concatenate(found, axis=1)


def difference(found: Any, expected: Any) -> float:
    found, expected = np.array(found), np.array(expected)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def operations(array: mx.array) -> str:
    """The graph that computes an array, in the language of dot."""
    text = io.StringIO()
    mx.export_to_dot(text, array)
    return text.getvalue()


@needs_layers
def test_accelerating_swaps_modules_and_keeps_the_parameters() -> None:
    plain, fast = pair("relu")
    graph = operations(fast(*SCORED))
    assert graph.count("Attention") == 2 + 2 * 2 and graph.count("FeedForward") == 2 + 2
    assert graph.count("Embed") == 2 and graph.count("Head") == 1
    assert "Softmax" not in graph and "Matmul" not in graph
    assert "FeedForward" not in operations(plain(*SCORED))
    names = [[path for path, _ in tree_flatten(model.parameters())] for model in pair("gated")]
    assert sorted(names[0]) == sorted(names[1])
    before = dict(fast.named_modules())
    accelerate(fast)
    assert fast.shared is before["shared"] and decoded(fast).any(), "twice changes nothing"


@pytest.mark.parametrize(("on_cpu", "switch"), [(False, "1"), (True, "0")])
def test_models_stay_plain_on_a_gpu_or_when_switched_off(
    on_cpu: bool, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "on_cpu", lambda: on_cpu)
    monkeypatch.setenv(libraries.NATIVE_SWITCH, switch)
    _, model = pair("relu")
    assert {type(each) for each in model.decoder.layers} == {DecoderLayer}


def test_logits_are_those_of_the_plain_model(name: str, level: int) -> None:
    plain, fast = pair(name)
    assert difference(decoded(fast), decoded(plain)) < 2e-5


def test_long_passes_give_the_bits_of_short_ones(name: str, level: int) -> None:
    _, model = pair(name)
    tokens = mx.array(TARGET)

    def passes(*widths: int) -> np.ndarray:
        session, _ = model.start(SOURCES)
        ends = np.cumsum(widths).tolist()
        spans = zip([0, *ends], ends, strict=False)
        logits = [session.step(tokens[:, start:end]) for start, end in spans]
        return np.array(mx.concatenate(logits, axis=1))

    alone = passes(*[1] * 12)
    for widths in ((12,), (3, 4, 5), (2, 10)):
        assert (passes(*widths) == alone).all(), widths


@needs_layers
def test_arrays_of_a_cache_that_others_hold_do_not_change() -> None:
    _, model = pair("relu")
    session: Any = model.start(SOURCES)[0]
    mx.eval(session.step(mx.array(TARGET)[:, :5]))
    kept = list(session._cache.layers)
    before = [np.array(k) for k in kept]
    mx.eval(session.step(mx.array(TARGET)[:, 5:8]))
    assert all((np.array(k) == b).all() for k, b in zip(kept, before, strict=True))


@needs_layers
def test_a_cache_that_nobody_holds_is_written_in_place() -> None:
    _, model = pair("relu")
    session: Any = model.start(SOURCES)[0]
    places = []
    for first in range(0, 15, 5):
        mx.eval(session.step(mx.array(TARGET)[:, first : first + 5]))
        places.append([np.array(k, copy=False).ctypes.data for k in session._cache.layers])
    assert places[0] == places[1] == places[2]


@needs_layers
def test_memory_order_and_threads_change_nothing() -> None:
    _, model = pair("gated")
    expected = decoded(model)
    for module in model.modules():
        if isinstance(getattr(module, "weight", None), mx.array) and module.weight.ndim == 2:
            module.weight = mx.array(np.array(module.weight).T).T
    assert (decoded(model) == expected).all()
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: decoded(model), range(8)):
            assert (found == expected).all()


class Wrapped(nn.Module):
    """A layer in a layer, as adapters have it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        return 2 * self.inner(x)


@needs_layers
@pytest.mark.parametrize("kind", ["wrapped", "biased"])
@pytest.mark.parametrize("path", ["feed_forward.wi", "cross_attention.q", "self_attention.qkv"])
def test_layers_that_are_replaced_later_are_called(path: str, kind: str) -> None:
    models = pair("relu")
    before = decoded(models[1])
    parent, child = path.split(".")
    for model in models:
        module = model.decoder.layers[0][parent]
        inner = module[child]
        biased = nn.Linear(*reversed(inner.weight.shape))
        biased.weight, biased.bias = inner.weight, mx.ones(len(inner.weight))
        module[child] = Wrapped(inner) if kind == "wrapped" else biased
    assert difference(decoded(models[1]), before) > 1e-2
    assert difference(decoded(models[1]), decoded(models[0])) < 2e-5


def test_the_best_ids_are_those_of_the_logits_and_the_first_of_equals(level: int) -> None:
    plain, fast = pair("gated")
    x = mx.random.normal((5, 10, 64))
    for num_ids in (320, 319, 100, 1):
        logits = fast.logits(x, num_ids)
        assert logits.shape == (5, 10, num_ids)
        assert difference(logits, plain.logits(x, num_ids)) < 1e-5
        assert (fast.score("argmax", x, num_ids) == mx.argmax(logits, axis=-1)).all()
    _, model = pair("relu")
    model.decoder.norm.weight = mx.ones(24)
    weight = np.array(model.shared.weight)
    weight[200] = weight[37] = 100 * weight[37]
    x = mx.array(weight[37:38][None]) / 100
    for _ in range(2):
        model.shared.weight = mx.array(weight)
        assert model.score("argmax", x, None).tolist() == [[37]]
        weight[:37] = weight[38:200] = np.nan


@needs_layers
@pytest.mark.parametrize("part", ["position_bias", "encoder.norm", "wo", "shared", "kv"])
def test_weights_of_another_dtype_still_count(part: str) -> None:
    plain, fast = pair("relu")
    for model in (plain, fast):
        for path, module in model.named_modules():
            if path.endswith(part) and "weight" in module:
                module.weight = module.weight.astype(mx.bfloat16)
    assert difference(decoded(fast), decoded(plain)) < 2e-2


def test_half_precision_and_quantized_models_run_without_the_layers(level: int) -> None:
    plain, fast = pair("gated")
    for model in (plain, fast):
        quantize(model, Quantization(8, group_size=32))
    assert difference(decoded(fast), decoded(plain)) < 2e-5
    _, fast = pair("gated")
    fast.set_dtype(mx.bfloat16)
    assert "FeedForward" not in operations(fast(*SCORED))


@needs_layers
def test_layers_of_another_build_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    load = extension.load_layers.__wrapped__
    assert load()[0] is not None
    for name, value, reason in (
        ("mlx_version", "0.1.2", "built for MLX 0.1.2, and "),
        ("initialize", Mock(side_effect=ValueError("old")), "not loaded: old"),
        ("feed_forward", lambda: None, "not loaded: "),  # as nanobind refuses arguments
    ):
        other = SimpleNamespace(**vars(layers.library) | {name: value})
        monkeypatch.setattr(extension, "import_module", lambda *_, found=other: found)
        library, why = load()
        assert library is None and why.startswith(reason)
    monkeypatch.setattr(libraries, "products", SimpleNamespace())  # without layers: too old
    assert load()[0] is None


X, NORM, SQUARE, INTO = mx.ones((2, 3, 4)), mx.ones(4), mx.ones((4, 4)), mx.ones((12, 4))
KEYS, TABLE, START = mx.ones((2, 2, 2, 8, 2)), mx.ones((2, 9)), mx.zeros(1, dtype=mx.int32)
REFUSED = [
    ("feed_forward", (X.astype(mx.float16), NORM, SQUARE, SQUARE, "relu", False, 1e-6), "float32"),
    ("feed_forward", (X, NORM, SQUARE, SQUARE, "relu", True, 1e-6), "(d_ff, d)"),
    ("feed_forward", (X, NORM, SQUARE, SQUARE, "tanh", False, 1e-6), "tanh"),
    ("decoder_attention", (X, NORM, SQUARE, SQUARE, TABLE, KEYS, START, 1e-6), "3 H D"),
    ("decoder_attention",
     (X, NORM, INTO, SQUARE, TABLE, KEYS[:1], START, 1e-6), "(2, B, H, T, D)"),
    ("decoder_attention",
     (mx.ones((5, 1, 4)), NORM, INTO, SQUARE, TABLE, KEYS, START, 1e-6), "numbers of rows"),
    ("keys_values", (X, INTO, 3, 2), "as many keys"),
    ("embed", (mx.array([3, 0]), SQUARE), "(B, L), int32"),
    ("logits", (X, NORM, SQUARE, 1.0, 1e-6, 5), "more than the ids"),
    ("best", (X, NORM, SQUARE[:, :3], 1.0, 1e-6, 4), "(V, d)"),
]  # fmt: skip


@needs_layers
@pytest.mark.parametrize(("function", "arguments", "part"), REFUSED)
def test_arguments_of_wrong_shapes_are_refused(function: str, arguments: Any, part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(part)):
        getattr(layers.library, function)(*arguments)


@needs_layers
def test_positions_outside_of_the_cache_are_refused() -> None:
    x, cache = mx.ones((1, 4, 4)), mx.ones((2, 1, 2, 8, 2))
    for offset in (5, -1):
        arguments = (x, NORM, INTO, SQUARE, TABLE, cache, mx.array([offset], mx.int32), 1e-6)
        with pytest.raises(RuntimeError, match="not in the cache"):
            mx.eval(layers.library.decoder_attention(*arguments))


@needs_layers
def test_ids_beyond_the_embedding_give_no_numbers_and_nan_stays_nan() -> None:
    weight = mx.random.normal((7, 5))
    ids = mx.array([[3, 0], [7, -1], [6, 6]])
    rows = np.array(layers.library.embed(ids[::-1, :1], weight))[:, 0]
    assert (rows[[0, 2]] == np.array(weight)[[6, 3]]).all() and np.isnan(rows[1]).all()
    x, weight = mx.array([[[mx.nan, 1.0]]]), mx.eye(2)
    found = layers.library.feed_forward(x, mx.ones(2), weight, weight, "relu", False, 1e-6)
    assert np.isnan(np.array(found)).all()
