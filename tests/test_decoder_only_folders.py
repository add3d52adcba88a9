"""Folders of decoder-only models: logits and ids as in transformers, and what is refused."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, device, load
from speculative_t5.checkpoints import ModelFolder, default_type_of
from speculative_t5.checkpoints.decoder_only import max_context, read_config
from speculative_t5.models.decoder_only import DecoderOnlyModel, build
from speculative_t5.tokenizers import DecoderOnlyTokenizer

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import SHAPES, refused, write_causal, write_tokenizer
from conftest import edit_json, tiny_causal
from families import write_bpe
from mlx.utils import tree_flatten
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

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
    assert model.info.max_context == 64 and model.info.eos_token_ids == {0}
    assert model.info.vocabulary == tokenizer.vocabulary


def test_weights_may_be_sharded_or_pickled_or_have_other_names(tmp_path: Path) -> None:
    """GPT-2's first ones, with tensors that are no parameters."""
    import torch

    reference = write_causal(tmp_path, "gpt2")
    expected = logits(tmp_path)
    masks = {"h.0.attn.bias": mx.ones((1, 1, 64, 64)), "h.1.attn.masked_bias": mx.array(-1e4)}
    remove_prefix(tmp_path, **masks)
    np.testing.assert_array_equal(logits(tmp_path), expected)
    (tmp_path / "model.safetensors").unlink()
    reference.save_pretrained(tmp_path, max_shard_size="10KB")
    np.testing.assert_array_equal(logits(tmp_path), expected)
    (tmp_path / "model.safetensors.index.json").unlink()
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    np.testing.assert_array_equal(logits(tmp_path), expected)


def remove_prefix(folder: Path, **more: mx.array) -> None:
    path = str(folder / "model.safetensors")
    stored = mx.load(path).items()
    named = {re.sub(r"^transformer\.", "", name): tensor for name, tensor in stored}
    mx.save_safetensors(path, named | more, metadata={"format": "pt"})


def test_folders_converted_by_mlx_lm_are_read(tmp_path: Path) -> None:
    from mlx_lm.convert import convert
    from mlx_lm.utils import load_model

    write_causal(tmp_path / "source", "gpt2", n_embd=64, n_head=2)
    remove_prefix(tmp_path / "source")  # mlx-lm only knows its first names
    edit_json(tmp_path / "source" / "config.json", n_ctx=64)
    for name, quantize in (("whole", False), ("quantized", True)):
        made = tmp_path / name
        convert(str(tmp_path / "source"), str(made), quantize=quantize, q_bits=4, q_group_size=32)
        expected = np.array(load_model(made)[0](mx.array(TOKENS)).astype(mx.float32))
        np.testing.assert_allclose(logits(made), expected, atol=1e-4, rtol=1e-4)
        model, _ = load(made)
        assert quantize == any("scales" in name for name in weights(model)) and model.fingerprint


def test_weights_are_cast_but_for_those_that_keep_their_type(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models import qwen3

    edit_json(folder / "config.json", dtype="float16")
    assert {w.dtype for w in weights(load(folder)[0]).values()} == {device.default_type().dtype}
    kept = property(lambda self: lambda name: "norm" not in name)
    monkeypatch.setattr(qwen3.Model, "cast_predicate", kept, raising=False)
    model, _ = load(folder, dtype=mx.bfloat16)
    dtypes = {("norm" in name, w.dtype) for name, w in weights(model).items()}
    assert dtypes == {(True, mx.float32), (False, mx.bfloat16)}


def test_quantized_matrices_keep_16_bit_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.convert import convert

    write_causal(tmp_path / "source", hidden_size=64)
    convert(str(tmp_path / "source"), str(tmp_path / "made"), quantize=True, q_group_size=32,
            dtype="float16")  # fmt: skip
    for on_cpu, asked, expected in (
        (True, None, mx.float32), (False, None, mx.float16), (False, mx.bfloat16, mx.bfloat16)
    ):  # fmt: skip
        monkeypatch.setattr(device, "on_cpu", lambda found=on_cpu: found)
        chosen = default_type_of(ModelFolder(tmp_path / "made"))
        assert asked or chosen.dtype == expected
        found = {w.dtype for w in weights(load(tmp_path / "made", dtype=asked)[0]).values()}
        assert found == {mx.uint32, expected}
    edit_json(tmp_path / "source" / "config.json", quantization={"bits": 4, "group_size": 32})
    with refused("has quantization, but the weights there are not quantized"):
        default_type_of(ModelFolder(tmp_path / "source"))


def test_eos_comes_from_the_generation_config_the_model_or_the_tokenizer(folder: Path) -> None:
    for generation, ids in (([], {0}), ([7, 0], {7, 0})):
        edit_json(folder / "generation_config.json", eos_token_id=generation)
        model, _ = load(folder)
        assert model.info.eos_token_ids == ids
    assert model.info.eos_token_id == 7
    (folder / "generation_config.json").unlink()
    for stored in (0, None):
        edit_json(folder / "config.json", eos_token_id=stored)
        assert load(folder)[0].info.eos_token_ids == {0}
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    with refused("does not say what ends an output", folder):
        load(folder)


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
        DecoderOnlyModel(module, eos_token_id=0, max_context=32)


QWEN3 = SHAPES["qwen3"] | {"vocab_size": 320, "architectures": ["Qwen3ForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3"}


def write(folder: Path, **settings: Any) -> Path:
    """Write a config.json, a Qwen3's if nothing else is said; the folder has nothing else."""
    base = {"model_type": "qwen3"} | QWEN3 if "model_type" not in settings else {}
    (folder / "config.json").write_text(json.dumps(base | settings))
    return folder


def test_context_length() -> None:
    assert max_context({"n_positions": 32, "n_ctx": 16}) == 32
    assert max_context({"text_config": {"max_position_embeddings": 9}}) == 9
    assert max_context({"text_config": [1]}) is None
    endless = YARN | {"factor": float("inf")}
    for stored, scaling, expected in (
        (64, YARN, 256), (256, YARN, 256), (99, LLAMA3, 99), (64, endless, 64),
    ):  # fmt: skip
        settings = {"max_position_embeddings": stored, "rope_scaling": scaling}
        assert max_context(settings) == expected


def test_senseless_sizes_are_refused(tmp_path: Path) -> None:
    senseless: list[tuple[str, tuple[Any, ...]]] = [
        ("head_dim", (0, -1, 2.5, "10", True, 2**31)),
        ("num_key_value_heads", (0, -1, 2.0)),
        ("num_hidden_layers", (0, 10**9)),
        ("max_position_embeddings", (0, -1, float("inf"), 1e9)),
    ]
    for name, values in senseless:
        for value in values:
            with refused(f"{name} in config.json is .*, expected ", tmp_path):
                load(write(tmp_path, **{name: value}))


def test_other_configs_are_refused(tmp_path: Path) -> None:
    others: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "qwen77", "architectures": QWEN3["architectures"]}, "a qwen77 .*neither"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]},
         "^(?!.*mlx-lm).*BertForMaskedLM.*expected one of the T5 .*decoder-only"),
        ({"hidden_size": None}, "does not make a qwen3"),
        ({"quantization": True}, "quantization in .* True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "are quantized by gptq"),
        ({"eos_token_id": "</s>"}, "eos_token_id .* '</s>'"),
        ({"text_config": {"n_layer": 10**9}}, "n_layer in"),
        ({"model_type": "opt", "architectures": ["OPTForCausalLM"]}, "a opt .*neither"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_.* is 'relu'"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_.* is True"),
        *((QWEN3 | {"model_type": kind}, "this is a .{0,400}$")
          for kind in (["llama"], {"a": 1}, "a\nb", "cache", "../x", "", "x" * 5000)),
    ]  # fmt: skip
    for settings, message in others:
        with refused(message, tmp_path):
            load(write(tmp_path, **settings))


def test_published_numbers_are_accepted(tmp_path: Path) -> None:
    """Lists for the layers, null for what follows from others, 0 for what is left out."""
    write(
        tmp_path, model_type="llama4", rope_theta=1e11, rms_norm_eps=1e-5, head_dim=None,
        max_position_embeddings=10485760, initializer_factor=1, attention_dropout=0.0,
        rope_scaling={"mscale_all_dim": 0, "factor": 8, "attention_factor": None,
                      "long_factor": [1, 2.5], "rope_type": "longrope"},
        intermediate_size=[8, 16], num_attention_heads=40, num_key_value_heads=8,
        layer_norm_epsilon=None, partial_rotary_factor=1, quantization=None,
    )  # fmt: skip
    assert read_config(ModelFolder(tmp_path))["rope_theta"] == 1e11


def test_a_missing_mlx_lm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    with refused(r"run pip install 'mlx-lm>=0.32,<0.33'", "qwen3"):
        load(write(tmp_path))


SAID = {"role": "user", "content": "He go home"}


def decoder(folder: Path, **options: Any) -> SpeculativeDecoder:
    model = tiny_causal("qwen3", vocab_size=300)
    return SpeculativeDecoder(model, None, DecoderOnlyTokenizer(folder), **options)


def test_the_begin_token_is_not_doubled(folder: Path) -> None:
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single="<|user|> $A", pair="<|user|> $A $B", special_tokens=[("<|user|>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", bos_token="<|user|>")
    tokenizer = DecoderOnlyTokenizer(folder)
    plain = tokenizer.encode("He go")
    assert plain[0] == 1 and plain.count(1) == 1
    assert tokenizer.encode("<|user|>He go") == plain


def test_texts_begin_with_the_token_that_the_folder_says(tmp_path: Path) -> None:
    """One without tokenizer.json, with </s> before every text."""
    write_causal(tmp_path, "gpt2", eos_token_id=2, bos_token_id=2, pad_token_id=0)
    (tmp_path / "tokenizer.json").unlink()
    write_bpe(tmp_path)
    edit_json(
        tmp_path / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", add_bos_token=True,
        bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>",
    )  # fmt: skip
    model, tokenizer = load(tmp_path)
    ids = tokenizer.encode("He goes home.")
    assert ids[0] == 2 and 2 not in ids[1:]
    assert tokenizer.decode([*ids, 318]) == "He goes home." and model.info.eos_token_ids == {2}


def test_chats_are_formatted_by_the_models_template(folder: Path) -> None:
    expected = DecoderOnlyTokenizer(folder).encode("<|user|>He go home\n<|assistant|>")
    assert decoder(folder, chat=True).encode("He go home") == expected
    plain = decoder(folder)
    assert plain.encode([SAID]) == expected != plain.encode("He go home")
    answered = [SAID, {"role": "assistant", "content": "OK"}, SAID]
    assert plain.encode(answered)[-len(expected) :] == expected
    assert plain.generate([SAID], max_tokens=3).stats.emitted


def test_malformed_messages_and_bad_templates_are_refused(folder: Path) -> None:
    bad: dict[str, Any] = {"str for role, int for content": SAID | {"content": 3}, "str": "y"}
    for found, message in (bad | {"nothing": {}}).items():
        with refused(f"a message must be .*, got {found}$", found):
            decoder(folder).encode([SAID, message])
    with refused("the content of a message is not UTF-8"):
        DecoderOnlyTokenizer(folder).encode_chat([{"role": "user", "content": "\udc80"}])
    edit_json(folder / "tokenizer_config.json", chat_template="{{ raise_exception('no\nusers') }}")
    with refused(r"refuses these messages \(no\)"):
        decoder(folder).encode([SAID])
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    for chat in (False, True):
        with refused("no chat template"):
            decoder(folder, chat=chat).encode([SAID])


def test_missing_packages_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def lack(*_: Any, **__: Any) -> None:
        raise ImportError("\nLlamaConverter requires the protobuf library\nbut it was not found")

    tokenizer = DecoderOnlyTokenizer(folder)
    monkeypatch.setattr(type(tokenizer._backend), "apply_chat_template", lack)
    with refused(r"library\): run pip install 'jinja2>=3.1.6'$"):
        tokenizer.encode_chat([SAID])
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lack)
    install = r"run pip install 'transformers>=5' 'protobuf>=4'$"
    with refused(rf"\(LlamaConverter requires the protobuf library\): {install}", folder):
        DecoderOnlyTokenizer(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused(install, folder):
        DecoderOnlyTokenizer(folder)


def test_no_code_of_a_folder_is_run(tmp_path: Path) -> None:
    folder = tmp_path
    write_tokenizer(folder)
    (folder / "evil.py").write_text(f"open({str(folder / 'pwned')!r}, 'w')\nclass Evil: pass\n")
    auto_map = {"AutoTokenizer": ["evil.Evil", None]}
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map=auto_map)
    with refused("no tokenizer can be made of", folder):
        DecoderOnlyTokenizer(folder)
    assert not (folder / "pwned").exists()
