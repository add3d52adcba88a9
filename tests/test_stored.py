"""Products with matrices stored in 16, 8 and 4 bits: their values, and the bits of each row."""

import ctypes
import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speculative_t5 import SpeculativeDecoder, libraries, load
from speculative_t5.checkpoints import dequantizing
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.kernels import MOST_ENCODED, accelerate, layers
from speculative_t5.models import encoder_decoder

import mlx.core as mx
import numpy as np
import pytest
from conftest import V1_1, needs_layers, tiny_model, write_checkpoint
from families import assert_close, write_gemma
from mlx.utils import tree_flatten
from test_products import using_layers

FLOATS = mx.float32, mx.float16, mx.bfloat16
ROWS = 1, 2, 5, 6, 7, 8, 12, 13, 16, 17, 21, 31, 64  # of a tile, of several, and of wide columns

pytestmark = needs_layers


@pytest.fixture(params=range(5), ids=["plain", "avx2", "avx512", "vnni", "amx"])
def library(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The layers, by a copy of the products with these instructions; OpenBLAS for 40 rows or more.

    Skipped where the processor does not have them.
    """
    (built,) = libraries.KERNELS_FOLDER.glob("_products*.so")
    copy = ctypes.CDLL(str(shutil.copy(built, tmp_path / "copy.so")))
    openblas, _ = libraries.load_openblas()
    assert openblas
    address = ctypes.cast(openblas.scipy_cblas_sgemm, ctypes.c_void_p)
    copy.products_init(address, True, 39, 2, request.param)
    if copy.products_level() < request.param:
        pytest.skip("this processor does not have the instructions")
    own = layers.library
    with using_layers(copy):
        yield SimpleNamespace(
            Matrix=own.Matrix, linear=own.linear, embed=own.embed, rounds=request.param >= 3
        )


def numbers(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng([*shape, seed]).normal(size=shape).astype(np.float32))


def linear(library: Any, x: mx.array, matrix: Any) -> np.ndarray:
    return np.array(library.linear(x, matrix))


def one_by_one(library: Any, x: mx.array, matrix: Any) -> np.ndarray:
    return np.concatenate([linear(library, x[i : i + 1], matrix) for i in range(len(x))])


@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_a_matrix_of_16_bits_gives_the_bits_of_the_same_one_in_float32(
    library: Any, dtype: mx.Dtype
) -> None:
    for n, k in [(1, 7), (17, 40), (70, 33), (200, 384)]:
        x, stored = numbers(64, k), numbers(n, k, seed=1).astype(dtype)
        wide, stored = library.Matrix(stored.astype(mx.float32)), library.Matrix(stored)
        alone = one_by_one(library, x, stored)
        for m in ROWS:
            found, expected = (linear(library, x[:m], each) for each in (stored, wide))
            if m < 40:
                assert (found == expected).all() and (found == alone[:m]).all(), (n, k, m)
            else:  # in other tiles of another library
                assert np.abs(found - expected).max() < 1e-5 * k**0.5


@pytest.mark.parametrize(("bits", "group"), [*itertools.product((8, 4), (32, 64, 128))])
def test_quantized_matrices_are_what_their_bits_stand_for(
    library: Any, bits: int, group: int
) -> None:
    for (n, groups), dtype in itertools.product([(1, 1), (3, 2), (17, 3), (200, 4)], FLOATS):
        k = groups * group
        parts = mx.quantize(numbers(n, k).astype(dtype), group, bits)
        packed, scales, biases = parts
        wide = mx.dequantize(
            packed, scales.astype(mx.float32), biases.astype(mx.float32), group, bits
        )
        exact, x = np.array(wide, dtype=np.float64), numbers(64, k, seed=1)
        matrix = library.Matrix(*parts, bits)
        alone = one_by_one(library, x, matrix)
        tolerance = 1e-5 * k**0.5
        if library.rounds:  # each number by half a step of its group at most
            sizes = np.abs(np.array(x)).reshape(64, -1, min(group, 64)).max(2, keepdims=True)
            steps = np.broadcast_to(sizes / 32512, (64, k // min(group, 64), min(group, 64)))
            tolerance = tolerance + steps.reshape(64, k) / 2 @ np.abs(exact).T
        assert (np.abs(alone - np.array(x, dtype=np.float64) @ exact.T) < tolerance).all()
        for m in ROWS:
            found = linear(library, x[:m], matrix)
            if m < 40 or library.rounds:
                assert (found == alone[:m]).all(), (n, k, m)
            else:
                assert np.abs(found - alone[:m]).max() < tolerance
        ids = mx.array([[n - 1, 0, n, -1]])
        rows = np.array(library.embed(ids, matrix))[0]
        assert np.abs(rows[:2] - exact[[n - 1, 0]]).max() < 1e-6 and np.isnan(rows[2:]).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_that_are_multiplied_some_at_a_time_have_their_own_bits(
    library: Any, bits: int
) -> None:
    """2^19 numbers of rows are rounded at once, here 144 rows."""
    x, matrix = numbers(300, 4096), library.Matrix(*mx.quantize(numbers(18, 4096), 64, bits), bits)
    found = linear(library, x, matrix)
    places = [0, 127, 143, 144, 145, 287, 288, 299]
    alone = np.concatenate([linear(library, x[i : i + 1], matrix) for i in places])
    assert np.abs(found[places] - alone).max() < (0.02 if not library.rounds else 1e-9)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_no_number_stays_so_in_its_row_alone(library: Any, bits: int) -> None:
    x = np.array(numbers(20, 128))
    x[1, 70], x[2, 3], x[3, 127] = np.nan, np.inf, -np.inf
    x[4], x[5], x[6] = 0, 1e-42, 3e38
    x[7, :64] = 0
    matrix = library.Matrix(*mx.quantize(numbers(19, 128), 64, bits), bits)
    wide = np.array(mx.dequantize(*mx.quantize(numbers(19, 128), 64, bits), 64, bits))
    for m in (8, 20):
        found = linear(library, mx.array(x[:m]), matrix)
        assert not np.isfinite(found[1:4]).any()
        assert (found[4] == 0).all() and (np.abs(found[5]) < 1e-35).all()
        exact = x[7:m].astype(np.float64) @ wide.T
        assert np.abs(found[7:] - exact).max() < 1e-2 and np.isfinite(found[0]).all()


PACKED, SCALES, BIASES = mx.quantize(mx.ones((4, 64)), 32, 8)
DAMAGED = [
    ((PACKED.astype(mx.int32), SCALES, BIASES, 8), "uint32"),
    ((PACKED, SCALES, BIASES, 5), "8 or 4 bits"),
    ((PACKED, SCALES, None, 8), "scales and biases"),
    ((PACKED, SCALES, BIASES[:, :1], 8), "scales and biases"),
    ((PACKED, SCALES[:3], BIASES[:3], 8), "scales and biases"),
    ((PACKED, SCALES, BIASES.astype(mx.float16), 8), "of one type"),
    ((PACKED[:, :12], SCALES, BIASES, 8), "32, 64 or 128"),
    ((mx.ones((4, 4), dtype=mx.int32),), "float32, float16 or bfloat16"),
    ((mx.ones(4),), "(outputs, inputs)"),
]


@pytest.mark.parametrize(("arguments", "part"), DAMAGED)
def test_damaged_matrices_are_refused(arguments: tuple[Any, ...], part: str) -> None:
    with pytest.raises(ValueError, match="speculative_t5 blocks") as caught:
        layers.library.Matrix(*arguments)
    assert part in str(caught.value)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_a_model_may_keep_its_matrices_in_16_bits(dtype: mx.Dtype) -> None:
    """It computes in float32, with the bits of the same model in float32."""
    wide = tiny_model(vocab_size=20, layers=2, seed=1)
    stored = {
        name: weight.astype(dtype if is_matrix(name) else mx.float32)
        for name, weight in tree_flatten(wide.parameters())
    }
    narrow = type(wide)(wide.config)
    wide.load_weights([(name, weight.astype(mx.float32)) for name, weight in stored.items()])
    narrow.load_weights(list(stored.items()))
    accelerate(narrow)
    ids = mx.array([[5, 17, 9, 1]]), mx.array([[0, 9, 4, 3]])
    assert narrow.dtype == mx.float32
    assert mx.array_equal(wide(*ids), narrow(*ids))


def is_matrix(name: str) -> bool:
    return not name.endswith("norm.weight") and "position_bias" not in name


@pytest.mark.cpu
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["T5", "T5Gemma"])
def test_a_quantized_folder_is_computed_with_as_it_is(
    family: str, bits: int, tmp_path: Path, spiece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy outputs do not depend on drafts, and logits are those of the dequantized matrices."""
    if family == "T5":
        shape = V1_1 | {"d_model": 64, "d_ff": 128, "d_kv": 32}
        write_checkpoint(tmp_path / "source", shape, spiece)
    else:
        stack = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
        write_gemma(tmp_path / "source", 1, encoder=stack, decoder=stack)
    stored = convert(str(tmp_path / "source"), tmp_path / "stored", quantize=bits, group_size=32)
    model, tokenizer = load(stored)
    assert model.config.quantization is not None and model.dtype == mx.float32
    prompts = ["The old man sat.", "A dog.", "He go home."]
    outputs = [
        [each.tokens for each in decoder.generate_batch(prompts, max_tokens=30)]
        for decoder in (
            SpeculativeDecoder(model, None, tokenizer),
            SpeculativeDecoder(model, model, tokenizer, num_draft=5),
            SpeculativeDecoder(model, "lookup", tokenizer, num_draft=9),
        )
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    monkeypatch.setattr(dequantizing, "takes_quantized", lambda bits, group_size: False)
    with pytest.warns(UserWarning, match="it is read as float32"):
        dense, _ = load(stored)
    ids = mx.array([[5, 17, 9, 1]]), mx.array([[0, 9, 4, 3]])
    assert_close(model(*ids), np.array(dense(*ids)))


@pytest.mark.cpu
@pytest.mark.parametrize("keeps_wo", [False, True])
def test_more_prompts_are_encoded_at_once_where_products_are_sums_of_integers(
    keeps_wo: bool, tmp_path: Path, spiece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's keys and values have the same bits among 20 of 12 tokens as alone."""
    shape = V1_1 | {"d_model": 64, "d_ff": 128, "d_kv": 32}
    write_checkpoint(tmp_path / "source", shape, spiece)
    stored = convert(
        str(tmp_path / "source"), tmp_path / "stored", quantize=8, group_size=32, keep_wo=keeps_wo
    )
    model, _ = load(stored)
    sums_integers = libraries.products.products_level() >= libraries.INTEGERS_LEVEL
    if not sums_integers or keeps_wo:
        assert model.most_encoded is None
        return
    assert model.most_encoded == MOST_ENCODED == 256
    rng = np.random.default_rng(0)
    prompts = [[*rng.integers(3, 20, rng.integers(4, 12)).tolist(), 1] for _ in range(20)]
    groups = []
    read = encoder_decoder._read_together
    monkeypatch.setattr(
        encoder_decoder,
        "_read_together",
        lambda *given: groups.append(len(given[2])) or read(*given),
    )
    first = mx.array(rng.integers(3, 20, (20, 4)))
    alone = [model.start([p])[0].step(first[i : i + 1]) for i, p in enumerate(prompts)]
    groups.clear()
    session, _ = model.start(prompts)
    assert groups == [20]
    assert (np.array(session.step(first)) == np.concatenate(alone)).all()
