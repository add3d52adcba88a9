"""Quantized folders on a CPU are read as float32, and compute exactly what they stand for."""

import shutil
import warnings
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, device, load
from speculative_t5.checkpoints import loaded_size
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.checkpoints.dequantizing import KEEP_VARIABLE, SPARE_BYTES
from speculative_t5.checkpoints.model_folder import ModelFolder
from speculative_t5.checkpoints.tensors import parameters_of
from speculative_t5.libraries import NATIVE_SWITCH
from speculative_t5.models import same_weights, sample_weights
from speculative_t5.models.t5 import T5

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import opened
from commands import Call
from conftest import V1_0, V1_1, edit_json, write_checkpoint
from families import assert_close, write_gemma

WIDE = {"d_model": 64, "d_ff": 128, "d_kv": 32}
GEMMA = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "8 bits": (V1_0 | WIDE, {"quantize": 8}),
    "4 bits in small groups": (V1_1 | WIDE, {"quantize": 4, "group_size": 32}),
    "wo as well": (V1_1 | WIDE, {"quantize": 8, "keep_wo": False}),
    "scales in bfloat16": (V1_1 | WIDE, {"quantize": 8, "dtype": "bfloat16"}),
    "scales in float16": (V1_0 | WIDE, {"quantize": 4, "dtype": "float16", "group_size": 64}),
    "some matrices alone": (V1_0 | {"d_model": 64, "d_ff": 40}, {"quantize": 8}),
    "T5Gemma": (1, {"quantize": 4, "group_size": 32}),
    "T5Gemma 2": (2, {"quantize": 8, "group_size": 32, "dtype": "bfloat16"}),
}
IN_BITS = r"is stored in \d bits, which CPUs decode many times slower"


@pytest.fixture(params=CASES)
def stored(request: pytest.FixtureRequest, tmp_path: Path, spiece: bytes) -> Path:
    """A quantized folder."""
    shape, options = CASES[request.param]
    if isinstance(shape, int):
        write_gemma(tmp_path / "source", shape, encoder=GEMMA, decoder=GEMMA)
    else:
        write_checkpoint(tmp_path / "source", shape, spiece)
    return convert(str(tmp_path / "source"), tmp_path / "stored", **options)


@pytest.fixture
def small(tmp_path: Path, spiece: bytes) -> Path:
    write_checkpoint(tmp_path / "source", V1_0 | WIDE, spiece)
    return convert(str(tmp_path / "source"), tmp_path / "small", quantize=8)


@pytest.fixture(autouse=True)
def without_our_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the C parts were not built."""
    monkeypatch.setenv(NATIVE_SWITCH, "0")


def logits(model: Any) -> mx.array:
    found: mx.array = model(mx.array([[5, 17, 9, 1]]), mx.array([[0, 9, 4, 3]]))
    return found


@pytest.mark.cpu
def test_every_matrix_is_what_the_bits_stand_for(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are those of the same weights in a folder that was never quantized."""
    with pytest.warns(UserWarning, match=IN_BITS):
        model, _ = load(stored)
    checkpoint = opened(stored)
    how = checkpoint.config.quantization
    assert how is not None and model.config.quantization is None and model.dtype == mx.float32
    monkeypatch.setenv(KEEP_VARIABLE, "1")
    packed, _ = load(stored)
    assert packed.config.quantization == how
    parts, weights = parameters_of(packed), parameters_of(model)
    assert not [name for name in weights if name.endswith((".scales", ".biases"))]
    changed = {name.removesuffix(".scales") for name in parts if name.endswith(".scales")}
    assert changed
    for name, weight in weights.items():
        expected = parts[name]
        if (module := name.removesuffix(".weight")) in changed:
            scales, biases = parts[f"{module}.scales"], parts[f"{module}.biases"]
            expected = mx.dequantize(expected, scales, biases, how.group_size, how.bits)
        assert weight.dtype == mx.float32 and mx.array_equal(weight, expected), name
    assert_close(logits(model), np.array(logits(packed)))
    assert same_weights(sample_weights(packed), sample_weights(model))
    assert model.fingerprint != packed.fingerprint  # passes take other times


@pytest.mark.cpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_those_of_the_dequantized_model(
    temperature: float, small: Path, tmp_path: Path
) -> None:
    model, tokenizer = load(small)
    whole = tmp_path / "whole"
    shutil.copytree(small, whole)
    np.savez(whole / "weights.npz", **{n: np.array(w) for n, w in parameters_of(model).items()})
    edit_json(whole / "config.json", quantization=None)
    other, _ = load(whole)
    assert mx.array_equal(logits(model), logits(other))
    decoders = [SpeculativeDecoder(each, each, tokenizer, num_draft=3) for each in (model, other)]
    prompts = ["The old man sat.", "A dog.", "He go home."]
    first, second = (
        [out.tokens for out in d.generate_batch(prompts, max_tokens=9, temperature=temperature)]
        for d in decoders
    )
    assert first == second


@pytest.mark.cpu
@pytest.mark.filterwarnings(f"default:.*{IN_BITS}")
def test_the_line_says_what_memory_it_takes(small: Path, call: Call) -> None:
    with pytest.warns(UserWarning) as seen:
        model, _ = load(small)
    (warning,) = seen
    size = 4 * sum(weight.size for weight in parameters_of(model).values())
    before = sum(tensor.nbytes for tensor in opened(small).tensors.values())
    assert str(warning.message) == (
        f"{small} is stored in 8 bits, which CPUs decode many times slower: it is read as float32, "
        f"which takes {size / 1e9:.2f} GB of memory instead of {before / 1e9:.2f} "
        "(SPECULATIVE_T5_KEEP_QUANTIZED=1 leaves it as it is)"
    )
    assert warning.filename == __file__
    assert loaded_size(ModelFolder(small)) == size
    done = call("--model", str(small), "--prompt", "A.", "--max-tokens", "2")
    assert done.code == 0 and done.err[0].startswith(f"warning: {small} is stored in 8 bits")
    with pytest.warns(UserWarning, match="it is read as bfloat16"):
        assert load(small, dtype="bfloat16")[0].dtype == mx.bfloat16


@pytest.mark.cpu
def test_it_stays_quantized_where_the_user_or_memory_wants_it(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = loaded_size(ModelFolder(small))
    for free, stays in (
        (SPARE_BYTES + size, False),
        (SPARE_BYTES + size - 1, True),
        (0, True),
        (None, False),
    ):
        monkeypatch.setattr(device, "free_memory", lambda free=free: free)
        words = "it stays so, as float32 would take 0.01 GB of memory, and .* GB are free"
        with pytest.warns(UserWarning, match=words if stays else "it is read as float32"):
            model, _ = load(small)
        assert (model.config.quantization is not None) == stays
        files = sum(tensor.nbytes for tensor in opened(small).tensors.values())
        assert loaded_size(ModelFolder(small)) == (files if stays else size)
    monkeypatch.setenv(KEEP_VARIABLE, "1")
    with warnings.catch_warnings(action="error"):
        assert load(small)[0].config.quantization is not None
    monkeypatch.setenv(KEEP_VARIABLE, "0")
    with pytest.warns(UserWarning, match="it is read as float32"):
        assert load(small)[0].config.quantization is None


@pytest.mark.cpu
def test_a_gpu_computes_with_the_bits(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    with warnings.catch_warnings(action="error"):
        model, _ = load(small, dtype=mx.float32)
    assert model.config.quantization is not None and isinstance(model, T5)
    files = sum(file.stat().st_size for file in small.iterdir())
    assert loaded_size(ModelFolder(small)) == files


def test_free_memory_is_the_machines_and_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, group = tmp_path / "meminfo", tmp_path / "group"
    monkeypatch.setattr(device, "MEMORY_INFO", info)
    monkeypatch.setattr(device, "CONTROL_GROUP", group)
    assert device.free_memory() is None
    info.write_text("MemTotal: 900 kB\nMemFree: 100 kB\nMemAvailable:   600 kB\n")
    assert device.free_memory() == 600 * 1024
    group.mkdir()
    for file, text in (("current", "300000"), ("stat", "anon 5\ninactive_file 100000\n")):
        (group / f"memory.{file}").write_text(text)
    for limit, expected in (("max", 614400), ("500000", 300000), ("9000000", 614400), ("1", 0)):
        (group / "memory.max").write_text(f"{limit}\n")
        assert device.free_memory() == expected, limit
    info.write_text("no colon here\n")
    (group / "memory.max").write_text("max\n")
    assert device.free_memory() is None
