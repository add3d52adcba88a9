"""Train a tiny pair of decoder-only models in about a minute: a target, and a draft for it.

    python weights/training/train_causal.py
    python weights/training/train_causal.py --text deu.txt.xz --output causal-deu --steps 900

The text is the project's own unless another is given; each file is a document, and the models learn
to predict its end. The output folder then holds `target` and `draft`, checkpoints in the format of
Hugging Face, and `held-out.txt`, the end of the text, which neither model has seen. Needs
`pip install mlx-lm`.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import speculative_t5  # noqa: F401  (loads the BLAS that MLX then uses)

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import typer
from documents import HELD_OUT_FILE, own_text, read_documents, split
from mlx import optimizers
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PIECES, END = 512, "<|endoftext|>"
CONTEXT = 256  # tokens that the models can read, and tokens of a training window
WINDOWS = 2  # in a step
RATE, WARM_UP = 5e-3, 0.1  # the largest learning rate, and the share of the run before it
SHAPES: dict[str, dict[str, int]] = {
    "target": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 384},
    "draft": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 192},
}  # fmt: skip


def main(
    text: Annotated[
        list[Path] | None, typer.Option(help="A file to train on, plain or .xz; repeatable.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("causal-pair"),
    steps: Annotated[int, typer.Option(min=1, help="Steps for each model.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="The same gives the same weights.")] = 0,
) -> None:
    """Train both models and write them."""
    try:
        check_replaceable(output)
        train_pair(read_documents(text or own_text()), output, steps, seed)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def train_pair(documents: Sequence[str], output: Path, steps: int, seed: int) -> None:
    """Train a tokenizer and both models on all but the end of the text, and write them."""
    tokenizer, seen, unseen, held_out = prepare(documents)
    trained = {}
    for name in SHAPES:
        model, _ = trained[name] = make_model(name, tokenizer, seed)
        size = sum(weight.size for _, weight in tree_flatten(model.parameters()))
        print(f"{name}: {size:,} parameters", flush=True)
        train(model, seen, steps, seed)
        print(f"{name}: held-out loss {mean_loss(model, unseen):.3f} nats a token", flush=True)
    for name, (model, config) in trained.items():
        write(output / name, model, config, tokenizer)
    (output / HELD_OUT_FILE).write_text("".join(held_out), encoding="utf-8")
    print(f"wrote {output}")


def prepare(
    documents: Sequence[str], pieces: int = PIECES
) -> tuple[Tokenizer, np.ndarray, np.ndarray, list[str]]:
    """Return a tokenizer, the ids to train on and those held out, and the text held out."""
    training, held_out = split(documents)
    tokenizer = train_tokenizer(training, pieces)
    # The last training document goes on in the held-out part: it does not end here.
    seen = encode(tokenizer, training)[:-1]
    unseen = encode(tokenizer, held_out)
    if min(len(seen), len(unseen)) <= CONTEXT:
        raise ValueError(
            f"the text has {len(seen)} tokens to train on and {len(unseen)} to hold out, and each "
            f"has to be more than {CONTEXT}: give a longer --text"
        )
    print(f"{len(seen):,} tokens to train on, {len(unseen):,} held out")
    return tokenizer, seen, unseen, held_out


def train_tokenizer(documents: Sequence[str], pieces: int = PIECES) -> Tokenizer:
    """Train byte-level BPE, whose id 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=pieces,
        special_tokens=[END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """Encode documents into one row of ids, (N,) int32, with an end after each document."""
    end = tokenizer.token_to_id(END)
    tokenizer.encode_special_tokens = True  # text that spells END is text
    rows = [[*tokenizer.encode(document).ids, end] for document in documents]
    tokenizer.encode_special_tokens = False
    return np.array([i for row in rows for i in row], dtype=np.int32)


def make_model(name: str, tokenizer: Tokenizer, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Make a model with random weights, and its config.json."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPES[name],
        "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": CONTEXT,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": tokenizer.token_to_id(END), "pad_token_id": None,
        "dtype": "float32",
    }  # fmt: skip
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model, config


def train(model: nn.Module, ids: np.ndarray, steps: int, seed: int) -> float:
    """Train with AdamW, a warm-up and a linear decay to 0; return the loss of the last step."""
    rng = np.random.default_rng(seed)
    optimizer = optimizers.AdamW(RATE, betas=[0.9, 0.95])
    loss_and_grads = nn.value_and_grad(model, loss)
    started = time.perf_counter()
    for step in range(steps):
        done = step / steps
        optimizer.learning_rate = RATE * min((done + 1e-2) / WARM_UP, (1 - done) / (1 - WARM_UP))
        found, grads = loss_and_grads(model, windows(ids, rng))
        grads, _ = optimizers.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(found, model.state, optimizer.state)
        if (step + 1) % 100 == 0:
            print(f"  step {step + 1} loss {found.item():.3f}", flush=True)
    print(f"  {steps} steps in {time.perf_counter() - started:.1f} s")
    return float(found.item())


def windows(ids: np.ndarray, rng: np.random.Generator) -> mx.array:
    """Sample windows of ids (N,): (WINDOWS, CONTEXT + 1) int32."""
    starts = rng.integers(0, len(ids) - CONTEXT, WINDOWS)
    return mx.array(ids[starts[:, None] + np.arange(CONTEXT + 1)])


def loss(model: nn.Module, rows: mx.array) -> mx.array:
    """Return the mean cross-entropy, in nats, of each next token of rows (B, L + 1): ()."""
    return nn.losses.cross_entropy(model(rows[:, :-1]), rows[:, 1:], reduction="mean")


def mean_loss(model: nn.Module, ids: np.ndarray) -> float:
    """Return the loss over adjacent windows of ids (N,)."""
    count = (len(ids) - 1) // CONTEXT
    places = np.arange(count)[:, None] * CONTEXT + np.arange(CONTEXT + 1)
    found = [loss(model, mx.array(rows)).item() for rows in np.split(ids[places], count)]
    return float(np.mean(found))


def write(folder: Path, model: nn.Module, config: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Write a checkpoint in the format of Hugging Face."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END,
        "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    for name, values in (("config.json", config), ("tokenizer_config.json", about)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def check_replaceable(folder: Path) -> None:
    """Check that writing would replace nothing but a pair."""
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in there if name not in (*SHAPES, HELD_OUT_FILE)]
    if others or (folder.exists() and not folder.is_dir()):
        found = f"holds {others[0]}" if others else "is a file"
        raise ValueError(f"{folder} {found} and is not a pair: choose another --output")


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
