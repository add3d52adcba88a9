"""What inspecting a checkpoint reports, without converting it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speculative_t5 import load
from speculative_t5.checkpoints import save_draft
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.checkpoints.inspection import cache_bytes, inspect, list_models
from speculative_t5.distill import DistillOptions, new_draft

import mlx.core as mx
import pytest
from checkpoints import opened
from conftest import V1_0, edit_json, write_checkpoint
from families import write_family


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    source = tmp_path_factory.mktemp("source") / "source"
    write_checkpoint(source, V1_0 | {"d_model": 64, "d_ff": 128}, spiece)
    return source


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_reported_sizes_are_those_written(source: Path) -> None:
    ways = [{}, {"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantize": 8}, {"quantize": 4}]
    for reported, arguments in zip(inspect(str(source)).sizes, ways, strict=True):
        named = [f"--{name} {value}" for name, value in arguments.items()] or ["as it is"]
        assert reported.options == named[0]
        folder = convert(str(source), Path("out"), **arguments, force=True)  # type: ignore
        tensors = opened(folder).tensors.values()
        assert reported.file == sum(tensor.nbytes for tensor in tensors)
        overhead = (folder / "weights.npz").stat().st_size - reported.file
        assert 0 < overhead < 500 * len(tensors)
    quantized = inspect(str(folder))
    assert quantized.config.quantization and not quantized.sizes
    assert quantized.num_parameters == inspect(str(source)).num_parameters


def test_memory_to_run_is_weights_and_caches(source: Path) -> None:
    found = inspect(str(source))
    sources = load(source, dtype=mx.float32)[0].sources([[5] * 512])
    cross = sum(k.nbytes + v.nbytes for k, v in sources.layers)
    caches = cross // 512 * (512 + 256)
    assert cache_bytes(found.config, mx.float32) == caches
    assert found.sizes[0].memory["float32"] == 4 * found.num_parameters + caches


def test_drafts_share_the_tokenizer_and_are_smaller(source: Path, spiece: bytes) -> None:
    """Those that the target's folder names, or that were distilled for it, come first."""
    one = {"num_layers": 1, "num_decoder_layers": 1}
    for name, shape in (("small", one), ("tiny", one | {"d_ff": 20})):
        write_checkpoint(Path(name), V1_0 | shape, spiece)
        convert(name)
    convert(str(source), Path("weights/itself"))
    write_family(Path("other"), "byt5")
    convert("other")
    Path("weights/broken").mkdir()
    Path("weights/broken/weights.npz").write_text("")
    found = inspect(str(source))
    assert [path.name for path, _ in found.drafts] == ["tiny", "small"]
    assert found.drafts[1][1] == inspect("small").num_parameters < found.num_parameters
    target: Any = load("itself")[0]
    save_draft(Path("weights/shared"), new_draft(target, DistillOptions(layers=3)), "itself")
    edit_json(Path("weights/itself/config.json"), draft="small")
    listed = {model.folder.name: model.drafts for model in list_models()}
    assert listed["itself"] == ("small", "shared", "tiny")
    assert listed["small"] == ("tiny",) and listed["tiny"] == ()
