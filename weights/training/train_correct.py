r"""Train the correction pair: a target, and a draft that learns from the target's outputs.

The steps, in order. Each can be stopped and run again; training resumes at its last checkpoint:

    python weights/training/train_correct.py vocabulary --data deu.txt.xz --work runs
    python weights/training/train_correct.py target     --data deu.txt.xz --work runs
    python weights/training/train_correct.py draft      --data deu.txt.xz --work runs
    python weights/training/train_correct.py teach      --data deu.txt.xz --work runs
    python weights/training/train_correct.py distill    --data deu.txt.xz --work runs

`runs/correct-base` and `runs/correct-small` are then checkpoints for convert.py. Needs torch.

The shipped weights/correct-base is trained further on learners' errors and on text
with any character by

    python weights/training/train_correct.py learners   --data deu.txt.xz --work runs/learners

or with another folder as --start-from. `runs/learners/correct-base` is then for convert.py, and
what that writes can be trained further in the same way, with another --work; `--keep 0.3` makes the
result a mean with the weights before, and `--caution 0.6` leaves errors in the targets that it is
not sure how to correct (see `caution`). `--technical FILE` and `--stories FILE`, each once or more,
add examples from edited prose (see `prose`). weights/correct-small learns from it:

    python weights/training/train_correct.py learners   --data deu.txt.xz --work runs/small \
        --start-from weights/correct-small --teacher runs/learners/correct-base
"""

import io
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import sentencepiece as spm
import torch
import typer
from corruption import Corruptor, DataOption, read_sentences, training_examples
from learner_errors import Learner, mixed_examples, read_german
from transformers import T5Config, T5ForConditionalGeneration
from transformers.optimization import Adafactor

PIECES, VOCAB_SIZE = 3000, 3200
TOKENS, POOL = 4400, 4096  # of a step, padding included; examples that are sorted together
SHAPES = {
    "correct-base": {"d_model": 384, "d_kv": 64, "num_heads": 6, "d_ff": 1536,
                     "num_layers": 6, "num_decoder_layers": 6},
    "correct-small": {"d_model": 192, "d_kv": 32, "num_heads": 6, "d_ff": 768,
                      "num_layers": 4, "num_decoder_layers": 1},
}  # fmt: skip

Example = tuple[list[int], list[int]]  # source and target ids, EOS included
StepsOption = Annotated[int, typer.Option(help="Optimizer steps.")]
WorkOption = Annotated[Path, typer.Option(help="Folder for checkpoints and results.")]

app = typer.Typer(help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def vocabulary(data: DataOption, work: WorkOption = Path("runs")) -> None:
    """Train the SentencePiece model on damaged and clean text, in T5's layout."""
    sentences, _ = read_sentences(data)
    examples = islice(training_examples(sentences, Corruptor(sentences), seed=1), 60_000)
    work.mkdir(parents=True, exist_ok=True)
    stored = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=(line for pair in examples for line in pair),
        model_writer=stored,
        vocab_size=PIECES,
        model_type="unigram",
        character_coverage=1.0,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=1,
    )
    (work / "spiece.model").write_bytes(stored.getvalue())


@app.command()
def target(data: DataOption, work: WorkOption = Path("runs"), steps: StepsOption = 3800) -> None:
    """Train correct-base on freshly damaged sentences."""
    train(work / "correct-base", SHAPES["correct-base"], damaged(data, work, seed=2), steps=steps)


@app.command()
def prompts(
    data: DataOption,
    work: WorkOption = Path("runs"),
    count: Annotated[int, typer.Option(help="Prompts to train on.")] = 100_000,
    answers: Annotated[
        bool, typer.Option("--answers", help="Add the right sentences as completions.")
    ] = False,
    mixed: Annotated[
        bool, typer.Option("--mixed", help="Write those that `learners` trains on.")
    ] = False,
) -> None:
    """Write prompts for `speculative_t5 distill --data`, train and valid, to work/prompts."""
    sentences, unseen = read_sentences(data)
    corruptor, folder = Corruptor(sentences), work / "prompts"
    folder.mkdir(parents=True, exist_ok=True)
    examples = partial(training_examples, corruptor=corruptor)
    if mixed:
        learner = Learner(sentences, read_german(data))
        examples = partial(mixed_examples, learner, corruptor)
    parts = {
        "train": islice(examples(sentences, seed=21 if answers else 6), count),
        "valid": islice(examples(unseen, seed=6), 200),
    }
    for name, pairs in parts.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for prompt, answer in pairs:
                record = {"prompt": prompt}
                if answers and name == "train":
                    record["completion"] = answer
                file.write(json.dumps(record) + "\n")


@app.command()
def draft(data: DataOption, work: WorkOption = Path("runs"), steps: StepsOption = 2500) -> None:
    """Train correct-small on freshly damaged sentences; `distill` finishes it."""
    examples = damaged(data, work, seed=3)
    train(work / "correct-small", SHAPES["correct-small"], examples, steps=steps)


@app.command()
def teach(
    data: DataOption,
    work: WorkOption = Path("runs"),
    examples: Annotated[int, typer.Option(help="Training examples to answer.")] = 90_000,
) -> None:
    """Write the target's greedy outputs on training examples, for `distill`."""
    sentences, _ = read_sentences(data)
    answers = work / "taught.jsonl"
    done = sum(1 for _ in answers.open()) if answers.exists() else 0
    pairs = list(islice(training_examples(sentences, Corruptor(sentences), seed=4), examples))
    tokenizer = load_tokenizer(work)
    model = T5ForConditionalGeneration.from_pretrained(work / "correct-base").eval()
    with answers.open("a") as file, torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for start in range(done, examples, 512):
            rows = [tokenizer.encode(s, add_eos=True) for s, _ in pairs[start : start + 512]]
            order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
            outputs: dict[int, list[int]] = {}
            for first in range(0, len(order), 64):
                chunk = order[first : first + 64]
                ids, mask = pad([rows[i] for i in chunk], 0)
                produced = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=ids.shape[1] + 8,
                    do_sample=False,
                    num_beams=1,
                ).tolist()
                for i, row in zip(chunk, produced, strict=True):
                    row = row[1:]
                    if 1 in row:
                        outputs[i] = row[: row.index(1) + 1]
            for i, source in enumerate(rows):
                record = {"source": source, "target": outputs.get(i)}
                file.write(json.dumps(record) + "\n")
            file.flush()
            print(f"taught {start + len(rows)} / {examples}", flush=True)


@app.command()
def distill(data: DataOption, work: WorkOption = Path("runs"), steps: StepsOption = 1600) -> None:
    """Finish correct-small on the target's greedy outputs (sequence-level distillation)."""
    with (work / "taught.jsonl").open() as file:
        records = [json.loads(line) for line in file]
    encoded = [(r["source"], r["target"]) for r in records if r["target"]]

    def shuffled(offset: int) -> Iterator[Example]:
        rng = random.Random(5 + offset)
        while True:
            yield from rng.sample(encoded, len(encoded))

    folder = work / "correct-small"
    train(folder, SHAPES["correct-small"], shuffled, steps=steps, stage="distill", rate=5e-3)


@app.command()
def learners(
    data: DataOption,
    work: WorkOption = Path("runs/learners"),
    start_from: Annotated[Path, typer.Option(help="Converted folder to start from.")] = Path(
        "weights/correct-base"
    ),
    minutes: Annotated[float, typer.Option(help="Minutes to train, in all runs.")] = 60.0,
    rate: Annotated[float, typer.Option(help="Adafactor's relative rate.")] = 8e-3,
    every: Annotated[float, typer.Option(help="Minutes between checkpoints.")] = 10.0,
    tokens: Annotated[int, typer.Option(help="Tokens of a step, padding included.")] = TOKENS,
    autocast: Annotated[bool, typer.Option(help="Multiply in bfloat16.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Compile the model first, for some minutes.")
    ] = False,
    teacher: Annotated[
        Path | None, typer.Option(help="Checkpoint whose distributions to learn.")
    ] = None,
    caution: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Leave an error whose correction is less probable than this."
        ),
    ] = 0.0,
    keep: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the weights to start from in the result's."),
    ] = 0.0,
    technical: Annotated[
        list[Path] | None, typer.Option(help="Edited technical text, a paragraph a line.")
    ] = None,
    stories: Annotated[
        list[Path] | None, typer.Option(help="Edited stories, a paragraph a line.")
    ] = None,
) -> None:
    """Train a converted correct-base or correct-small further, on learners' errors."""
    from further_training import train_further

    train_further(
        data,
        work,
        start_from,
        minutes=minutes,
        rate=rate,
        every=every,
        tokens=tokens,
        autocast=autocast,
        compiled=compiled,
        teacher=teacher,
        caution=caution,
        keep=keep,
        technical=technical or (),
        stories=stories or (),
    )


def damaged(data: Path, work: Path, *, seed: int) -> Callable[[int], Iterator[Example]]:
    """Return a function that yields freshly damaged sentences forever, different by offset."""
    sentences, _ = read_sentences(data)
    corruptor, tokenizer = Corruptor(sentences), load_tokenizer(work)

    def encoded(offset: int) -> Iterator[Example]:
        for source, answer in training_examples(sentences, corruptor, seed + offset):
            yield tokenizer.encode(source, add_eos=True), tokenizer.encode(answer, add_eos=True)

    return encoded


def load_tokenizer(work: Path) -> spm.SentencePieceProcessor:
    return spm.SentencePieceProcessor(model_file=str(work / "spiece.model"))


def pad(rows: list[list[int]], value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows on the right to one length: (ids, mask), both (B, L) int64."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [value] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def batches(
    examples: Iterator[Example], seed: int, *, tokens: int = TOKENS, forever: bool = True
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield batches of similar lengths and at most `tokens` padded ones: (ids, mask, labels)."""
    rng = random.Random(seed)
    while True:
        pool = sorted(islice(examples, POOL), key=lambda e: (len(e[0]), len(e[1])))
        groups: list[list[Example]] = [[]]
        for example in pool:
            group = groups[-1]
            longest = [max(len(e[k]) for e in [*group, example]) for k in (0, 1)]
            if group and (len(group) + 1) * sum(longest) > tokens:
                groups.append([])
            groups[-1].append(example)
        rng.shuffle(groups)
        for group in groups:
            ids, mask = pad([source for source, _ in group], 0)
            labels, _ = pad([answer for _, answer in group], -100)
            yield ids, mask, labels
        if not forever:
            return


def train(
    folder: Path,
    shape: Mapping[str, Any],
    examples: Callable[[int], Iterator[Example]],
    *,
    steps: int,
    stage: str = "train",
    rate: float = 2e-2,
) -> None:
    """Train with Adafactor, a short warm-up and a linear decay to 0; write a checkpoint's folder.

    The tokenizer lies beside that folder. A run that was stopped resumes at its last checkpoint,
    with examples it has not seen.
    """
    torch.manual_seed(0)
    checkpoint = folder.with_name(f"{folder.name}-{stage}.pt")
    if stage == "distill":
        model = T5ForConditionalGeneration.from_pretrained(folder)
    else:
        model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCAB_SIZE,
                feed_forward_proj="relu",
                dropout_rate=0.0,
                decoder_start_token_id=0,
                pad_token_id=0,
                eos_token_id=1,
                **shape,
            )
        )
    model.train()
    optimizer = Adafactor(
        model.parameters(), lr=rate, scale_parameter=True, relative_step=False, warmup_init=False
    )
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    print(f"{folder.name}: {sum(p.numel() for p in model.parameters()):,} parameters, step {first}")
    source = batches(examples(first), seed=first)
    started, seen, running = time.perf_counter(), 0, 0.0
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 100) * (1 - step / steps)
        ids, mask, labels = next(source)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += ids.numel() + labels.numel()
        running += loss.item()
        if (step + 1) % 50 == 0:
            speed = seen / (time.perf_counter() - started)
            print(f"step {step + 1} loss {running / 50:.4f} {speed:.0f} tokens/s", flush=True)
            running = 0.0
        if (step + 1) % 250 == 0 or step + 1 == steps:
            save_checkpoint(checkpoint, model, optimizer, step + 1)
    model.generation_config.max_length = None
    model.save_pretrained(folder)
    shutil.copy(folder.with_name("spiece.model"), folder / "spiece.model")


def save_checkpoint(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    *,
    seconds: float = 0.0,
) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state | {"seconds": seconds}, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


if __name__ == "__main__":
    app()
