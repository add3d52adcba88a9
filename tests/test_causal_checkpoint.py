"""Decoder-only models by their folders: the same logits as transformers, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints.causal_config import max_context, read_causal_config
from speculative_t5.models.causal import MLX_LM, CausalModel, build

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import END, POINTER, SHAPES, write_causal
from conftest import REPOSITORY, edit_json
from messages import check_message
from mlx.utils import tree_flatten

TOKENS = [[5, 17, 260, 3, 99, 1, 42, 8, 8, 310], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


def assert_parity(model: Any, reference: Any) -> None:
    """Whole sequences, and steps of a session, against transformers in float32."""
    import torch

    with torch.no_grad():
        expected = reference(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(np.array(model(mx.array(TOKENS))), expected, atol=1e-4, rtol=1e-4)
    session, _ = model.start([row[:4] for row in TOKENS])
    steps = [session.step(mx.array([row[3:6] for row in TOKENS]))]
    steps.append(session.step(mx.array([row[6:] for row in TOKENS])))
    found = np.concatenate([np.array(step) for step in steps], axis=1)
    np.testing.assert_allclose(found, expected[:, 3:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in SHAPES if kind != "gemma3"])
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    reference = write_causal(tmp_path, kind)
    model, tokenizer = load(tmp_path, dtype=mx.float32)
    assert_parity(model, reference)
    assert model.max_context == 64
    assert model.eos_token_ids == {0}
    assert model.vocabulary == tokenizer.vocabulary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_causal(tmp_path / "qwen3")
    return tmp_path / "qwen3"


def logits(folder: Path) -> np.ndarray:
    return np.array(load(folder, dtype=mx.float32)[0](mx.array(TOKENS)))


@pytest.mark.parametrize("kind", ["gpt2", "opt-350m", "qwen3"])
def test_weights_may_be_in_shards_or_pickled(kind: str, tmp_path: Path) -> None:
    import torch

    reference = write_causal(tmp_path, kind)
    expected = logits(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    reference.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    np.testing.assert_array_equal(logits(tmp_path), expected)
    for path in tmp_path.glob("model*"):
        path.unlink()
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    np.testing.assert_array_equal(logits(tmp_path), expected)


def test_the_first_names_of_gpt2_and_its_masks_are_known(tmp_path: Path) -> None:
    write_causal(tmp_path, "gpt2")
    expected = logits(tmp_path)
    stored = mx.load(str(tmp_path / "model.safetensors"))
    older = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    older["h.0.attn.bias"] = mx.ones((1, 1, 64, 64), dtype=mx.uint8)
    older["h.1.attn.masked_bias"] = mx.array(-1e4)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), older)
    np.testing.assert_array_equal(logits(tmp_path), expected)


@pytest.mark.parametrize("options", [[], ["-q", "--q-bits", "4", "--q-group-size", "32"]])
@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_folders_that_mlx_lm_has_converted_are_read(
    kind: str, options: list[str], tmp_path: Path
) -> None:
    from mlx_lm.convert import convert
    from mlx_lm.utils import load_model

    width = {"n_embd": 64, "n_head": 2} if kind == "gpt2" else {"hidden_size": 64}
    write_causal(tmp_path / "source", kind, **width)
    source = tmp_path / "source"
    if kind == "gpt2":  # which mlx-lm takes by its first names alone
        rename_gpt2(source)
    quantize = bool(options)
    convert(str(source), str(tmp_path / "made"), quantize=quantize, q_bits=4, q_group_size=32)
    theirs, _ = load_model(tmp_path / "made")
    expected = np.array(theirs(mx.array(TOKENS)).astype(mx.float32))
    np.testing.assert_allclose(logits(tmp_path / "made"), expected, atol=1e-4, rtol=1e-4)
    model, _ = load(tmp_path / "made")
    kinds = {type(layer).__name__ for layer in model.model.leaf_modules().values()}
    assert quantize == any("scales" in name for name in flat(model)), kinds
    assert model.fingerprint


def rename_gpt2(folder: Path) -> None:
    stored = mx.load(str(folder / "model.safetensors"))
    older = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), older, metadata={"format": "pt"})
    edit_json(folder / "config.json", n_ctx=64)


def flat(model: Any) -> list[str]:
    return [name for name, _ in tree_flatten(model.model.parameters())]


def test_the_type_to_compute_in_is_the_devices_or_chosen(folder: Path) -> None:
    edit_json(folder / "config.json", dtype="float16")
    for dtype, expected in ((None, mx.float32), (mx.bfloat16, mx.bfloat16)):
        model, _ = load(folder, dtype=dtype)
        assert {w.dtype for _, w in tree_flatten(model.model.parameters())} == {expected}


def test_ends_come_from_the_generations_config_the_models_or_the_tokenizer(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[7, 0])
    model, _ = load(folder)
    assert (model.eos_token_id, model.eos_token_ids) == (7, {0, 7})
    (folder / "generation_config.json").unlink()
    assert load(folder)[0].eos_token_ids == {0}
    edit_json(folder / "config.json", eos_token_id=None)
    assert load(folder)[0].eos_token_ids == {0}


def test_a_generations_empty_list_of_ends_says_nothing(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[])
    assert load(folder)[0].eos_token_ids == {0}


def test_the_token_before_texts_is_not_doubled(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    special = {"<|user|>": {"id": "<|user|>", "ids": [1], "tokens": ["<|user|>"]}}
    single: list[dict[str, Any]] = [
        {"SpecialToken": {"id": "<|user|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    ]  # fmt: skip
    raw["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "special_tokens": special,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    edit_json(folder / "tokenizer_config.json", bos_token="<|user|>")
    tokenizer = load(folder)[1]
    plain = tokenizer.encode("He go")
    assert plain[0] == 1 and plain.count(1) == 1
    assert tokenizer.encode("<|user|>He go") == plain


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 32, "n_ctx": 16}, 32),
        ({"text_config": {"max_position_embeddings": 9}}, 9),
        ({"text_config": [1]}, None),
        ({"max_position_embeddings": 64, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 256),
        ({"max_position_embeddings": 256, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 256),
        ({"max_position_embeddings": 99, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}}, 99),
    ],
)  # fmt: skip
def test_how_much_a_model_reads(settings: dict[str, Any], expected: int | None) -> None:
    assert max_context(settings) == expected


def test_what_must_not_be_cast_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models import qwen3

    kept = property(lambda self: lambda name: "norm" not in name)
    monkeypatch.setattr(qwen3.Model, "cast_predicate", kept, raising=False)
    model, _ = load(folder, dtype=mx.bfloat16)
    dtypes = {("norm" in n, w.dtype) for n, w in tree_flatten(model.model.parameters())}
    assert dtypes == {(True, mx.float32), (False, mx.bfloat16)}


def test_quantized_matrices_keep_their_scales_where_16_bits_are_computed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.convert import convert

    write_causal(tmp_path / "source", hidden_size=64)
    convert(str(tmp_path / "source"), str(tmp_path / "made"), quantize=True, q_group_size=32,
            dtype="float16")  # fmt: skip
    assert floats(load(tmp_path / "made")[0]) == {mx.float32}
    monkeypatch.setattr("speculative_t5.checkpoints.causal.default_dtype", lambda: mx.bfloat16)
    assert floats(load(tmp_path / "made")[0]) == {mx.float16}
    assert floats(load(tmp_path / "made", dtype=mx.bfloat16)[0]) == {mx.bfloat16}


def floats(model: Any) -> set[mx.Dtype]:
    weights = tree_flatten(model.model.parameters())
    return {w.dtype for _, w in weights if mx.issubdtype(w.dtype, mx.floating)}


def test_a_model_that_asks_for_one_position_of_all_rows_is_refused() -> None:
    module = build({
        "model_type": "gpt_bigcode", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32,
        "n_inner": 16, "layer_norm_epsilon": 1e-5, "vocab_size": 20,
    })  # fmt: skip
    with pytest.raises(ValueError, match="cannot read rows of different lengths") as error:
        CausalModel(module, eos_token_id=0, max_context=32)
    check_message(str(error.value))


def test_a_model_without_an_end_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ValueError, match="does not say what ends an output") as error:
        load(folder)
    check_message(str(error.value), str(folder))


def test_prompts_get_no_end_and_controls_have_no_text(folder: Path) -> None:
    tokenizer = load(folder)[1]
    ids = tokenizer.encode("He goes home.")
    assert ids and 0 not in ids
    assert tokenizer.decode([*ids, 0, 1, 318]) == "He goes home."
    assert tokenizer.encode(END) == [0]


def test_opts_texts_begin_with_its_own_token(tmp_path: Path) -> None:
    """As published: no tokenizer.json, and </s> before every text."""
    write_causal(tmp_path, "opt", eos_token_id=2, bos_token_id=2, pad_token_id=1)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    named = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    pieces = [piece for piece in whole["vocab"] if not piece.startswith("<|")]
    vocab = named | {piece: 4 + i for i, piece in enumerate(pieces)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in whole["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({
            "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False,
            "bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>",
        })
    )  # fmt: skip
    model, tokenizer = load(tmp_path)
    ids = tokenizer.encode("He goes home.")
    assert ids[0] == 2 and 2 not in ids[1:]
    assert tokenizer.decode(ids) == "He goes home."
    assert model.eos_token_ids == {2}


def test_chats_are_put_into_the_models_form(folder: Path) -> None:
    model, tokenizer = load(folder)
    expected = tokenizer.encode("<|user|>He go home\n<|assistant|>")
    decoder = SpeculativeDecoder(model, None, tokenizer, chat=True)
    assert decoder.encode("He go home") == expected
    plain = SpeculativeDecoder(model, None, tokenizer)
    assert plain.encode("He go home") == tokenizer.encode("He go home")
    said = [{"role": "user", "content": "He go home"}]
    assert plain.encode(said) == expected
    answered = [*said, {"role": "assistant", "content": "OK"}, *said]
    assert plain.encode(answered)[-len(expected) :] == expected
    assert plain.generate(said, max_tokens=3).stats.emitted


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ({"role": "user"}, "str for role"),
        ({"role": "user", "content": 3}, "str for role, int for content"),
        ({}, "nothing"),
    ],
)
def test_messages_of_another_form_are_refused(
    folder: Path, message: dict[str, Any], found: str
) -> None:
    model, tokenizer = load(folder)
    with pytest.raises(ValueError, match=f"a message must be .*, got {found}$") as error:
        SpeculativeDecoder(model, None, tokenizer).encode([message])
    check_message(str(error.value), found)


def test_a_chat_is_a_list_of_messages(folder: Path) -> None:
    model, tokenizer = load(folder)
    said: list[Any] = [{"role": "user", "content": "x"}, "y"]
    with pytest.raises(ValueError, match="a message must be .*, got str$") as error:
        SpeculativeDecoder(model, None, tokenizer).encode(said)
    check_message(str(error.value), "str")
    with pytest.raises(ValueError, match="half of a surrogate|UTF-8"):
        tokenizer.encode_chat([{"role": "user", "content": "\ud800"}])  # type: ignore


def test_a_template_that_is_missing_or_refuses_is_told(folder: Path) -> None:
    said = [{"role": "user", "content": "He go home"}]
    edit_json(folder / "tokenizer_config.json", chat_template="{{ raise_exception('no\nusers') }}")
    with pytest.raises(ValueError, match=r"refuses these messages \(no\)") as error:
        SpeculativeDecoder(*load(folder)[:1], None, load(folder)[1]).encode(said)
    check_message(str(error.value))
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    model, tokenizer = load(folder)
    with pytest.raises(ValueError, match="no chat template") as error:
        SpeculativeDecoder(model, None, tokenizer).encode(said)
    check_message(str(error.value))
    with pytest.raises(ValueError, match="no chat template"):
        SpeculativeDecoder(model, None, tokenizer, chat=True)


def test_padded_vocabularies_are_cut_to_the_common_length(tmp_path: Path) -> None:
    """Either may be the wider one."""
    for name, size in (("narrow", 304), ("wide", 352)):
        write_causal(tmp_path / name, vocab_size=size, seed=size)
    for target, draft in (("narrow", "wide"), ("wide", "narrow")):
        decoder = SpeculativeDecoder.from_pretrained(tmp_path / target, tmp_path / draft)
        for temperature in (0.0, 1.0):
            out = decoder.generate("He go", max_tokens=30, temperature=temperature)
            assert out.stats.drafted
        alone = decoder.generate("He go", max_tokens=30, speculative=False)
        assert decoder.generate("He go", max_tokens=30).tokens == alone.tokens


def test_pairs_of_other_tokenizers_are_refused(folder: Path, tmp_path: Path) -> None:
    write_causal(tmp_path / "other")
    raw = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    raw["added_tokens"][2]["content"] = "<|bot|>"
    vocab = raw["model"]["vocab"]
    vocab["<|bot|>"] = vocab.pop("<|assistant|>")
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="must share a tokenizer: the target's has 300") as error:
        SpeculativeDecoder.from_pretrained(folder, tmp_path / "other")
    check_message(str(error.value), "300 pieces")


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:3000])


def without_a_tensor(folder: Path) -> None:
    stored = mx.load(str(folder / "model.safetensors"))
    del stored["model.norm.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), stored)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: edit_json(f / "config.json", model_type="qwen77"), "this is a qwen77 .*neither"),
        (lambda f: edit_json(f / "config.json", model_type="bart", is_encoder_decoder=True),
         "this is a bart .*expected one of the T5 family"),
        (lambda f: edit_json(f / "config.json", hidden_size=None), "does not make a qwen3"),
        (lambda f: edit_json(f / "config.json", num_hidden_layers=10**9), "num_hidden_layers"),
        (lambda f: edit_json(f / "config.json", hidden_size=32), "has shape .*, expected"),
        (lambda f: edit_json(f / "config.json", num_hidden_layers=1), "tensors that a qwen3 does"),
        (lambda f: edit_json(f / "config.json", quantization={"bits": 3}), "quantization in"),
        (lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "gptq"}),
         "are quantized by gptq"),
        (lambda f: edit_json(f / "config.json", eos_token_id="</s>"), "eos_token_id .* '</s>'"),
        (lambda f: edit_json(f / "config.json", eos_token_id=[0, 999]), "eos_token_id .* 999"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights in .*: expected"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer in .*: expected one of"),
        (lambda f: edit_json(f / "config.json", quantization=True), "quantization in .* True"),
        (lambda f: edit_json(f / "config.json", text_config={"n_layer": 10**9}), "n_layer in"),
        (lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "x"}'),
         "eos_token_id in .*generation_config.json is 'x'"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "no tokenizer can be made of"),
        (lambda f: edit_json(f / "config.json", model_type="opt"), "Qwen3ForCausalLM .*generates"),
        (truncated, "model.safetensors is truncated or damaged"),
        (without_a_tensor, "has no tensor model.norm.weight"),
    ],
)  # fmt: skip
def test_a_folder_with_something_wrong_is_refused_in_a_line(
    folder: Path, spoil: Any, message: str
) -> None:
    (folder / "generation_config.json").unlink()
    spoil(folder)
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    check_message(str(error.value))
    assert str(folder) in str(error.value)


NO_NUMBERS = (0, -1, float("nan"), float("inf"), "1e-5", True, {})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rms_norm_eps", (*NO_NUMBERS, 2.0)),
        ("layer_norm_eps", NO_NUMBERS),
        ("layer_norm_epsilon", NO_NUMBERS),
        ("rope_theta", (*NO_NUMBERS, 10**400)),
        ("partial_rotary_factor", (*NO_NUMBERS, 1.5)),
        ("query_pre_attn_scalar", NO_NUMBERS),
        ("final_logit_softcapping", NO_NUMBERS),
        ("embedding_multiplier", NO_NUMBERS),
        ("logit_scale", (float("nan"), float("-inf"))),
        ("head_dim", (0, -1, 2.5, "10", True, 2**31)),
        ("num_key_value_heads", (0, -1, 2.0)),
        ("max_position_embeddings", (0, -1, float("inf"), 1e9)),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    folder: Path, name: str, values: tuple[Any, ...]
) -> None:
    stored = json.loads((folder / "config.json").read_text())
    stored.pop("rope_parameters", None)
    for value in values:
        (folder / "config.json").write_text(json.dumps(stored | {name: value}))
        with pytest.raises(ValueError, match=f"{name} in config.json is .*, expected ") as error:
            load(folder)
        check_message(str(error.value), str(folder))


def test_heads_that_do_not_share_keys_evenly_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", num_key_value_heads=3)
    with pytest.raises(ValueError, match="num_attention_heads in .* is 4, .* multiple of") as error:
        load(folder)
    check_message(str(error.value), str(folder))


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"full_attention": {"rope_theta": 0}}, "rope_theta"),
        ({"factor": 0.0}, "factor"),
        ({"low_freq_factor": float("nan")}, "low_freq_factor"),
        ({"original_max_position_embeddings": 1e30}, "original_max_position_embeddings"),
        ({"short_factor": [1.0, float("inf")]}, "short_factor"),
        ({"mscale": float("nan")}, "mscale"),
    ],
)
def test_rotary_positions_that_make_no_sense_are_refused(
    folder: Path, name: str, wrong: dict[str, Any], found: str
) -> None:
    settings = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    edit_json(folder / "config.json", **{name: settings | wrong})
    with pytest.raises(ValueError, match=f"{found} in config.json is .*, expected ") as error:
        load(folder)
    check_message(str(error.value), str(folder))


def test_numbers_as_published_are_accepted(tmp_path: Path) -> None:
    """Sizes for each layer, null for what follows from others, 0 for what is left out."""
    published = {
        "model_type": "llama4", "rope_theta": 1e11, "rms_norm_eps": 1e-5, "head_dim": None,
        "max_position_embeddings": 10485760, "initializer_factor": 1, "attention_dropout": 0.0,
        "rope_scaling": {"mscale_all_dim": 0, "factor": 8, "attention_factor": None,
                         "long_factor": [1, 2.5], "rope_type": "longrope"},
        "intermediate_size": [8, 16], "num_attention_heads": 40, "num_key_value_heads": 8,
        "layer_norm_epsilon": None, "partial_rotary_factor": 1, "quantization": None,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert read_causal_config(tmp_path)["rope_theta"] == 1e11


@pytest.mark.parametrize(
    ("setting", "value"),
    [("activation_function", "relu"), ("scale_attn_by_inverse_layer_idx", True)],
)
def test_what_gpt2_could_be_and_never_is_is_refused(
    setting: str, value: Any, tmp_path: Path
) -> None:
    write_causal(tmp_path, "gpt2", **{setting: value})
    with pytest.raises(ValueError, match=f"{setting} in config.json is {value!r}") as error:
        load(tmp_path)
    check_message(str(error.value), repr(value))


def test_a_tokenizer_beyond_the_models_rows_is_refused(tmp_path: Path) -> None:
    write_causal(tmp_path, vocab_size=290)
    with pytest.raises(ValueError, match="has 300 pieces, the model 290 rows") as error:
        load(tmp_path)
    check_message(str(error.value), "290")


def test_without_mlx_lm_its_installation_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    stored = json.loads((folder / "config.json").read_text())
    for named in (["Qwen3ForCausalLM"], ["GPT2LMHeadModel"], None):
        (folder / "config.json").write_text(json.dumps(stored | {"architectures": named}))
        with pytest.raises(ValueError, match=r"run pip install 'mlx-lm>=0.32,<0.33'") as error:
            load(folder)
        check_message(str(error.value), "qwen3")
    edit_json(folder / "config.json", model_type="qwen77", architectures=["QwenModel"])
    with pytest.raises(ValueError, match="this is a qwen77 .*choose") as error:
        load(folder)
    assert "pip" not in str(error.value)
    check_message(str(error.value), str(folder))


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("bert", "BertForMaskedLM"),
        ("roberta", "RobertaForSequenceClassification"),
        ("llama", "LlamaForSequenceClassification"),
        ("xlm", "XLMForQuestionAnswering"),
        ("bart", "BartForConditionalGeneration"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("bert", "BertLMHeadModel"),
        ("longt5", "LongT5ForConditionalGeneration"),
    ],
)
def test_models_of_other_kinds_are_refused_by_what_they_are(
    tmp_path: Path, model_type: str, architecture: str, installed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not installed:
        monkeypatch.setitem(sys.modules, "mlx_lm", None)
    stored = {"model_type": model_type, "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"expected one of the T5 family.*decoder-only") as error:
        load(tmp_path)
    check_message(str(error.value), str(tmp_path))
    assert model_type in str(error.value) or architecture in str(error.value)
    assert "mlx-lm" not in str(error.value)


@pytest.mark.parametrize("kind", [["llama"], {"a": 1}, "a\nb", "cache", "../x", "", "x" * 5000])
def test_a_model_type_of_nonsense_is_refused(folder: Path, kind: Any) -> None:
    edit_json(folder / "config.json", model_type=kind)
    with pytest.raises(ValueError, match="this is a ") as error:
        load(folder)
    check_message(str(error.value), str(folder))
    assert len(str(error.value)) < 500


def test_the_one_private_name_of_mlx_lm_is_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, adapt causal._classes and the bounds of mlx-lm in pyproject.toml to it."""
    from mlx_lm import utils
    from mlx_lm.models import qwen3

    assert utils._get_classes({"model_type": "qwen3"}) == (qwen3.Model, qwen3.ModelArgs)
    monkeypatch.delattr(utils, "_get_classes")
    with pytest.raises(ValueError, match=r"mlx-lm .* lacks utils._get_classes: run") as error:
        load(folder)
    check_message(str(error.value), str(folder))


def test_the_version_of_mlx_lm_that_is_advised_is_the_one_required() -> None:
    required = (REPOSITORY / "pyproject.toml").read_text()
    assert required.count(f'"{MLX_LM}"') == required.count('"mlx-lm') == 2


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "model.safetensors.index.json"]
)
def test_pointers_of_git_lfs_are_told(folder: Path, name: str) -> None:
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(POINTER)
    with pytest.raises(ValueError, match=f"{name} is a Git LFS pointer.*: run git lfs pull"):
        load(folder)


def test_opt_needs_no_mlx_lm(tmp_path: Path) -> None:
    write_causal(tmp_path, "opt")
    code = (
        "import sys; sys.modules['mlx_lm'] = None\n"
        "from speculative_t5 import SpeculativeDecoder, load\n"
        f"model, tokenizer = load({str(tmp_path)!r})\n"
        "print(SpeculativeDecoder(model, 'lookup', tokenizer).generate('He go', max_tokens=5))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr and done.stdout


def test_caches_that_cannot_be_rewound_are_refused_by_their_folder(tmp_path: Path) -> None:
    write_causal(tmp_path, "gemma3", vocab_size=320)
    with pytest.raises(ValueError, match="RotatingKVCache, which cannot be rewound") as error:
        load(tmp_path)
    check_message(str(error.value), str(tmp_path))
