"""Compare beam searches with transformers' on a random model of every family, in float32.

    python scripts/checks/compare_beams.py               # an hour or more on one core

50 prompts for 2, 4 and 8 beams with each length penalty and each early_stopping; tokens, why an
output ended, and scores to 1e-4, of every hypothesis. Prints what differs, and a line a family.
`tests/test_beams.py` runs a selection. Needs torch and transformers.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from speculative_t5.decoding import BeamOptions

from beams import CAUSAL, load_both, random_prompts, reference_search, search
from families import FAMILIES

BEAMS, STOPPING, PENALTIES = (2, 4, 8), (False, True, "never"), (0.0, 1.0, 2.0, -0.5)
MAX_TOKENS = 12


def main(
    family: Annotated[list[str] | None, typer.Option(help="Families; all by default.")] = None,
    count: Annotated[int, typer.Option(help="Prompts a setting.")] = 50,
) -> None:
    different = 0
    for name in family or [*FAMILIES, *CAUSAL]:
        different += compare(name, count)
    if different:
        raise SystemExit(f"{different} searches differ: see above")


def compare(name: str, count: int) -> int:
    """Run a family's searches; return how many differ."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        reference, model = load_both(Path(folder), name)
    prompts = random_prompts(model, count)
    searches = different = ended = 0
    largest = 0.0
    for num_beams, stopping, penalty in itertools.product(BEAMS, STOPPING, PENALTIES):
        options = BeamOptions(num_beams, penalty, stopping, num_beams)
        found = search(model, prompts, options, MAX_TOKENS)
        expected = reference_search(reference, prompts, options, MAX_TOKENS)
        for prompt, result, theirs in zip(prompts, found, expected, strict=True):
            ours = result.hypotheses
            gaps = [abs(a.score - b.score) for a, b in zip(ours, theirs, strict=True)]
            same = [(h.tokens, h.finish_reason) for h in ours] == [
                (h.tokens, h.finish_reason) for h in theirs
            ]
            searches += 1
            ended += sum(h.finish_reason == "eos" for h in theirs)
            if same and max(gaps) < 1e-4:
                largest = max(largest, *gaps)
                continue
            different += 1
            print(f"  {name} {options} {prompt}: {ours} here, {theirs} by transformers")
    print(
        f"{name}: {different} of {searches} searches differ, largest difference of a score "
        f"{largest:.0e}, {ended} hypotheses end by EOS",
        flush=True,
    )
    return different


if __name__ == "__main__":
    typer.run(main)
