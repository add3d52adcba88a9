"""Which kernels a machine with Metal uses, and a decoder that uses them; the CPU runs them."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from speculative_t5 import device, kernels
from speculative_t5.doctor import Subject, environment
from speculative_t5.files import cache_folder
from speculative_t5.kernels import metal
from speculative_t5.kernels.metal import attention, choice, layers, products
from speculative_t5.kernels.metal.choice import (
    CHAIN,
    CHECKED_ROWS,
    FEWER_ROWS,
    REPEATS,
    ROWS,
    Choice,
    Choices,
    judge_kernel,
)
from speculative_t5.models import T5, SharingConfig, SharingDraft, T5Config

import mlx.core as mx
import mlx.nn as nn
import pytest
from metal import interpreter

pytestmark = pytest.mark.cpu
WEIGHT = mx.random.normal((8, 8), key=mx.random.key(0))


@pytest.fixture(autouse=True)
def nothing_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Machine:
    """A device on which operations take a stated time, by number of rows."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self._now, self._given, self._told, self.calls = 0.0, 0.0, 0, 0
        self._seconds = seconds

    def ours(self, x: mx.array, _: int) -> mx.array:
        self._given += self._seconds[len(x)]
        return mx.stack([row @ WEIGHT.T for row in x])

    def theirs(self, x: mx.array, _: int) -> mx.array:
        self._given, self.calls = self._given + 1.0, self.calls + 1
        return x @ WEIGHT.T

    def clock(self) -> float:
        """Every second time, what it was given is done."""
        self._told += 1
        self._now += self._given if self._told % 2 == 0 else 0
        self._given = 0.0 if self._told % 2 == 0 else self._given
        return self._now

    def judge(self, ours: Any = None) -> Choice:
        return judge_kernel(ours or self.ours, self.theirs, rows, clock=self.clock)


def rows(count: int) -> mx.array:
    return mx.random.normal((count, 8), key=mx.random.key(1))


@pytest.mark.parametrize(
    ("one", "several", "many", "used", "reason"),
    [
        (1.0, 0.5, 0.5, 16, "1.33 times as fast as MLX's, up to 16 rows"),
        (0.5, 1.0, 1.0, 16, "1.33 times"),
        (1.04, 0.8, 0.8, 16, "1.09 times"),
        (1.0, 0.5, 1.04, 16, "1.19 times"),
        (1.0, 0.5, 1.06, 8, "1.33 times as fast as MLX's, up to 8 rows"),
        (1.0, 0.95, 0.95, 0, "it is 1.03 times as fast as MLX's"),
        (1.1, 0.1, 0.1, 0, "a row takes 1.10 times MLX's"),
        (1.0, 1.5, 0.1, 0, "it is 0.98 times"),
    ],
)
def test_a_kernel_is_used_where_it_is_faster(
    one: float, several: float, many: float, used: int, reason: str
) -> None:
    seconds = {count: several if count <= FEWER_ROWS else many for count in CHECKED_ROWS}
    choice = Machine(seconds | {1: one}).judge()
    assert (choice.rows, choice.reason.startswith(reason)) == (used, True), choice.reason
    speeds = {"1": 1 / one, "8": 1 / several, "16": 1 / many}
    assert choice.speeds.items() >= {key: round(each, 3) for key, each in speeds.items()}.items()


def test_large_matrices_are_timed_less_often() -> None:
    calls = {}
    for size in (0, 2**24, 2**26, 2**40):
        machine = Machine(dict.fromkeys(CHECKED_ROWS, 0.5))
        assert judge_kernel(machine.ours, machine.theirs, rows, size=size, clock=lambda: 0).speeds
        calls[size] = machine.calls - len(CHECKED_ROWS)  # one of each is compared
    per_chain = {size: count / len(ROWS) / (REPEATS + 1) for size, count in calls.items()}
    assert per_chain == {0: CHAIN, 2**24: CHAIN, 2**26: 4, 2**40: 2}


def test_a_kernel_that_is_wrong_or_fails_is_not_used() -> None:
    machine = Machine(dict.fromkeys(CHECKED_ROWS, 0.1))

    def apart(x: mx.array, i: int) -> mx.array:
        return machine.ours(x, i) + (1e-3 if len(x) == 4 else 0)

    def nothing(x: mx.array, i: int) -> mx.array:
        return machine.ours(x, i) * mx.nan

    def of_all_rows(x: mx.array, i: int) -> mx.array:
        return machine.ours(x, i) * (1 + 1e-6 * (len(x) == 9))

    def failing(x: mx.array, i: int) -> mx.array:
        raise RuntimeError(
            "[metal::Device] Unable to build metal library from source\n"
            "program_source:3:5: error: unknown type name 'x'\n    x y;"
        )

    found = [machine.judge(each) for each in (apart, nothing, of_all_rows, failing)]
    assert not any(choice.rows or choice.speeds for choice in found)
    off, bits = "the result for {} is off by", "{} have other bits"
    reasons = off.format("4 rows"), off.format("1 row"), bits.format("9 rows"), "it failed"
    assert all(a.reason.startswith(b) for a, b in zip(found, reasons, strict=True)), found
    assert found[3].reason == "it failed: program_source:3:5: error: unknown type name 'x'"


def test_choices_are_kept_for_each_source() -> None:
    good = Choice(16, "twice as fast", {"1": 2.0})
    first = Choices("source")
    assert first.of("a", lambda: good) == good

    def untried() -> Choice:
        raise AssertionError

    assert Choices("source").of("a", untried) == good
    assert [*Choices("source")] == [("a", good)] and not [*Choices("other source")]
    (path,) = (cache_folder() / "kernels").glob("*.json")
    for damaged in ("{", "[]", '{"a": 1}', json.dumps({"a": {"other": 1}})):
        path.write_text(damaged)
        assert Choices("source").of("a", lambda: good) == good
        assert [*Choices("source")] == [("a", good)]


def test_trials_take_a_moment_of_each_load_and_are_used_once_all_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, held, tried = 0.0, [False], list[str]()

    @contextmanager
    def turn() -> Iterator[None]:
        held.append(True)
        yield
        held.pop()

    def judged(*_: Any, **__: Any) -> Choice:
        nonlocal now
        now += 0.3
        assert held[-1], "others compute meanwhile"
        tried.append("a kernel")
        return Choice(16, "twice as fast")

    def try_layer(*_: Any) -> Choice:
        tried.append("a layer")
        return Choice(8, "")

    monkeypatch.setattr(device, "turn", turn)
    monkeypatch.setattr(metal, "judge_kernel", judged)
    monkeypatch.setattr(metal, "_try_layer", try_layer)
    monkeypatch.setattr(metal, "POSITIONS_TRIED", (64,))
    model = tiny()
    keys = [key for key, _ in metal.kernel_trials(model)]
    kinds, first = len(keys), sorted(dict.fromkeys(keys[:2], 16).items())
    # What other models of this machine have shown of the first ones together.
    layer = f"a layer, {metal._layer_kind(model.decoder.layers[0])}, with {first}"
    Choices(metal._source()).of(layer, lambda: Choice(8, ""))
    loads: list[dict[str, Choice]] = []
    while not loads or not all(choice.rows for choice in loads[-1].values()):
        loads.append(metal.kernel_choices(model, 0.5, lambda: now))
        assert len(loads) < 9
    assert tried == ["a kernel"] * kinds + ["a layer"]
    assert len(loads) == -(-kinds // 2) + (kinds % 2 == 0), "two kernels at a time"
    for load in loads[:-1]:
        assert {choice.reason for choice in load.values()} == {metal.UNTRIED.reason}
    tried.clear()
    assert metal.kernel_choices(model, 0.0, lambda: now) == loads[-1] and not tried
    monkeypatch.setattr(metal, "_source", lambda: "another")
    assert all(choice.rows for choice in metal.kernel_choices(model).values()), "without a limit"
    assert len(tried) == kinds + 1


def test_choices_of_several_processes_are_kept_and_those_of_one_that_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Choice(16, "twice as fast")
    first = Choices("source")
    first.of("a", lambda: good)
    (path,) = (cache_folder() / "kernels").glob("*.json")
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({"b": kept["a"]}))  # by another process
    first.of("c", lambda: good)
    assert {*json.loads(path.read_text())} == {"a", "b", "c"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    assert Choices("source").of("d", lambda: good) == good
    assert "d" in Choices("source") and "a" not in Choices("source")


def test_another_kind_of_layer_is_tried_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(metal, "judge_kernel", lambda *_, **__: Choice(8, ""))
    monkeypatch.setattr(metal, "_try_layer", lambda *_: tried.append(1) or Choice(8, ""))
    for activation in ("silu", "gelu_new", "silu"):
        metal.kernel_choices(tiny(gated=True, activation=activation))
    assert len(tried) == 2
    wrapped = tiny(num_heads=1)
    wrapped.decoder.layers = [nn.Sequential(each) for each in wrapped.decoder.layers]
    assert all(choice.rows for choice in metal.kernel_choices(wrapped).values())
    assert len(tried) == 2, "there is nothing but the head"
    other = Mock(decoder=Mock(spec=["head_size"]))  # of another family
    assert metal.kernel_choices(other) == {} and metal.alike_rows(other, {}) == 0


def test_what_measures_tries_all_that_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(metal, "limit", SimpleNamespace(seconds=metal.SECONDS_OF_TRIALS))
    monkeypatch.setattr(metal, "kernel_choices", lambda _, seconds: limits.append(seconds) or {})
    kernels.try_all_on_metal()
    metal.accelerate_on_metal(tiny())
    monkeypatch.setattr(kernels, "on_metal", lambda: True)
    kernels.try_all_on_metal()
    metal.accelerate_on_metal(tiny())
    assert limits == [metal.SECONDS_OF_TRIALS, math.inf]


def test_doctor_tells_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = T5(T5Config(32, 16, 64, 2, 1, 1, vocab_size=40))
    monkeypatch.setattr(environment, "on_metal", lambda: True)
    monkeypatch.setattr(environment, "load", lambda *_, **__: (model, None))
    found = iter([Choice(16, "twice as fast", {"1": 2.0})] * 4)
    refused = Choice(0, "it failed: no such function")
    monkeypatch.setattr(metal, "judge_kernel", lambda *_, **__: next(found, refused))
    monkeypatch.setattr(metal, "_try_layer", lambda *_: Choice(8, ""))
    told = environment.kernels(Subject("a folder"))
    assert told.reason == f"4 of {len(told.notes)} are used here" and len(told.notes) == 6
    monkeypatch.setattr(metal, "_source", lambda: "another")
    monkeypatch.setattr(metal, "judge_kernel", lambda *_, **__: Choice(8, "twice as fast"))
    steady = environment.kernels(Subject("a folder")).reason
    promise = "passes of up to 8 tokens are built to need no --steady"
    assert steady == f"6 of 6 are used here; {promise}"
    assert told.notes[0] == "product 96 x 32, float32: twice as fast"
    assert told.notes[-1].startswith("attention, 2 heads of 16, float32: it failed")
    assert told.details["product 96 x 32, float32"]["speeds"] == {"1": 2.0}


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[interpreter.Kernel]]:
    """Take all kernels, and let the CPU run them; these are they."""
    made: list[interpreter.Kernel] = []

    def kernel(**described: Any) -> interpreter.Kernel:
        made.append(interpreter.Kernel(**described))
        made[-1].orders = [interpreter.BY_CHANCE]
        return made[-1]

    monkeypatch.setattr(mx.fast, "metal_kernel", kernel)
    monkeypatch.setattr(metal, "judge_kernel", lambda *_, **__: Choice(16, ""))
    mx.disable_compile()
    caches = attention._attention_kernel, products._product_kernel
    for each in caches:
        each.cache_clear()
    yield made
    mx.enable_compile()
    for each in caches:
        each.cache_clear()


def tiny(dtype: mx.Dtype = mx.float32, **kind: Any) -> T5:
    mx.random.seed(3)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "vocab_size": 40}
    model = T5(T5Config(**sizes | kind, num_layers=1, num_decoder_layers=2))
    model.set_dtype(dtype)
    return model


def logits(model: T5, prompts: list[list[int]], size: int | None = None) -> mx.array:
    session, _ = model.start(prompts)
    fed = [[0], [3, 4, 5]]
    passes = [session.step(mx.array([tokens] * len(prompts)), size) for tokens in fed]
    return mx.concatenate(passes, axis=1)


def used(model: T5, rows: int = 16) -> T5:
    """Let a model use all kernels that it has a use for."""
    metal.use_kernels(model, {key: rows for key, _ in metal.kernel_trials(model)})
    model.recompile()
    return model


ONE, TWO = [[5, 6, 7, 1]], [[5, 6, 7, 1], [8, 1]]
needs_compiler = pytest.mark.skipif(interpreter.COMPILER is None, reason="there is no C++ compiler")


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (mx.float32, {}),
        (mx.float16, {"gated": True, "activation": "gelu_new", "own_head": True}),
        (mx.float32, {"gated": True, "activation": "gelu", "bits": 8}),
    ],
)
def test_a_decoder_with_kernels_computes_as_without(
    forced: list[interpreter.Kernel], dtype: mx.Dtype, kind: dict[str, Any]
) -> None:
    bits = kind.pop("bits", 0)
    model = tiny(dtype, **kind)
    if bits:
        nn.quantize(model.decoder, 32, bits)
    plain = [logits(model, each) for each in (ONE, TWO)]
    used(model)
    assert not forced, "nothing has run yet"
    most = 1e-5 if dtype == mx.float32 else 4e-3
    for wanted, each in zip(plain, (ONE, TWO), strict=True):
        assert mx.allclose(logits(model, each), wanted, rtol=0, atol=most)
    names = {kernel.name for kernel in forced if kernel.calls}
    packed = "_8_32_scales_biases" if bits else ""
    normed, added = f"product{packed}_norm_weight_epsilon", f"product{packed}_added"
    assert names >= {"attention_table_offsets", "attention_mask", normed, added}, names
    # A token in a pass of several has the bits that it has in its own.
    session, _ = model.start(ONE)
    single = [session.step(mx.array([[token]])) for token in (0, 3, 4, 5)]
    assert mx.array_equal(mx.concatenate(single, axis=1), logits(model, ONE))
    few = model.start(ONE)[0].step(mx.array([[0]]), 24)
    assert mx.array_equal(few, single[0][..., :24]), "of the first ids alone"
    calls = sum(kernel.calls for kernel in forced)
    with metal.kernels_off(model) as had_some:
        assert had_some and mx.array_equal(logits(model, ONE), plain[0])
    assert sum(kernel.calls for kernel in forced) == calls
    logits(model, ONE)
    assert sum(kernel.calls for kernel in forced) > calls


@needs_compiler
def test_each_model_has_its_own_kernels(forced: list[interpreter.Kernel]) -> None:
    first, second = used(tiny()), tiny()
    wanted = logits(second, ONE)
    assert not forced
    metal.use_kernels(second, {"attention, 2 heads of 16, float32": 16})
    second.recompile()
    assert mx.allclose(logits(second, ONE), wanted, rtol=0, atol=1e-5)
    assert {kernel.name.partition("_")[0] for kernel in forced} == {"attention"}
    with metal.kernels_off(first):
        before = sum(kernel.calls for kernel in forced)
        assert mx.allclose(logits(second, ONE), wanted, rtol=0, atol=1e-5)
        calls = sum(kernel.calls for kernel in forced)
        assert calls > before
        logits(first, ONE)
        assert sum(kernel.calls for kernel in forced) == calls
    logits(first, ONE)
    assert "product_added" in {kernel.name for kernel in forced}


@needs_compiler
def test_a_draft_that_shares_its_targets_head_uses_kernels_there(
    forced: list[interpreter.Kernel],
) -> None:
    target = used(tiny())
    draft = SharingDraft(target, SharingConfig(1, 64, d_model=16))
    before = target.head.taken
    used(draft)
    assert target.head is draft.head and target.head.taken is not before
    for key in ("product 40 x 32, float32", "product 40 x 16, float32"):
        assert target.head.taken.takes(key, 16), key
    with metal.kernels_off(draft) as had_some:
        assert had_some and not target.head.taken
    assert target.head.taken


@needs_compiler
def test_what_a_machine_chooses_is_tried_in_a_layer(
    forced: list[interpreter.Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metal, "ROWS_OF_LAYER", (1, 4, 9))
    model = tiny()
    chosen = metal.kernel_choices(model)
    assert all(choice.rows == 16 for choice in chosen.values()) and forced
    tried = {kernel.name for kernel in forced}
    assert tried >= {"attention_mask", "product_added", "product_norm_weight_epsilon_relu"}
    assert metal.kernel_choices(tiny()) == chosen and len({*forced}) == len(forced)
    for name in ("cross_attention", "self_attention"):
        real = getattr(layers, name)
        monkeypatch.setattr(metal, "_source", lambda name=name: name)
        monkeypatch.setattr(layers, name, lambda *given, real=real: real(*given) * 1.01)
        refused = metal.kernel_choices(model)
        assert not any(choice.rows for choice in refused.values()), name
        assert all("a layer with it: " in choice.reason for choice in refused.values())
        monkeypatch.setattr(layers, name, real)


@needs_compiler
def test_kernels_are_tried_as_they_will_run(
    monkeypatch: pytest.MonkeyPatch, forced: list[interpreter.Kernel]
) -> None:
    """Results are compared as on a Mac; times are accepted whatever they are."""
    monkeypatch.setattr(metal, "judge_kernel", judge_kernel)
    for name, value in {"ROWS": (1, 9), "CHECKED_ROWS": (1, 9), "CHAIN": 2, "REPEATS": 1}.items():
        monkeypatch.setattr(choice, name, value)
    monkeypatch.setattr(metal, "POSITIONS_TRIED", (40,))
    monkeypatch.setattr(choice, "SLOWEST", 1e9)
    monkeypatch.setattr(choice, "GAIN", 1e9)
    monkeypatch.setattr(metal, "_try_layer", lambda *_: Choice(8, ""))
    found = metal.kernel_choices(tiny(mx.bfloat16))
    assert len(found) == 6 and all(each.rows for each in found.values()), found
    monkeypatch.setattr(metal, "_source", lambda: "another")
    monkeypatch.setattr(metal, "product", lambda x, _: mx.zeros((len(x), 96), x.dtype))
    found = metal.kernel_choices(tiny(mx.bfloat16))
    assert sum(not each.rows for each in found.values()) == 5, found


def test_bits_are_promised_where_kernels_compute_all() -> None:
    def chosen(model: T5, **rows: int) -> dict[str, Choice]:
        keys = [key for key, _ in metal.kernel_trials(model)]
        return {key: Choice(rows.get(key.partition(" ")[0], 16), "") for key in keys}

    model = tiny(mx.float16)
    assert metal.alike_rows(model, chosen(model)) == 16
    assert metal.alike_rows(model, chosen(model) | chosen(model, product=8)) == 8
    (attention_key,) = (key for key in chosen(model) if key.startswith("attention"))
    for refused in ({"product 32 x 32, float16": Choice(0, "")}, {attention_key: Choice(0, "")}):
        assert metal.alike_rows(model, chosen(model) | refused) == 0
    assert metal.alike_rows(model, {}) == 0
    mixed, norm, biased, wrapped, other_bits = (tiny(mx.float16) for _ in range(5))
    embedded = tiny(mx.float16, own_head=True)
    embedded.shared.set_dtype(mx.float32)
    mixed.decoder.layers[1].feed_forward.wo.set_dtype(mx.float32)
    norm.decoder.layers[1].cross_norm.set_dtype(mx.float32)
    biased.decoder.layers[0].feed_forward.wo.bias = mx.ones(32)
    wrapped.decoder.layers[1].feed_forward = nn.Sequential(wrapped.decoder.layers[1].feed_forward)
    nn.quantize(other_bits.decoder, 32, 6)
    for each in (embedded, mixed, norm, biased, wrapped, other_bits):
        assert metal.alike_rows(each, chosen(each) | chosen(model)) == 0


@needs_compiler
def test_what_kernels_do_not_take_is_computed_by_mlx(
    forced: list[interpreter.Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __call__(self, *given: Any) -> Any:
            return self.inner(*given)

    mixed = tiny(mx.float16, gated=True, activation="gelu_new")
    mixed.shared.weight = mixed.shared.weight.astype(mx.float32)
    norm = tiny(mx.float16)
    norm.decoder.norm.weight = norm.decoder.norm.weight.astype(mx.float32)
    query = tiny(mx.float16)
    for layer in query.decoder.layers:
        layer.cross_attention.q.weight = layer.cross_attention.q.weight.astype(mx.float32)
    biased = tiny()
    biased.decoder.layers[0].feed_forward.wo.bias = mx.ones(32)
    wrapped = tiny()
    wrapped.decoder.layers[1].feed_forward = Wrapped(wrapped.decoder.layers[1].feed_forward)
    other_bits = tiny()
    nn.quantize(other_bits.decoder, 32, 6)
    other_mode = tiny()
    nn.quantize(other_mode.decoder, 32, 4, mode="mxfp4")
    for model in (mixed, norm, query, biased, wrapped, other_bits, other_mode):
        wanted = logits(model, ONE)
        assert mx.allclose(logits(used(model), ONE), wanted, rtol=0, atol=6e-3)
    few, wanted = tiny(), logits(tiny(), [[5, 1]] * 3)
    used(few, 8)
    calls = sum(kernel.calls for kernel in forced)
    session, _ = few.start([[5, 1]] * 3)
    mx.eval(session.step(mx.array([[0, 3, 4]] * 3)))  # nine rows
    assert sum(kernel.calls for kernel in forced) == calls
    assert mx.allclose(logits(few, [[5, 1]] * 3)[:, :1], wanted[:, :1], rtol=0, atol=1e-5)


def test_models_on_metal_are_accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(kernels, "on_metal", lambda: True)
    monkeypatch.setattr(kernels, "takes_stored", lambda: False)
    monkeypatch.setattr(metal, "accelerate_on_metal", seen.append)
    model = tiny()
    kernels.accelerate(model)
    assert seen == [model]
