"""A T5 split among processes computes what it does in one, and what that costs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints import save_draft
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.checkpoints.tensors import as_mlx
from speculative_t5.decoding import FixedSchedule
from speculative_t5.libraries import NATIVE_SWITCH
from speculative_t5.models import T5, Quantization, T5Config
from speculative_t5.models.t5_parallel import check_divisible, shard

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import refused
from conftest import REPOSITORY, V1_0, V1_1, tiny_model, tiny_sharing, write_checkpoint
from families import write_gemma
from ranks import Pair, run_ranks

EVEN = {"num_heads": 4, "d_ff": 64, "d_model": 64, "d_kv": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "v1_0": V1_0 | EVEN,
    "v1_1": V1_1 | EVEN | {"num_decoder_layers": 2},
    "quantized": V1_1 | EVEN,
}


def run_sharded(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run tests/sharded.py in two processes; return what each has found."""
    results = run_ranks(folder, [[str(REPOSITORY / "tests" / "sharded.py"), *arguments]] * 2)
    for code, _, errors in results:
        assert code == 0, errors
    return [json.loads(output.splitlines()[-1]) for _, output, _ in results]


@pytest.mark.cpu
@pytest.mark.forks
@pytest.mark.parametrize("kind", SHAPES)
def test_processes_that_share_a_model_give_its_outputs(
    kind: str, tmp_path: Path, spiece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, more = tmp_path / kind, []
    write_checkpoint(folder, SHAPES[kind], spiece, seed=3)
    if kind == "quantized":
        monkeypatch.setenv("SPECULATIVE_T5_KEEP_QUANTIZED", "1")
        # MLX's products for the whole model, too: ours may round its rows (native/integers.h).
        monkeypatch.setenv(NATIVE_SWITCH, "0")
        folder = convert(str(folder), tmp_path / "small", quantize=8, group_size=32)
    if kind == "v1_0":
        write_checkpoint(tmp_path / "draft", V1_0, spiece, seed=4)
        sharing = tiny_sharing(load(folder)[0], layers=1, noise=0.01)
        save_draft(tmp_path / "sharing", sharing, "target")
        more = [str(tmp_path / "draft"), str(tmp_path / "sharing")]
    first, second = run_sharded(tmp_path, str(folder), *more)
    assert [first["rank"], second["rank"]] == [0, 1]
    if more:
        # All processes follow the first where they round differently.
        (expected, found), (other,) = first["outputs"], second["outputs"]
        assert found == other == expected
    for one in (first, second):
        assert one["size"] == 2 and one["differ"] == []
        assert one["gap"] < 1e-5 * max(1.0, one["scale"])
        assert one["share"] < 0.7


EVENLY = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_heads": 4, "num_layers": 1,
          "num_decoder_layers": 1, "vocab_size": 40}  # fmt: skip


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    for changes, size, named in (
        ({"num_heads": 3}, 2, "num_heads is 3"),
        ({"d_ff": 30}, 4, "d_ff is 30"),
        ({"quantization": Quantization(8, 64)}, 2, "d_ff is 64, quantized"),
    ):
        with refused(".", named):
            check_divisible(T5Config(**EVENLY | changes), size)
    write_gemma(tmp_path, 1)
    with refused("only a T5"):
        load(tmp_path, group=Pair())  # type: ignore[call-overload]
    model = tiny_model()
    model.num_processes = 2
    with refused("split among 2 processes"):
        shard(model, Pair())  # type: ignore[arg-type]
    # Processes that share a model do not go by what each of them measures.
    with refused("steady"):
        SpeculativeDecoder(model, tiny_model(seed=1), steady=True)
    assert SpeculativeDecoder(model, tiny_model(seed=1)).engine.plan().schedule == FixedSchedule(5)


def sums_of(run: Callable[[], object]) -> list[int]:
    """Return how many numbers each sum of a computation sends."""
    sizes = []

    def all_sum(x: mx.array, **_: object) -> mx.array:
        sizes.append(x.size)
        return x

    with patch.object(mx.distributed, "all_sum", all_sum):
        mx.eval(run())
    return sizes


@pytest.mark.parametrize(("batch", "num_draft", "gated"), [(1, 0, False), (3, 5, True)])
def test_a_layer_has_the_same_sums_however_many_tokens_a_pass_checks(
    batch: int, num_draft: int, gated: bool
) -> None:
    """Two for a layer of the encoder, three for one of the decoder, of each token's vector."""
    model = T5(T5Config(**EVENLY | {"num_layers": 3, "num_decoder_layers": 4}, gated=gated))
    shard(model, Pair())  # type: ignore[arg-type]
    prompts, size = [[5, 6, 1]] * batch, model.config.d_model
    embedded = model.shared(mx.array(prompts))
    sums = sums_of(lambda: model.decoder.read(model.encoder(embedded, None), 3))
    assert sums == [batch * 3 * size] * 2 * 3
    with patch.object(mx.distributed, "all_sum", lambda x, **_: x):
        session, _ = model.start(prompts)
    model.recompile()  # or the pass runs as it was traced with the function above
    tokens = mx.ones((batch, num_draft + 1), mx.int32)
    assert sums_of(lambda: session.step(tokens)) == [tokens.size * size] * 3 * 4


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_some_columns_of_a_matrix_take_the_memory_of_no_others(dtype: mx.Dtype) -> None:
    whole = np.ones((64, 1024), np.uint16 if dtype == mx.bfloat16 else np.float32)
    before = mx.get_active_memory()
    part = as_mlx(whole[:, :512], dtype)
    mx.eval(part)
    assert mx.get_active_memory() - before < 1.1 * part.nbytes
