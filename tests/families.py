"""Tiny random checkpoints of each family, in each format, made by transformers."""

import contextlib
import io
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import sentencepiece as spm

TEXT = (Path(__file__).parent / "sentences.txt").read_text(encoding="utf-8").splitlines()
FORMATS = ("safetensors", "shards", "bin", "bin_shards", "old_bin")

# Shapes that tell a wrong reshape from a right one: heads x d_kv is not d_model, depths differ.
SHAPE: dict[str, Any] = {
    "d_model": 24, "d_kv": 10, "num_heads": 3, "d_ff": 40, "num_layers": 2,
    "num_decoder_layers": 3, "vocab_size": 320,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """How a family's checkpoints differ.

    Attributes:
        config: Of transformers, beside `SHAPE`.
        model_type: Which of transformers' classes makes it.
        own_head: Whether it has an output head of its own.
        tokenizer: spiece, madlad, bytes or bpe.
        omit: What its config.json lacks.
        rewrite: Whether the embedding is stored as the two stacks' instead of the shared one.
    """

    config: dict[str, Any]
    model_type: str = "t5"
    own_head: bool = False
    tokenizer: str = "spiece"
    omit: tuple[str, ...] = ()
    rewrite: bool = False
    tokens: dict[str, int] = field(default_factory=lambda: {"pad_token_id": 0, "eos_token_id": 1})


GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FAMILIES = {
    "t5": Family({"feed_forward_proj": "relu"}),
    "t5_v1_1": Family(GATED, own_head=True),
    "flan_t5": Family(GATED | {"d_kv": 6, "num_heads": 5}, own_head=True),
    "flan_ul2": Family(
        {"feed_forward_proj": "gated-silu"}, own_head=True,
        omit=("tie_word_embeddings", "scale_decoder_outputs"),
    ),
    "madlad400": Family(
        GATED, own_head=True, tokenizer="madlad", rewrite=True,
        tokens={"pad_token_id": 1, "eos_token_id": 2},
    ),
    "mt5": Family(GATED | {"vocab_size": 400}, "mt5", own_head=True),
    "umt5": Family(GATED | {"vocab_size": 400}, "umt5", own_head=True),
    "byt5": Family(
        GATED | {"vocab_size": 384, "num_layers": 6, "num_decoder_layers": 2}, own_head=True,
        tokenizer="bytes",
    ),
    "codet5": Family(
        {"feed_forward_proj": "relu"}, tokenizer="bpe",
        tokens={"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "coedit": Family(GATED | {"vocab_size": 220}, own_head=True),
}  # fmt: skip


def write_family(folder: Path, name: str, form: str = "safetensors") -> Any:
    """Save a checkpoint in one of `FORMATS`; returns the model (torch) that it holds."""
    family = FAMILIES[name]
    model = write_model(
        folder,
        SHAPE | family.config | family.tokens,
        model_type=family.model_type,
        own_head=family.own_head,
        shard_size="30KB" if form == "shards" else "1GB",
    )
    raw = json.loads((folder / "config.json").read_text())
    for key in family.omit:
        raw.pop(key, None)
    (folder / "config.json").write_text(json.dumps(raw))
    if family.rewrite or form not in ("safetensors", "shards"):
        _rewrite(folder, model.state_dict(), family.rewrite, form)
    write_tokenizer(folder, family.tokenizer)
    return model


def write_model(
    folder: Path,
    shape: dict[str, Any],
    *,
    own_head: bool,
    model_type: str = "t5",
    shard_size: str = "1GB",
    seed: int = 0,
) -> Any:
    """Save a random model of transformers, without a tokenizer; returns the model (torch)."""
    import torch
    import transformers

    prefix = model_type.upper()
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(**shape, decoder_start_token_id=0)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    roughen(model)
    if own_head:
        head = torch.randn(config.vocab_size, config.d_model) * 0.3
        model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


STACK: dict[str, Any] = {  # of a T5Gemma
    "vocab_size": 320, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "num_hidden_layers": 3, "sliding_window": 5,
    "query_pre_attn_scalar": 7,
}  # fmt: skip


def write_gemma(
    folder: Path,
    generation: int,
    *,
    encoder: Mapping[str, Any] = {},
    decoder: Mapping[str, Any] = {},
    seed: int = 0,
    shard_size: str = "1GB",
) -> Any:
    """Save a random T5Gemma of transformers with a tokenizer; returns the model (torch)."""
    import torch
    import transformers

    torch.manual_seed(seed)
    encoder, decoder = STACK | encoder, STACK | {"num_hidden_layers": 2} | decoder
    if generation == 1:
        config: Any = transformers.T5GemmaConfig(encoder=encoder, decoder=decoder, vocab_size=320)
        model: Any = transformers.T5GemmaForConditionalGeneration(config)
    else:
        images = {
            "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        }  # fmt: skip
        ids = {"eoi_token_index": 300, "boi_token_index": 301, "image_token_index": 302}
        config = transformers.T5Gemma2Config(
            encoder={"text_config": encoder, "vision_config": images} | ids,
            decoder=decoder,
            image_token_index=302,
        )
        model = transformers.T5Gemma2ForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=0.2 if "norm" in name else 0.3)
    model.eval().save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder, "gemma")
    return model


def write_adapter(folder: Path, model: Any, base: Path | str, **options: Any) -> Any:
    """Save a random adapter for a model (torch); returns both, as trained, not merged."""
    import peft
    import torch

    chosen: dict[str, Any] = {"r": 4, "lora_alpha": 6, "init_lora_weights": False} | options
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        changed = peft.get_peft_model(model, peft.LoraConfig(**chosen))
        with torch.no_grad():
            for name, weight in changed.named_parameters():
                if "lora" in name or "modules_to_save" in name:
                    weight.add_(0.1 * torch.randn_like(weight))
        changed.save_pretrained(folder)
        path = folder / "adapter_config.json"
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(base)})
        )
        return changed.eval()


def merged_by_peft(changed: Any) -> Any:
    """Return the model of `write_adapter` with the adapter merged into it."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return changed.merge_and_unload().eval()


def reference_logits(model: Any, source: Any, target: Any) -> np.ndarray:
    """What a model (torch) scores after each target token; sources are padded by 0."""
    import torch

    ids, target = torch.tensor(source), torch.tensor(target)
    with torch.inference_mode():
        output = model(ids, attention_mask=(ids != 0).long(), decoder_input_ids=target)
    return output.logits.numpy()


def assert_close(found: mx.array, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    largest = np.abs(np.array(found) - expected).max() / np.abs(expected).max()
    assert largest < 1e-4, largest


def roughen(model: Any) -> None:
    """Randomize biases and norms: transformers makes them flat, which would hide faults."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or ".ln_" in name:
                weight.uniform_(0.5, 1.5)
            elif "relative_attention_bias" in name or name.endswith(".bias"):
                weight.normal_()


def _rewrite(folder: Path, tensors: dict[str, Any], split: bool, form: str) -> None:
    """Save as transformers 5 no longer does: .bin files, or an embedding for each stack."""
    import torch
    from huggingface_hub import save_torch_state_dict

    for path in folder.glob("*.safetensors*"):
        path.unlink()
    shared = tensors.pop("shared.weight")
    for key in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        tensors[key] = shared.clone()
    if not split:
        tensors["shared.weight"] = shared
    if form in ("bin", "old_bin"):
        zipped = form == "bin"
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    elif form == "bin_shards":
        save_torch_state_dict(tensors, folder, max_shard_size="30KB", safe_serialization=False)
    else:
        size = "30KB" if form == "shards" else "1GB"
        save_torch_state_dict(tensors, folder, max_shard_size=size)


def train_spiece(**options: Any) -> bytes:
    stored = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=stored,
        vocab_size=120,
        model_type="unigram",
        minloglevel=2,
        **options,
    )
    return stored.getvalue()


def write_tokenizer(folder: Path, kind: str) -> None:
    folder.mkdir(exist_ok=True)
    if kind == "spiece":
        (folder / "spiece.model").write_bytes(train_spiece(pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    elif kind == "madlad":
        (folder / "spiece.model").write_bytes(train_spiece(unk_id=0, bos_id=1, eos_id=2, pad_id=-1))
    elif kind == "bytes":
        settings = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    elif kind == "gemma":
        write_gemma_bpe(folder)
    else:
        write_bpe(folder)


def write_gemma_bpe(folder: Path) -> None:
    """A BPE as Gemma has it: bytes for what it lacks, <bos> before a text, and chats."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from tokenizers.trainers import BpeTrainer

    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    spare = [AddedToken(f"<0x{i:02X}>", special=False) for i in range(0, 256, 8)]
    backend.train_from_iterator(
        TEXT, BpeTrainer(vocab_size=300, special_tokens=[*control, *spare], show_progress=False)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>",
        "pad_token": "<pad>", "unk_token": "<unk>",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }} {{ m.content }}"
        "<end_of_turn>{% endfor %}<start_of_turn>model "
    )


def write_bpe(folder: Path) -> None:
    """A byte-level BPE as codet5 has it: two files, and sentinels added after."""
    from tokenizers import ByteLevelBPETokenizer

    control = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(TEXT, vocab_size=300, special_tokens=control)
    backend.save_model(str(folder))
    added = {f"<extra_id_{i}>": 309 - i for i in range(10)}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    settings = {"tokenizer_class": "RobertaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
