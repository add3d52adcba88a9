"""A T5 split among processes computes what it computes in one, and each holds its part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints import save_draft
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.models import Quantization, T5Config
from speculative_t5.models.t5_parallel import check_divisible, shard

import pytest
from checkpoints import write_causal
from conftest import REPOSITORY, V1_0, V1_1, tiny_model, tiny_sharing, write_checkpoint
from messages import check_message
from ranks import Pair, ended, started

PROMPTS = 8
EVEN = {"num_heads": 4, "d_ff": 64, "d_model": 64, "d_kv": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "v1_0": V1_0 | EVEN,
    "v1_1": V1_1 | EVEN | {"num_decoder_layers": 2},
    "quantized": V1_1 | EVEN,
}


def run_ranks(size: int, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run tests/sharded.py in several processes; return what each has found."""
    command = [str(REPOSITORY / "tests" / "sharded.py"), *arguments]
    with started(folder, [command] * size) as processes:
        results = ended(processes)
    for code, _, errors in results:
        assert code == 0, errors
    return [json.loads(output.splitlines()[-1]) for _, output, _ in results]


@pytest.mark.cpu
@pytest.mark.parametrize("kind", SHAPES)
def test_processes_that_share_a_model_give_its_outputs(
    kind: str, tmp_path: Path, spiece: bytes
) -> None:
    folder, draft = tmp_path / kind, tmp_path / "draft"
    write_checkpoint(folder, SHAPES[kind], spiece, seed=3)
    write_checkpoint(draft, V1_0, spiece, seed=4)
    if kind == "quantized":
        folder = convert(str(folder), tmp_path / "small", quantize=8, group_size=32)
    sharing = tiny_sharing(load(folder)[0], layers=1, noise=0.01)
    save_draft(tmp_path / "sharing", sharing, "target")
    size, arguments = 2, ("--sharing", str(tmp_path / "sharing"), "--prompts", f"{PROMPTS}")
    found = run_ranks(size, tmp_path, str(folder), str(draft), *arguments)
    assert [one["rank"] for one in found] == [*range(size)]
    for one in found:
        assert one["size"] == size and one["differ"] == []
        assert one["gap"] < 1e-5 * max(1.0, one["scale"])
        assert one["share"] < 0.4 + 0.6 / size
        assert one["outputs"] == found[0]["outputs"]
        assert set(one["same"].values()) == {PROMPTS + 1}, one["same"]


@pytest.mark.cpu
def test_all_processes_follow_the_first_where_they_round_differently(
    tmp_path: Path, spiece: bytes
) -> None:
    folder, draft = tmp_path / "target", tmp_path / "draft"
    write_checkpoint(folder, SHAPES["v1_0"], spiece, seed=3)
    write_checkpoint(draft, V1_0, spiece, seed=4)
    first, second = run_ranks(
        2, tmp_path, str(folder), str(draft), "--prompts", "6", "--round-differently"
    )
    assert second["outputs"] == first["outputs"]
    assert set(first["same"].values()) == {6 + 1}, first["same"]


@pytest.mark.parametrize(
    ("changes", "size", "named"),
    [
        ({"num_heads": 3}, 2, "num_heads is 3"),
        ({"num_heads": 4, "d_ff": 30}, 4, "d_ff is 30"),
        ({"quantization": {"bits": 8, "group_size": 64}, "d_ff": 64}, 2, "d_ff is 64, quantized"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(
    changes: dict[str, Any], size: int, named: str
) -> None:
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_heads": 4, "num_layers": 1,
             "num_decoder_layers": 1, "vocab_size": 40}  # fmt: skip
    if "quantization" in changes:
        changes = changes | {"quantization": Quantization(**changes["quantization"])}
    with pytest.raises(ValueError) as caught:
        check_divisible(T5Config(**shape | changes), size)
    check_message(str(caught.value), named)


def test_a_draft_or_a_decoder_only_model_cannot_be_split(tmp_path: Path) -> None:
    write_causal(tmp_path)
    with pytest.raises(ValueError) as caught:
        load(tmp_path, group=Pair())  # type: ignore[call-overload]
    check_message(str(caught.value), "only a T5")


@pytest.mark.parametrize(
    ("options", "named"),
    [({"num_draft": "auto"}, "num_draft 'auto'"), ({"steady": True}, "steady passes")],
)
def test_processes_that_share_a_model_do_not_go_by_what_each_measures(
    options: dict[str, Any], named: str
) -> None:
    model = tiny_model()
    model.num_processes = 2
    with pytest.raises(ValueError) as caught:
        SpeculativeDecoder(model, tiny_model(seed=1), **options)
    check_message(str(caught.value), named)


def test_a_model_is_split_once() -> None:
    model = tiny_model()
    model.num_processes = 2
    with pytest.raises(ValueError) as caught:
        shard(model, Pair())  # type: ignore[arg-type]
    check_message(str(caught.value), "split among 2 processes")
