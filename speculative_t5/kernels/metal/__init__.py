"""Products of few rows on Metal by kernels of our own, where a machine finds them right and faster.

Nobody has run them on a Mac: tests/metal runs their source on the CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import cache, partial
from importlib import resources
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ... import device
from ...models import CompiledModel, Padding, position_biases, t5
from . import layers
from .attention import self_attention
from .choice import FEWER_ROWS, MAX_ROWS, Choice, Choices, apart, judge_kernel, what_failed
from .layers import FewRowsHead, FewRowsLayer
from .products import Matrix, product

POSITIONS_TRIED = 64, 1024  # of the cache, in trials of attention
LAYER_POSITIONS = 64  # in a trial of a whole layer, of the cache and of a source
ROWS_OF_LAYER = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16)
SECONDS_OF_TRIALS = 0.5  # as a model is loaded; a trial that has begun is brought to an end
limit = SimpleNamespace(seconds=SECONDS_OF_TRIALS)  # what measures has no limit
UNTRIED = Choice(0, "not all kernels have been tried yet")


def accelerate_on_metal(model: CompiledModel) -> None:
    """Make a T5's decoder use kernels of ours, those that this machine chooses.

    Kernels are tried as models of their shapes are loaded here, for `limit.seconds` each time, and
    used once all of a model's have been. To be called before the first generation, or followed by
    `model.recompile()`.
    """
    choices = kernel_choices(model, limit.seconds).items()
    use_kernels(model, {key: choice.rows for key, choice in choices if choice.rows})


def use_kernels(model: CompiledModel, kernels: Mapping[str, int]) -> None:
    """Let a T5 use kernels, given by key, each for at most the stated number of rows."""
    taken = layers.TakenKernels(kernels)
    for module in _modules(model):
        if kernels and (faster := layers.FEW_ROWS_CLASSES.get(type(module))):
            module.__class__ = faster
            assert isinstance(module, FewRowsLayer | FewRowsHead)
            module.taken = taken
        elif isinstance(module, FewRowsHead):  # of the target, whose encoder this model shares
            module.taken = module.taken.with_others(kernels)


def _modules(model: CompiledModel) -> list[nn.Module]:
    """Return a model's modules, and the head, which may be its target's."""
    return [*{id(module): module for module in [*model.modules(), model.head]}.values()]


@contextmanager
def kernels_off(model: CompiledModel) -> Iterator[bool]:
    """Let a model run MLX's operations alone, for a comparison; say whether it had others."""
    faster = (each for each in _modules(model) if isinstance(each, FewRowsLayer | FewRowsHead))
    tables = {each.taken for each in faster}
    had_some = any(tables)
    try:
        with ExitStack() as stack:
            for taken in tables:
                stack.enter_context(taken.none())
            model.recompile()
            yield had_some
    finally:
        model.recompile()


def kernel_choices(
    model: CompiledModel,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Choice]:
    """Return what this machine chooses for each kernel that a model has a use for, by its key.

    Those that are chosen are tried together in one of its layers; if that is wrong, none is used.
    After `seconds` no trial begins, and none is used until a later call has tried the rest.
    """
    choices, spent = Choices(_source()), 0.0

    def chosen(key: str, judged: Callable[[], Choice]) -> Choice:
        nonlocal spent
        if spent >= seconds and key not in choices:
            return UNTRIED
        with device.turn():  # which others may have between two trials
            began = clock()
            choice = choices.of(key, judged)
            spent += clock() - began
        return choice

    found = {key: chosen(key, judged) for key, judged in kernel_trials(model)}
    fault = _fault_together(model, found, chosen)
    if fault is None:
        return found
    return {key: Choice(0, fault, choice.speeds) for key, choice in found.items()}


def _fault_together(
    model: CompiledModel,
    found: Mapping[str, Choice],
    chosen: Callable[[str, Callable[[], Choice]], Choice],
) -> str | None:
    """Say why no kernel is used although some are chosen; None if there is no reason."""
    if UNTRIED in found.values():
        return UNTRIED.reason
    used = {key: choice.rows for key, choice in found.items() if choice.rows}
    if not used:
        return None
    layer = next(_plain_layers(model.decoder.as_run().layers), None)
    if layer is None:
        return None
    name = f"a layer, {_layer_kind(layer)}, with {sorted(used.items())}"
    whole = chosen(name, partial(_try_layer, model, layer, used))
    if whole.rows:
        return None
    return whole.reason if whole is UNTRIED else f"a layer with it: {whole.reason}"


def alike_rows(model: CompiledModel, choices: Mapping[str, Choice]) -> int:
    """Return up to how many rows a pass gives each token the bits that it has alone.

    That is so where kernels compute all products and attention of the decoder; else it is 0. What
    is left to MLX, norms and operations on single numbers, handles each row by itself.
    """
    if not isinstance(model.decoder, t5.Decoder):
        return 0
    decoder = model.decoder.as_run()
    if len([*_plain_layers(decoder.layers)]) < len(decoder.layers):
        return 0
    modules = [*_products(decoder.layers), model.output]
    keys = [*map(layers.product_key, modules), _attention_key(model)]
    weights = dict(tree_flatten(model.parameters())).values()  # of quantized ones, the scales
    if {weight.dtype for weight in weights} - {mx.uint32} != {model.dtype}:
        return 0
    return min(choices[key].rows if key and key in choices else 0 for key in keys)


@cache
def _source() -> str:
    """Return the source of all that decides."""
    files = sorted(resources.files(__package__).iterdir(), key=lambda file: file.name)
    return "".join(f.read_text("utf-8") for f in files if f.name.endswith((".py", ".metal")))


def kernel_trials(model: CompiledModel) -> Iterator[tuple[str, Callable[[], Choice]]]:
    """Yield the key of each kernel for a T5, and what tries it."""
    if not isinstance(model.decoder, t5.Decoder):
        return
    decoder = model.decoder.as_run()
    same: dict[str, list[nn.Module]] = {}
    for module in [*_products(decoder.layers), model.output]:
        if key := layers.product_key(module):
            same.setdefault(key, []).append(module)
    yield from ((key, partial(_try_product, modules)) for key, modules in same.items())
    if key := _attention_key(model):
        shape, table = _position_shape(model), decoder.tables()[0]
        yield key, partial(_try_attention, shape, model.dtype, table)


def _attention_key(model: CompiledModel) -> str | None:
    return layers.attention_key(model.dtype, mx.zeros(_position_shape(model), model.dtype))


def _position_shape(model: CompiledModel) -> tuple[int, ...]:
    """Return the shape of a cache of one position."""
    return 2, 1, model.num_key_heads, 1, model.decoder.as_run().head_size


def _plain_layers(decoder_layers: Sequence[nn.Module]) -> Iterator[t5.DecoderLayer]:
    for layer in decoder_layers:
        if type(layer) in (t5.DecoderLayer, FewRowsLayer):
            assert isinstance(layer, t5.DecoderLayer)
            if layers.is_plain(layer):
                yield layer


def _layer_kind(layer: t5.DecoderLayer) -> str:
    """Return what decides which kernels a layer uses, besides the shapes and types of products."""
    feed, norm = layer.feed_forward, layer.feed_forward_norm.weight.dtype
    return f"{'gated ' * feed.gated}{feed.activation}, norms in {layers.dtype_word(norm)}"


def _products(decoder_layers: Sequence[nn.Module]) -> Iterator[nn.Module]:
    for layer in _plain_layers(decoder_layers):
        own, cross, feed = layer.self_attention, layer.cross_attention, layer.feed_forward
        yield from (own.qkv, own.out, cross.q, cross.out, feed.wi, feed.wo)


def _try_product(modules: Sequence[nn.Module]) -> Choice:
    """Try a product with all matrices of a shape, which are read in turn."""
    matrices = [matrix for each in modules if (matrix := layers.matrix_of(each))]
    mx.eval([each.weight for each in matrices])

    def ours(x: mx.array, i: int) -> mx.array:
        return product(x, matrices[i % len(matrices)])

    def theirs(x: mx.array, i: int) -> mx.array:
        module = modules[i % len(modules)]
        run: Any = getattr(module, "as_linear", module)
        y: mx.array = run(x)
        return y

    def exact(x: mx.array, i: int) -> mx.array:
        return x.astype(mx.float32) @ _in_float32(matrices[i % len(matrices)]).T

    (_, inputs), dtype = matrices[0].shape, matrices[0].dtype
    size = matrices[0].weight.nbytes
    return judge_kernel(ours, theirs, partial(_random_rows, inputs, dtype), exact=exact, size=size)


def _in_float32(matrix: Matrix) -> mx.array:
    if matrix.scales is None or matrix.biases is None:
        return matrix.weight.astype(mx.float32)
    parts = matrix.scales.astype(mx.float32), matrix.biases.astype(mx.float32)
    return mx.dequantize(matrix.weight, *parts, matrix.group_size, matrix.bits)


def _try_attention(shape: Sequence[int], dtype: mx.Dtype, table: mx.array) -> Choice:
    """Try attention to caches of several sizes; return the choice where it gains least."""
    found = [_try_attention_at(shape, dtype, table, size) for size in POSITIONS_TRIED]
    return min(found, key=lambda choice: (choice.rows, sum(choice.speeds.values())))


def _try_attention_at(
    shape: Sequence[int], dtype: mx.Dtype, table: mx.array, positions: int
) -> Choice:
    """Try attention to a whole cache, from so far behind that the bias is the same for all rows."""
    parts, rows, heads, _, size = shape
    start = mx.array([positions + table.shape[1]], dtype=mx.int32)
    whole = parts, rows, heads, positions, size
    kv = mx.random.normal(whole, key=mx.random.key(1)).astype(dtype) * size**-0.5
    keys, values = kv  # views, as the model has them
    biases: dict[int, mx.array] = {}  # by number of rows: a pass makes one for all layers

    def ours(x: mx.array, _: int) -> mx.array:
        return self_attention(x[None], kv, table, start)[0]

    def theirs(x: mx.array, _: int) -> mx.array:
        if len(x) not in biases:
            biases[len(x)] = next(position_biases([table], start, len(x), positions)).scores
            mx.eval(biases[len(x)])
        (queries,) = t5.split_heads(x[None], 1, heads)
        return t5.join_heads(t5.attend(queries, keys, values, biases[len(x)]))[0]

    rows_of = partial(_random_rows, heads * size, dtype)
    return judge_kernel(ours, theirs, rows_of, size=kv.nbytes)


def _try_layer(model: CompiledModel, layer: t5.DecoderLayer, used: Mapping[str, int]) -> Choice:
    """Compare a layer that uses kernels with the plain one, and its rows with themselves alone."""
    decoder = model.decoder.as_run()
    plain = copy(layer)
    plain.__class__ = t5.DecoderLayer
    few = copy(plain)
    few.__class__ = FewRowsLayer
    few.taken = layers.TakenKernels(used)
    try:
        for count in ROWS_OF_LAYER:
            for rows in {1, 2, count} if count % 2 == 0 else {1, count}:
                trial = _LayerTrial(model, decoder, rows, count // rows)
                if fault := trial.fault(plain, few, used):
                    return Choice(0, f"{rows} x {trial.length} rows {fault}")
    except Exception as error:  # noqa: BLE001  (of a compiler or driver that nobody has tried)
        return Choice(0, what_failed(error))
    return Choice(FEWER_ROWS, "right in a layer")


class _LayerTrial:
    """What a layer is given in a trial: rows at positions of their own, with sources and masks."""

    def __init__(self, model: CompiledModel, decoder: Any, rows: int, length: int) -> None:
        width, dtype = decoder.norm.weight.shape[0], model.dtype
        shape = 2, rows, model.num_key_heads, LAYER_POSITIONS, decoder.head_size
        sources = rows // 2 if rows % 2 == 0 else rows  # several rows may share one, as beams do
        kv = mx.random.normal(shape, key=mx.random.key(1)).astype(dtype) * shape[-1] ** -0.5
        self._x = mx.random.normal((rows, length, width), key=mx.random.key(2)).astype(dtype)
        self._cache, self._source = kv, mx.contiguous(kv[:, :sources]) * 2
        self._offsets = mx.array([3 + 7 * row % 40 for row in range(rows)], dtype=mx.int32)
        ends = mx.array([20 + source for source in range(sources)])
        hidden = mx.arange(LAYER_POSITIONS) >= ends[:, None, None, None]
        self._mask = mx.where(hidden, -mx.inf, 0.0).astype(dtype)
        self._table, self.length = decoder.tables()[0], length

    def fault(
        self, plain: t5.DecoderLayer, few: t5.DecoderLayer, used: Mapping[str, int]
    ) -> str | None:
        """Say what is wrong with the output of a layer that uses kernels, if anything is."""
        wanted = self._run(plain, 0, self.length)
        found = self._run(few, 0, self.length)
        alone = [self._run(few, at, at + 1) for at in range(self.length)]
        if off := apart(found, wanted):
            return f"are {off}"
        is_promised = len(self._x) * self.length <= min([*used.values(), MAX_ROWS])
        if is_promised and not mx.array_equal(found, mx.concatenate(alone, axis=1)):
            return "have other bits than alone"
        return None

    def _run(self, layer: t5.DecoderLayer, first: int, last: int) -> mx.array:
        """Return a layer's output for some positions; the cache has those before."""
        (rows, _, _), (_, _, heads, positions, _) = self._x.shape, self._cache.shape
        offsets, length, sources = self._offsets + first, last - first, len(self._mask)
        biases = position_biases([self._table], offsets, length, positions, batch=rows)
        shape = sources, heads, rows * length // sources, positions
        padding = Padding(mx.contiguous(mx.broadcast_to(self._mask, shape)), self._mask)
        x, cache = self._x[:, first:last], self._cache
        y, cache = layer(x, next(biases), cache, self._source, padding)
        if length < self.length:  # the next position is to see this one
            self._cache = cache
        mx.eval(y, cache)
        return y


def _random_rows(size: int, dtype: mx.Dtype, count: int) -> mx.array:
    return mx.random.normal((count, size), key=mx.random.key(0)).astype(dtype)
