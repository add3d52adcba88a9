"""Measure what it costs to check a text again after an edit, as an editor does.

    python scripts/benchmarks/measure_edits.py
    python scripts/benchmarks/measure_edits.py --edits 60 --words 500 --model correct-base

Two servers of the same model check a text of learners' sentences, each in a process of its own: one
keeps the outputs of sentences, the other (`--sentence-cache 0`) does not. Then one word is changed
at a random place, and the text is checked again, as often as there are `edits`. The servers take
turns. Both have checked another text before. Ends with exit code 1 if two answers differ.

Needs `pip install ".[compare,serve]"`.
"""

import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

REPOSITORY = Path(__file__).parents[2]
LEARNERS = REPOSITORY / "tests" / "learners.tsv"  # sentences of learners, a tab, their corrections
WRITTEN = "the has goes, very house, have a of in which were there".split()
SECONDS = 300.0  # for an answer
KEPT, NOT_KEPT = "kept", "not kept"


@contextlib.contextmanager
def served(model: str, *options: str) -> Iterator[httpx.Client]:
    """Run the command for the block, with a client of it, once the model is there."""
    command = [sys.executable, "-m", "speculative_t5", "serve", "--port", "0", "--model", model]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, cwd=REPOSITORY, text=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with httpx.Client(base_url=address, timeout=SECONDS) as client:
            while client.get("/health").status_code != 200:
                time.sleep(0.1)
            yield client
    finally:
        process.terminate()
        process.wait()


def checked(client: httpx.Client, text: str) -> tuple[float, Any]:
    """Return the seconds that a check took, and its answer."""
    began = time.perf_counter()
    answer = client.post("/v2/check", data={"text": text, "language": "en"})
    seconds = time.perf_counter() - began
    answer.raise_for_status()
    return seconds, answer.json()


def main(
    model: Annotated[str, typer.Option(help="Folder or name of the model.")] = "correct-base",
    words: Annotated[int, typer.Option(min=10, help="Words of the text.")] = 500,
    edits: Annotated[int, typer.Option(min=1, help="Edits, each checked.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of the text and of its edits.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Measure checks of a text as it is edited, with outputs kept and without."""
    draw = random.Random(seed)
    lines = [line.split("\t")[0] for line in LEARNERS.read_text("utf-8").splitlines()]
    draw.shuffle(lines)
    some = " ".join(lines).split()
    text, other = some[:words], some[words : 2 * words] or some[::-1]
    seconds: dict[str, list[float]] = {KEPT: [], NOT_KEPT: []}
    with served(model) as first, served(model, "--sentence-cache", "0") as second:
        servers = {KEPT: first, NOT_KEPT: second}
        for client in servers.values():
            checked(client, " ".join(other))
        for _ in range(1 + edits):
            answers = []
            for name, client in draw.sample([*servers.items()], 2):
                took, answer = checked(client, " ".join(text))
                seconds[name].append(took)
                answers.append(answer)
            if answers[0] != answers[1]:
                raise SystemExit("the answers of the two servers differ")
            text[draw.randrange(len(text))] = draw.choice(WRITTEN)
    if as_json:
        print(json.dumps({"words": words, "edits": edits, "seconds": seconds}))
        return
    print(f"{model}, {len(text)} words, {edits} edits; seconds of a check")
    print(f"{'outputs':10}{'first':>8}{'edited, median':>16}{'longest':>9}{'over the first':>16}")
    for name, (begun, *later) in seconds.items():
        middle = statistics.median(later)
        share = f"{middle / begun:.3f} to {max(later) / begun:.3f}"
        print(f"{name:10}{begun:8.2f}{middle:16.3f}{max(later):9.3f}{share:>16}")


if __name__ == "__main__":
    typer.run(main)
