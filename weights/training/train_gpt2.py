"""Train a pair of GPT-2s, of 30 and 3 million parameters, in about an hour of two cores.

    python weights/training/train_gpt2.py --text technical.txt.xz --output causal-gpt2

The folder then holds `target` and `draft`, checkpoints as transformers saves them, and
`held-out.txt`, the end of the text, which neither model has seen. Torch trains them, with products
in bfloat16, in a fifth of the time that MLX takes on a CPU. A run that is stopped goes on from the
last hundred steps. Needs `pip install torch transformers`.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from documents import HELD_OUT_FILE, read_documents
from train_causal import CONTEXT, END, check_replaceable, prepare
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

WINDOWS = 8  # in a step
PIECES = 4096  # of the vocabulary
RATE = 1e-3  # the largest learning rate
WARM_UP = 0.05  # the share of a run before it
REPORT = 100  # steps between two lines, and between two checkpoints
MAX_READ = 30_000_000  # characters of a file
PARTIAL = "partial.pt"  # what a stopped run goes on from
# Few wide layers for the draft: each layer costs a pass as much time as its launches take.
SIZES = {
    "target": {"n_embd": 512, "n_layer": 9, "n_head": 8},
    "draft": {"n_embd": 256, "n_layer": 2, "n_head": 4},
}


def main(
    text: Annotated[list[Path], typer.Option(help="A file to train on, plain or .xz; repeatable.")],
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("causal-gpt2"),
    steps: Annotated[int, typer.Option(min=1, help="Steps for each model.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="The same gives the same weights.")] = 0,
) -> None:
    """Train both models and write them."""
    try:
        check_replaceable(output)
        train_pair(read_documents(text, MAX_READ), output, steps, seed)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def train_pair(
    documents: Sequence[str],
    output: Path,
    steps: int,
    seed: int,
    *,
    pieces: int = PIECES,
    sizes: dict[str, dict[str, int]] = SIZES,
) -> None:
    """Train a tokenizer and both models on all but the end of the text, and write them."""
    tokenizer, seen, unseen, held_out = prepare(documents, pieces)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    for name, size in sizes.items():
        model = make_model(size, len(fast), fast.eos_token_id, seed)
        print(f"{name}: {model.num_parameters():,} parameters", flush=True)
        train(model, seen, steps, seed, output / name)
        print(f"{name}: held-out loss {mean_loss(model, unseen):.3f} nats a token", flush=True)
        model.save_pretrained(output / name)
        fast.save_pretrained(output / name)
    for name in sizes:
        (output / name / PARTIAL).unlink(missing_ok=True)
    (output / HELD_OUT_FILE).write_text("".join(held_out), encoding="utf-8")
    print(f"wrote {output}")


def make_model(size: dict[str, int], vocab_size: int, end: int, seed: int) -> GPT2LMHeadModel:
    """Make a GPT-2 with random weights and without dropout."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=CONTEXT,
        **size,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=end,
    )
    return GPT2LMHeadModel(config)


def train(model: GPT2LMHeadModel, ids: np.ndarray, steps: int, seed: int, folder: Path) -> None:
    """Train with AdamW, a warm-up and a linear decay to 0, from a checkpoint if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), fused=True)
    first = resume(folder / PARTIAL, model, optimizer)
    started = time.perf_counter()
    for step in range(first, steps):
        done = step / steps
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((done + 1e-3) / WARM_UP, (1 - done) / (1 - WARM_UP))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model_loss(model, windows(ids, np.random.default_rng((seed, step))))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % REPORT == 0:
            print(f"  step {step + 1} loss {loss.item():.3f}", flush=True)
            state = {"step": step + 1, "model": model.state_dict(), "adam": optimizer.state_dict()}
            torch.save(state, folder / PARTIAL)
    print(f"  {steps - first} steps in {time.perf_counter() - started:.1f} s")


def resume(path: Path, model: GPT2LMHeadModel, optimizer: torch.optim.Optimizer) -> int:
    """Load what a stopped run left behind; return the number of steps done."""
    if not path.exists():
        return 0
    state: dict[str, Any] = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["adam"])
    return int(state["step"])


def windows(ids: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """Sample windows of ids (N,): (WINDOWS, CONTEXT + 1) int64."""
    starts = rng.integers(0, len(ids) - CONTEXT, WINDOWS)
    return torch.from_numpy(ids[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64))


def model_loss(model: GPT2LMHeadModel, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in nats, of each next token of rows (B, L + 1): ()."""
    logits = model(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.inference_mode()
def mean_loss(model: GPT2LMHeadModel, ids: np.ndarray, most: int = 200) -> float:
    """Return the loss over adjacent windows of ids (N,), the first `most` of them."""
    count = min(most, (len(ids) - 1) // CONTEXT)
    places = np.arange(count)[:, None] * CONTEXT + np.arange(CONTEXT + 1)
    rows = torch.from_numpy(ids[places].astype(np.int64))
    return float(np.mean([model_loss(model, row[None]).item() for row in rows]))


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
