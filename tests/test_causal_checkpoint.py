"""Decoder-only models by their folders: the same logits as transformers, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.device import default_dtype
from speculative_t5.models.causal import CausalModel, build

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import POINTER, SHAPES, refused, write_causal
from conftest import edit_json
from mlx.utils import tree_flatten

TOKENS = [[5, 17, 260, 3, 99, 1, 42, 8, 8, 310], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    write_causal(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A Qwen3 that the test may spoil."""
    return Path(shutil.copytree(original, tmp_path / "qwen3"))


def logits(folder: Path) -> np.ndarray:
    return np.array(load(folder, dtype=mx.float32)[0](mx.array(TOKENS)))


def weights(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.model.parameters()))


@pytest.mark.parametrize("kind", SHAPES)
def test_logits_match_transformers(kind: str, tmp_path: Path) -> None:
    """Of whole sequences, and of a session's steps."""
    import torch

    reference = write_causal(tmp_path, kind)
    with torch.no_grad():
        expected = reference(torch.tensor(TOKENS)).logits.numpy()
    model, tokenizer = load(tmp_path, dtype=mx.float32)
    session, _ = model.start([row[:4] for row in TOKENS])
    steps = [session.step(mx.array([row[a:b] for row in TOKENS])) for a, b in ((3, 6), (6, 10))]
    for ours, theirs in (
        (model(mx.array(TOKENS)), expected), (mx.concatenate(steps, axis=1), expected[:, 3:]),
    ):  # fmt: skip
        np.testing.assert_allclose(np.array(ours), theirs, atol=1e-4, rtol=1e-4)
    assert model.max_context == 64 and model.eos_token_ids == {0}
    assert model.vocabulary == tokenizer.vocabulary


@pytest.mark.parametrize("kind", ["gpt2", "opt-350m", "qwen3"])
def test_weights_may_be_sharded_or_pickled(kind: str, tmp_path: Path) -> None:
    import torch

    reference = write_causal(tmp_path, kind)
    expected = logits(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    reference.save_pretrained(tmp_path, max_shard_size="10KB")
    np.testing.assert_array_equal(logits(tmp_path), expected)
    (tmp_path / "model.safetensors.index.json").unlink()
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    np.testing.assert_array_equal(logits(tmp_path), expected)


def rename_gpt2(folder: Path, **more: mx.array) -> None:
    """Give the tensors their first names, without `transformer.`."""
    path = str(folder / "model.safetensors")
    older = {name.removeprefix("transformer."): tensor for name, tensor in mx.load(path).items()}
    mx.save_safetensors(path, older | more, metadata={"format": "pt"})


def test_gpt2_may_have_its_first_names_and_masks(tmp_path: Path) -> None:
    write_causal(tmp_path, "gpt2")
    expected = logits(tmp_path)
    masks = {"h.0.attn.bias": mx.ones((1, 1, 64, 64)), "h.1.attn.masked_bias": mx.array(-1e4)}
    rename_gpt2(tmp_path, **masks)
    np.testing.assert_array_equal(logits(tmp_path), expected)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_folders_converted_by_mlx_lm_are_read(kind: str, quantize: bool, tmp_path: Path) -> None:
    from mlx_lm.convert import convert
    from mlx_lm.utils import load_model

    width = {"n_embd": 64, "n_head": 2} if kind == "gpt2" else {"hidden_size": 64}
    write_causal(tmp_path / "source", kind, **width)
    if kind == "gpt2":  # mlx-lm only knows its first names
        rename_gpt2(tmp_path / "source")
        edit_json(tmp_path / "source" / "config.json", n_ctx=64)
    made = tmp_path / "made"
    convert(str(tmp_path / "source"), str(made), quantize=quantize, q_bits=4, q_group_size=32)
    expected = np.array(load_model(made)[0](mx.array(TOKENS)).astype(mx.float32))
    np.testing.assert_allclose(logits(made), expected, atol=1e-4, rtol=1e-4)
    model, _ = load(made)
    assert quantize == any("scales" in name for name in weights(model))
    assert model.fingerprint


def test_weights_are_cast_but_for_those_that_keep_their_type(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models import qwen3

    edit_json(folder / "config.json", dtype="float16")
    assert {w.dtype for w in weights(load(folder)[0]).values()} == {default_dtype()}
    kept = property(lambda self: lambda name: "norm" not in name)
    monkeypatch.setattr(qwen3.Model, "cast_predicate", kept, raising=False)
    model, _ = load(folder, dtype=mx.bfloat16)
    dtypes = {("norm" in name, w.dtype) for name, w in weights(model).items()}
    assert dtypes == {(True, mx.float32), (False, mx.bfloat16)}


def test_quantized_matrices_keep_16_bit_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.convert import convert

    def floats(dtype: mx.Dtype | None = None) -> set[mx.Dtype]:
        found = {w.dtype for w in weights(load(tmp_path / "made", dtype=dtype)[0]).values()}
        return {dtype for dtype in found if mx.issubdtype(dtype, mx.floating)}

    write_causal(tmp_path / "source", hidden_size=64)
    convert(str(tmp_path / "source"), str(tmp_path / "made"), quantize=True, q_group_size=32,
            dtype="float16")  # fmt: skip
    for of_the_device, expected in ((mx.float32, mx.float32), (mx.bfloat16, mx.float16)):
        name = "speculative_t5.checkpoints.decoder_only.default_dtype"
        monkeypatch.setattr(name, lambda dtype=of_the_device: dtype)
        assert floats() == {expected}
    assert floats(mx.bfloat16) == {mx.bfloat16}


def test_eos_comes_from_the_generation_config_the_model_or_the_tokenizer(folder: Path) -> None:
    for generation, ids in (([], {0}), ([7, 0], {7, 0})):
        edit_json(folder / "generation_config.json", eos_token_id=generation)
        model, _ = load(folder)
        assert model.eos_token_ids == ids
    assert model.eos_token_id == 7
    (folder / "generation_config.json").unlink()
    for stored in (0, None):
        edit_json(folder / "config.json", eos_token_id=stored)
        assert load(folder)[0].eos_token_ids == {0}
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    with refused("does not say what ends an output", folder):
        load(folder)


def test_padded_vocabularies_are_cut_to_the_common_length(tmp_path: Path) -> None:
    """Either may be the wider one."""
    for name, size in (("narrow", 304), ("wide", 352)):
        write_causal(tmp_path / name, vocab_size=size, seed=size)
    for target, draft in (("narrow", "wide"), ("wide", "narrow")):
        decoder = SpeculativeDecoder.from_pretrained(
            tmp_path / target, tmp_path / draft, dtype=mx.float32
        )
        assert decoder.generate("He go", max_tokens=30, temperature=1.0).stats.drafted
        out = decoder.generate("He go", max_tokens=30)
        alone = decoder.generate("He go", max_tokens=30, speculative=False)
        assert out.stats.drafted and out.tokens == alone.tokens


def test_pairs_with_different_tokenizers_are_refused(original: Path, folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|assistant|>", "<|bot|>"))
    with refused("must share a tokenizer: the target's has 300", "300 pieces"):
        SpeculativeDecoder.from_pretrained(original, folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: edit_json(f / "config.json", hidden_size=32), "has shape .*, expected"),
        (lambda f: edit_json(f / "config.json", num_hidden_layers=1), "tensors that a qwen3 does"),
        (lambda f: edit_json(f / "config.json", num_hidden_layers=3), "has no tensor model.layers"),
        (lambda f: edit_json(f / "config.json", eos_token_id=[0, 999]), "eos_token_id .* 999"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer in .*: expected one of"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "no tokenizer can be made of"),
        (lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "x"}'),
         "eos_token_id in .*generation_config.json is 'x'"),
        (lambda f: (f / "tokenizer.json").write_bytes(POINTER), "tokenizer.json is a Git LFS poin"),
    ],
)  # fmt: skip
def test_spoiled_folders_are_refused(folder: Path, spoil: Any, message: str) -> None:
    (folder / "generation_config.json").unlink()
    spoil(folder)
    with refused(message, folder):
        load(folder)


def test_models_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """By the rows for its tokenizer, or its one position for all rows of a batch."""
    write_causal(tmp_path / "qwen3", vocab_size=290)
    with refused("has 300 pieces, the model 290 rows", "290"):
        load(tmp_path / "qwen3")
    module = build({
        "model_type": "gpt_bigcode", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32,
        "n_inner": 16, "layer_norm_epsilon": 1e-5, "vocab_size": 20,
    })  # fmt: skip
    with refused("cannot read rows of different lengths"):
        CausalModel(module, eos_token_id=0, max_context=32)


def test_opt_needs_no_mlx_lm(tmp_path: Path) -> None:
    """In a process of its own, as this one may have imported it."""
    write_causal(tmp_path, "opt")
    code = (
        "import sys; sys.modules['mlx_lm'] = None\n"
        "from speculative_t5 import SpeculativeDecoder, load\n"
        f"model, tokenizer = load({str(tmp_path)!r})\n"
        "print(SpeculativeDecoder(model, 'lookup', tokenizer).generate('He go', max_tokens=5))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and done.stdout, done.stderr
