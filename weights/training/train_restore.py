"""Train a T5 that restores capitals and punctuation in German: a target to try `distill` on.

    python weights/training/train_restore.py --data deu.txt.xz --work runs/restore

Its shape differs from the shipped models' (gated, more decoder than encoder layers), and so does
its task. `runs/restore/restore-base` is then a checkpoint that `distill --model` can read, and
train.txt and valid.txt beside it have prompts. Half an hour on two cores; a run that was stopped
resumes. Needs torch.
"""

from __future__ import annotations

import lzma
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from corruption import DataOption, held_out
from train_correct import (
    Example,
    StepsOption,
    WorkOption,
    load_tokenizer,
    train,
    train_vocabulary,
)

PREFIX = "restore: "
NAME, PIECES = "restore-base", 4000
SHAPE = {"d_model": 256, "d_kv": 64, "num_heads": 4, "d_ff": 768,
         "num_layers": 3, "num_decoder_layers": 6,
         "vocab_size": 4096, "feed_forward_proj": "gated-gelu"}  # fmt: skip


def main(
    data: DataOption,
    work: WorkOption = Path("runs/restore"),
    steps: StepsOption = 1800,
    prompts: Annotated[int, typer.Option(help="Lines of train.txt.")] = 60_000,
) -> None:
    """Train the tokenizer and the model, and write prompts to distill with."""
    sentences, unseen = read_german(data)
    if not (work / "spiece.model").exists():
        pairs = islice(examples(sentences, seed=1), 40_000)
        train_vocabulary((line for pair in pairs for line in pair), work, PIECES)
    for name, source, count in (("train", sentences, prompts), ("valid", unseen, 500)):
        lines = (f"{prompt}\n" for prompt, _ in islice(examples(source, seed=4), count))
        (work / f"{name}.txt").write_text("".join(lines), encoding="utf-8")
    tokenizer = load_tokenizer(work)

    def encoded(offset: int) -> Iterator[Example]:
        for prompt, answer in examples(sentences, seed=2 + offset):
            yield tokenizer.encode(prompt, add_eos=True), tokenizer.encode(answer, add_eos=True)

    train(work / NAME, SHAPE, encoded, steps=steps)


def read_german(path: Path) -> tuple[list[str], list[str]]:
    """Read the unique German sentences of the pairs file: (training, held out by the English)."""
    train: dict[str, None] = {}
    unseen: dict[str, None] = {}
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            english, german = line.rstrip("\n").split("\t")[:2]
            (unseen if held_out(english) else train)[german] = None
    return list(train), [sentence for sentence in unseen if sentence not in train]


def examples(sentences: list[str], seed: int) -> Iterator[tuple[str, str]]:
    """Yield one to four sentences each, forever: (without capitals and punctuation, as written)."""
    rng = random.Random(seed)
    while True:
        count = rng.choices([1, 2, 3, 4], [50, 25, 15, 10])[0]
        text = " ".join(rng.choices(sentences, k=count))
        plain = " ".join(re.sub(r"[^\w\s]", " ", text.lower()).split())
        yield PREFIX + plain, text


if __name__ == "__main__":
    typer.run(main)
