r"""Train small pairs for other tasks than correction, in about half an hour on one busy core each.

    python weights/training/train_tasks.py restore --data prose
    python weights/training/train_tasks.py words   --data tatoeba --draft separate

`--data` is a folder of English text in files (.txt, or .txt.xz), one text per line; what follows a
tab is left out, so that the file which weights/README.md names will do. The tasks:

- `restore`: put back capitals and punctuation;
- `words`: add words that are missing.

Afterwards `runs/restore-base` is the target, which names its draft, `runs/restore-draft`: one that
`speculative-t5 distill` makes, or with `--draft separate` a small T5 with an encoder of its own,
which learns the target's distributions. `runs/restore-prompts.txt` has prompts that neither has
seen: texts are held out by their hash (see `corruption.held_out`). A run that was stopped resumes.

All of them begin with weights of correct-small, which can copy English already, but have other
numbers of layers. Needs torch. To see how good "auto" is with a pair:

    python scripts/benchmarks/compare_lengths.py --model runs/restore-base \
        --prompts runs/restore-prompts.txt
"""

import json
import lzma
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from speculative_t5.checkpoints import convert

import torch
import typer
from corruption import DROPPABLE, bare, held_out
from further_training import Run, encode, start
from train_correct import Example, load_tokenizer
from transformers import T5ForConditionalGeneration

FIRST_WEIGHTS = Path(__file__).parents[1] / "correct-small"
RATE, STEP_TOKENS = 8e-3, 3000  # of Adafactor; of a step, padding included
JUDGED, PROMPTS = 150, 200  # held-out examples for the loss, and for measuring
LONGEST = 200  # characters of a text
LEGIBLE = re.compile(r"[ -~äöüßéèàçñ‘’“”–—…]+")
ADDED = 0.2  # what layers that are added begin with, by the outputs of the layer before

DraftKind = Literal["distilled", "separate"]
TaskName = Literal["restore", "words"]


@dataclass(frozen=True)
class Layers:
    """How many a model has."""

    encoder: int
    decoder: int


@dataclass(frozen=True)
class Task:
    """What a target learns: `prompt_of` makes a prompt of a text that is right."""

    prompt_of: Callable[[str, random.Random], str]
    target: Layers
    draft: Layers = Layers(2, 1)  # if it is a separate one


def without_capitals(text: str, rng: random.Random) -> str:
    """Take capitals and punctuation away."""
    return " ".join(re.sub(r"[^\w\s]", " ", text).lower().split())


def without_words(text: str, rng: random.Random) -> str:
    """Leave out half of the words that grammar requires."""
    words = text.split()
    return " ".join(word for word in words if bare(word) not in DROPPABLE or rng.random() < 0.5)


TASKS = {
    "restore": Task(without_capitals, Layers(4, 6)),
    "words": Task(without_words, Layers(4, 3)),
}


def train_pair(
    task: Annotated[TaskName, typer.Argument(help="What to learn.")],
    data: Annotated[Path, typer.Option(help="Folder of texts, .txt or .txt.xz, one a line.")],
    work: Annotated[Path, typer.Option(help="Folder for the pair.")] = Path("runs"),
    minutes: Annotated[float, typer.Option(help="Minutes to train the target.")] = 18.0,
    draft: Annotated[
        DraftKind, typer.Option(help="A draft that shares the target's encoder, or has its own.")
    ] = "distilled",
    draft_minutes: Annotated[float, typer.Option(help="Minutes to make the draft.")] = 10.0,
    prompts: Annotated[int, typer.Option(help="Prompts to distill with.")] = 12_000,
) -> None:
    pair = Pair(task, data, work)
    pair.train("base", TASKS[task].target, minutes)
    if draft == "separate":
        pair.train("draft", TASKS[task].draft, draft_minutes, teacher=pair.training / "base")
    else:
        pair.distill(prompts, draft_minutes)
    pair.name_draft()


class Pair:
    """The texts and the folders of a pair."""

    def __init__(self, task: TaskName, data: Path, work: Path) -> None:
        self._name, self._prompt_of, self._work = task, TASKS[task].prompt_of, work
        texts = list(dict.fromkeys(read_texts(data)))
        self._seen = [text for text in texts if not held_out(text)]
        self._unseen = [text for text in texts if held_out(text)]
        if not self._unseen:
            raise ValueError(f"{len(texts)} texts in {data} are too few: none is held out")
        print(f"{len(self._seen):,} texts to train on, {len(self._unseen):,} held out")
        self.training = work / f"{task}-training"
        self.training.mkdir(parents=True, exist_ok=True)
        self._tokenizer = load_tokenizer(FIRST_WEIGHTS)
        self._write_prompts(work / f"{task}-prompts.txt", self._unseen, PROMPTS, seed=2)

    def folder(self, part: str) -> Path:
        """Return the folder of the target, "base", or of the draft, "draft"."""
        return self._work / f"{self._name}-{part}"

    def train(
        self, part: str, layers: Layers, minutes: float, *, teacher: Path | None = None
    ) -> None:
        """Train a model on examples, or on a teacher's distributions, and convert it."""
        if self.folder(part).exists():
            return
        checkpoint, trained = self.training / f"{part}.pt", self.training / part
        state = torch.load(checkpoint) if checkpoint.exists() else None
        torch.manual_seed(0)
        model = reshaped(start(FIRST_WEIGHTS, self._tokenizer.get_piece_size()), layers)
        size = sum(weights.numel() for weights in model.parameters())
        print(f"{self.folder(part).name}: {size:,} parameters", flush=True)
        run = Run(model, rate=RATE, minutes=minutes, autocast=True, state=state)
        if teacher is not None:
            run.teacher = T5ForConditionalGeneration.from_pretrained(teacher).eval()
        judged = {"all": list(islice(self._encoded(self._unseen, 3), JUDGED))}

        def examples() -> Iterator[Example]:
            return self._encoded(self._seen, run.step + 4)

        run.train(examples, judged, checkpoint, every=3.0, batch=STEP_TOKENS)
        model.generation_config.max_length = None
        model.save_pretrained(trained)
        shutil.copy(FIRST_WEIGHTS / "spiece.model", trained)
        convert(str(trained), self.folder(part))

    def distill(self, count: int, minutes: float) -> None:
        """Make a draft of the target by `speculative-t5 distill`, which resumes by itself."""
        if self.folder("draft").exists():
            return
        prompts = self.training / "prompts.txt"
        if not prompts.exists():
            self._write_prompts(prompts, self._seen, count, seed=5)
        command = [sys.executable, "-m", "speculative_t5", "distill", "--data", prompts]
        command += ["--model", self.folder("base"), "--output", self.folder("draft")]
        subprocess.run([*command, "--minutes", str(minutes)], check=True)

    def name_draft(self) -> None:
        """Make the draft the target's default."""
        path = self.folder("base") / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["draft"] = self.folder("draft").name
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _examples(self, texts: Sequence[str], seed: int) -> Iterator[tuple[str, str]]:
        """Yield prompts and answers of one to three texts forever."""
        rng = random.Random(seed)
        while True:
            count = rng.choices([1, 2, 3], [40, 40, 20])[0]
            right = [rng.choice(texts) for _ in range(count)]
            prompt = " ".join(self._prompt_of(text, rng) for text in right)
            if prompt:
                yield prompt, " ".join(right)

    def _encoded(self, texts: Sequence[str], seed: int) -> Iterator[Example]:
        for example in self._examples(texts, seed):
            yield encode(self._tokenizer, example)

    def _write_prompts(self, path: Path, texts: Sequence[str], count: int, *, seed: int) -> None:
        prompts = [prompt for prompt, _ in islice(self._examples(texts, seed), count)]
        path.write_text("".join(f"{prompt}\n" for prompt in prompts), encoding="utf-8")


def reshaped(model: T5ForConditionalGeneration, layers: Layers) -> T5ForConditionalGeneration:
    """Return a model of other numbers of layers: the first ones, and copies of the decoder's last.

    Copies add little at first; with nothing to begin with, Adafactor would hardly change them.
    """
    config = deepcopy(model.config)
    config.num_layers, config.num_decoder_layers = layers.encoder, layers.decoder
    found, size = T5ForConditionalGeneration(config), len(model.decoder.block)
    found.load_state_dict(model.state_dict(), strict=False)
    for block in found.decoder.block[size:]:
        block.load_state_dict(model.decoder.block[-1].state_dict(), strict=False)
        attention, cross, feed_forward = block.layer
        for outputs in (
            attention.SelfAttention.o,
            cross.EncDecAttention.o,
            feed_forward.DenseReluDense.wo,
        ):
            outputs.weight.data *= ADDED
    return found


def read_texts(folder: Path) -> Iterator[str]:
    """Yield the sentences of a folder's files that have words, and no unusual characters."""
    paths = sorted([*folder.glob("*.txt"), *folder.glob("*.txt.xz")])
    if not paths:
        raise ValueError(f"{folder} has no file that ends in .txt or .txt.xz")
    for path in paths:
        opener = lzma.open if path.suffix == ".xz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            for line in file:
                text = line.rstrip("\n").partition("\t")[0]
                for sentence in re.split(r"(?<=[.!?]) +(?=[A-Z“])", text):
                    if sentence.count(" ") > 2 and is_legible(sentence):
                        yield sentence


def is_legible(text: str) -> bool:
    return len(text) <= LONGEST and bool(LEGIBLE.fullmatch(text))


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(train_pair)
    app()
