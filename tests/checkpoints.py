"""Tiny random decoder-only checkpoints as transformers saves them, and helpers to spoil files."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speculative_t5.checkpoints import ModelFolder, open_checkpoint
from speculative_t5.checkpoints.t5 import Checkpoint

import pytest
from families import TEXT, roughen
from messages import check_message

END = "<|endoftext|>"
# A repository's stand-in for a large file until git lfs pull.
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:"
    + b"0123456789abcdef" * 4
    + b"\nsize 242043056\n"
)
CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64},
    "qwen3": {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "intermediate_size": 40,
        "head_dim": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rope_theta": 5e4,
        "tie_word_embeddings": True,
    },
    "llama": {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    },
    "opt": {  # as opt-125m; opt-350m has POST_NORM
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "ffn_dim": 40,
        "word_embed_proj_dim": 24,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    },
}
POST_NORM = {"do_layer_norm_before": False, "word_embed_proj_dim": 10}


@contextmanager
def refused(match: str, found: object = "") -> Iterator[None]:
    """Expect a ValueError whose message matches, has the form of messages, and shows `found`."""
    with pytest.raises(ValueError, match=match) as error:
        yield
    check_message(str(error.value), str(found))


def opened(folder: Path) -> Checkpoint:
    """Open a T5's checkpoint."""
    return open_checkpoint(ModelFolder(folder))


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], Any], number: int = 0) -> None:
    """Change the tensors (torch) in one of a folder's files."""
    from safetensors.torch import load_file, save_file

    path = sorted(folder.glob("*model*.safetensors"))[number]
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)


def write_causal(
    folder: Path, kind: str = "qwen3", *, vocab_size: int = 320, seed: int = 0, **changes: Any
) -> Any:
    """Save a random transformers model of that kind and a tokenizer; returns the model (torch)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    ends = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": None}
    shape = SHAPES[kind] | ends | changes
    config = AutoConfig.for_model(kind, vocab_size=vocab_size, **shape)
    model = AutoModelForCausalLM.from_config(config).eval()
    roughen(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def as_first_gpt2(folder: Path) -> None:
    """Give a GPT-2 that transformers has saved the names of the first checkpoints."""

    def rename(tensors: dict[str, Any]) -> None:
        for name in [*tensors]:
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    edit_tensors(folder, rename)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"n_ctx": settings["n_positions"]}))


def write_tokenizer(folder: Path) -> None:
    """Train and save a byte-level BPE of 300 pieces, whose EOS is id 0."""
    from tokenizers import ByteLevelBPETokenizer

    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(
        ["\n".join(TEXT) + "\n"],
        vocab_size=300,
        min_frequency=0,
        show_progress=False,
        special_tokens=[END, "<|user|>", "<|assistant|>"],
    )
    backend.save(str(folder / "tokenizer.json"))
    stored = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(stored))
