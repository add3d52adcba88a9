"""Train a tiny pair of decoder-only models in about a minute: a target, and a draft for it.

    python weights/training/train_causal.py
    python weights/training/train_causal.py --text deu.txt.xz --output causal-deu --steps 900
    python weights/training/train_causal.py --shape gpt2 --text technical.txt.xz \
        --output causal-gpt2 --steps 3600

The text is the project's own unless another is given; each file is a document, and the models learn
to predict its end. The tiny pair are Llamas; those of `--shape gpt2` are GPT-2s of 30 and 3 million
parameters, which take an hour. The output folder then holds `target` and `draft`, checkpoints in
the format of Hugging Face, and `held-out.txt`, the end of the text, which neither model has seen.
Needs `pip install mlx-lm`.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from mlx_lm.models import gpt2, llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
CONTEXT = 256  # tokens that the models can read, and tokens of a training window
WINDOWS = 2  # in a step
WARM_UP = 0.1  # the share of a run before the largest learning rate
TRANSPOSED = ("c_attn", "c_proj", "c_fc")  # GPT-2's matrices, as transformers stores them


@dataclass(frozen=True)
class PairShape:
    """The architecture of a pair, and how it is trained."""

    pieces: int  # of the vocabulary
    rate: float  # the largest learning rate
    models: dict[str, dict[str, Any]]  # target and draft: what config.json has of each
    common: dict[str, Any]  # and of both


TINY, GPT2 = "tiny", "gpt2"
LLAMAS = {
    "target": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 384},
    "draft": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 192},
}  # fmt: skip
LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
}
GPT2S = {
    "target": {"n_embd": 512, "n_layer": 9, "n_head": 8},
    "draft": {"n_embd": 192, "n_layer": 5, "n_head": 3},
}
GPT2_CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_positions": CONTEXT,
    "n_ctx": CONTEXT,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
}
SHAPES = {
    TINY: PairShape(512, 5e-3, LLAMAS, LLAMA_CONFIG),
    GPT2: PairShape(4096, 1e-3, GPT2S, GPT2_CONFIG),
}


def main(
    text: Annotated[
        list[Path] | None, typer.Option(help="A file to train on, plain or .xz; repeatable.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("causal-pair"),
    steps: Annotated[int, typer.Option(min=1, help="Steps for each model.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="The same gives the same weights.")] = 0,
    shape: Annotated[str, typer.Option(help=f"The models: {' or '.join(SHAPES)}.")] = TINY,
) -> None:
    """Train both models and write them."""
    try:
        if shape not in SHAPES:
            raise ValueError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}")
        check_replaceable(output)
        train_pair(read_documents(text or own_text()), output, steps, seed, SHAPES[shape])
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def train_pair(
    documents: Sequence[str], output: Path, steps: int, seed: int, shape: PairShape = SHAPES[TINY]
) -> None:
    """Train a tokenizer and both models on all but the end of the text, and write them."""
    training, held_out = split(documents)
    tokenizer = train_tokenizer(training, shape.pieces)
    # The last training document goes on in the held-out part: it does not end here.
    seen = encode(tokenizer, training)[:-1]
    unseen = encode(tokenizer, held_out)
    if min(len(seen), len(unseen)) <= CONTEXT:
        raise ValueError(
            f"the text has {len(seen)} tokens to train on and {len(unseen)} to hold out, and each "
            f"has to be more than {CONTEXT}: give a longer --text"
        )
    print(f"{len(seen):,} tokens to train on, {len(unseen):,} held out")
    trained = {}
    for name in shape.models:
        model, _ = trained[name] = make_model(name, tokenizer, seed, shape)
        size = sum(weight.size for _, weight in tree_flatten(model.parameters()))
        print(f"{name}: {size:,} parameters", flush=True)
        train(model, seen, steps, seed, shape.rate)
        print(f"{name}: held-out loss {mean_loss(model, unseen):.3f} nats a token", flush=True)
    for name, (model, config) in trained.items():
        write(output / name, model, config, tokenizer)
    (output / HELD_OUT_FILE).write_text("".join(held_out), encoding="utf-8")
    print(f"wrote {output}")


def train_tokenizer(documents: Sequence[str], pieces: int = SHAPES[TINY].pieces) -> Tokenizer:
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


def make_model(
    name: str, tokenizer: Tokenizer, seed: int, shape: PairShape = SHAPES[TINY]
) -> tuple[nn.Module, dict[str, Any]]:
    """Make a model with random weights, and its config.json."""
    config: dict[str, Any] = {
        **shape.common,
        **shape.models[name],
        "vocab_size": tokenizer.get_vocab_size(),
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": None,
        "dtype": "float32",
    }
    mx.random.seed(seed)
    kind = {"llama": llama, "gpt2": gpt2}[config["model_type"]]
    model: nn.Module = kind.Model(kind.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model, config


def train(
    model: nn.Module, ids: np.ndarray, steps: int, seed: int, rate: float = SHAPES[TINY].rate
) -> float:
    """Train with AdamW, a warm-up and a linear decay to 0; return the loss of the last step."""
    rng = np.random.default_rng(seed)
    optimizer = optimizers.AdamW(rate, betas=[0.9, 0.95])
    loss_and_grads = nn.value_and_grad(model, loss)
    started = time.perf_counter()
    for step in range(steps):
        done = step / steps
        optimizer.learning_rate = rate * min((done + 1e-2) / WARM_UP, (1 - done) / (1 - WARM_UP))
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
    if config["model_type"] == "gpt2":
        weights = dict(map(as_transformers, weights.items()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END,
        "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    for name, values in (("config.json", config), ("tokenizer_config.json", about)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def as_transformers(named: tuple[str, mx.array]) -> tuple[str, mx.array]:
    """Return a weight of mlx-lm's GPT-2 by the name, and of the shape, that transformers has."""
    name, weight = named
    name = name.replace("model.", "transformer.", 1)
    if name.endswith(".weight") and name.split(".")[-2] in TRANSPOSED:
        weight = mx.contiguous(weight.T)
    return name, weight


def check_replaceable(folder: Path) -> None:
    """Check that writing would replace nothing but a pair."""
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in there if name not in ("target", "draft", HELD_OUT_FILE)]
    if others or (folder.exists() and not folder.is_dir()):
        found = f"holds {others[0]}" if others else "is a file"
        raise ValueError(f"{folder} {found} and is not a pair: choose another --output")


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
