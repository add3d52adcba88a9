"""Compare models that are split among processes with whole ones, in float32.

    python scripts/checks/compare_sharded.py                 # 2 processes, 200 prompts
    python scripts/checks/compare_sharded.py --processes 4

Random models of T5 v1.0, v1.1 and one quantized to 8 bits, with prompts of random ids: the largest
difference of a logit, and how many outputs are the same, greedy and sampled, with every kind of
draft, in batches whose rows are refilled. `--model` and `--draft-model` take others instead.
`tests/test_sharding.py` runs a selection. All processes are on this machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from speculative_t5.checkpoints import convert, load, save_draft

from conftest import V1_0, V1_1, tiny_sharing, write_checkpoint
from families import train_spiece
from ranks import ended, started

SHARDED = Path(__file__).parents[2] / "tests" / "sharded.py"
EVEN = {"num_heads": 4, "d_ff": 128, "d_model": 64, "d_kv": 32}
SHAPES = {"v1.0": V1_0 | EVEN, "v1.1": V1_1 | EVEN | {"num_decoder_layers": 2}}


def main(
    processes: Annotated[int, typer.Option(help="Processes to split each model among.")] = 2,
    prompts: Annotated[int, typer.Option(help="Random prompts.")] = 200,
    batch_size: Annotated[int, typer.Option(help="Prompts to decode side by side.")] = 25,
    model: Annotated[str | None, typer.Option(help="A target, instead of random ones.")] = None,
    draft_model: Annotated[str, typer.Option(help="Its draft.")] = "correct-small",
    sharing: Annotated[str | None, typer.Option(help="A draft that shares its encoder.")] = None,
) -> None:
    side_by_side = ("--batch-size", f"{batch_size}")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if model is not None:
            with_sharing = ("--sharing", sharing) if sharing else ()
            drafts = (draft_model, *with_sharing)
            compare(model, place, processes, prompts, model, *drafts, *side_by_side)
            return
        spiece = train_spiece(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
        write_checkpoint(place / "draft", V1_0, spiece, seed=4)
        for name, shape in SHAPES.items():
            write_checkpoint(place / name, shape, spiece, seed=3)
        convert(str(place / "v1.1"), place / "8 bits", quantize=8, group_size=32)
        for name in (*SHAPES, "8 bits"):
            draft = place / f"{name} draft"
            save_draft(draft, tiny_sharing(load(place / name)[0], layers=1, noise=0.01), name)
            compare(
                name, place, processes, prompts, str(place / name), str(place / "draft"),
                "--sharing", str(draft), *side_by_side,
            )  # fmt: skip


def compare(name: str, place: Path, processes: int, prompts: int, *arguments: str) -> None:
    """Print a line about a model; raise if anything differs."""
    command = [str(SHARDED), *arguments, "--prompts", f"{prompts}"]
    with started(place, [command] * processes) as running:
        results = ended(running, 3600)
    for code, _, errors in results:
        if code:
            raise RuntimeError(errors)
    found = [json.loads(output.splitlines()[-1]) for _, output, _ in results]
    gap = max(one["gap"] / max(1.0, one["scale"]) for one in found)
    fewest = min(count for one in found for count in one["same"].values())
    settings, share = len(found[0]["same"]), found[0]["share"]
    print(
        f"{name}, {processes} processes: logits differ by {gap:.1e} at most; in each of {settings} "
        f"settings at least {fewest} of {prompts + 1} outputs are the same; a process holds "
        f"{share:.2f} of the weights",
        flush=True,
    )
    alike = all(one["outputs"] == found[0]["outputs"] for one in found)
    if not alike or fewest <= prompts or gap > 1e-5 or any(one["differ"] for one in found):
        raise SystemExit(f"{name}: something differs")


if __name__ == "__main__":
    typer.run(main)
