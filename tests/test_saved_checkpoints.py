"""Checkpoints as training programs save them: read as transformers reads them, or the cause named.

The names of tensors are those of a wrapper, an embedding has the name of the head, and so on. What
loads is converted as well, and both compute the logits of the model before it was saved so.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speculative_t5 import load
from speculative_t5.checkpoints import convert

import mlx.core as mx
import numpy as np
import pytest
import torch
from checkpoints import edit_tensors, refused
from conftest import edit_json
from families import (
    SHAPE,
    assert_close,
    merged_by_peft,
    reference_logits,
    write_adapter,
    write_family,
    write_gemma,
    write_model,
    write_tokenizer,
)

SOURCE = np.random.default_rng(0).integers(6, 100, (2, 9))
TARGET = np.random.default_rng(1).integers(6, 100, (2, 7))
Tensors = dict[str, Any]


def logits(name: Path, adapter: Path | None = None) -> mx.array:
    model, _ = load(name, dtype=mx.float32, adapter=adapter)
    found: mx.array = model(mx.array(SOURCE), mx.array(TARGET))
    return found


def check(folder: Path, model: Any) -> None:
    """Compare a checkpoint, and what it is converted to, with a model (torch)."""
    expected = reference_logits(model, SOURCE, TARGET)
    assert_close(logits(folder), expected)
    assert_close(logits(convert(str(folder), folder.parent / "converted")), expected)


def spoil(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Change the tensors in each of a folder's files."""
    for number in range(len([*folder.glob("*model*.safetensors")])):
        edit_tensors(folder, change, number)
    for path in folder.glob("*.bin"):
        tensors = torch.load(path)
        change(tensors)
        torch.save(tensors, path)
    for path in folder.glob("*.index.json"):
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))


def renamed(new: Callable[[str], str]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [*tensors]:
            tensors[new(name)] = tensors.pop(name)

    return change


def behind(beginning: str, *, but: str = "-") -> Callable[[Tensors], None]:
    """Put something before all names, but for some."""
    return renamed(lambda name: name if name.startswith(but) else beginning + name)


def wrapped(part: str, wrapper: str) -> Callable[[Tensors], None]:
    """Put a wrapper around a part of the model."""
    return renamed(lambda name: name.replace(f"{part}.", f"{part}.{wrapper}."))


# What names begin with, the family and the format.
WRAPPED: dict[str, tuple[str, str, Callable[[Tensors], None]]] = {
    "DataParallel": ("t5", "safetensors", behind("module.")),
    "DataParallel in a .bin": ("flan_t5", "bin", behind("module.")),
    "compiled": ("t5", "safetensors", behind("_orig_mod.")),
    "Lightning": ("flan_t5", "bin", behind("model.")),
    "compiled, in Lightning": ("t5", "safetensors", behind("model._orig_mod.")),
    "parallel, compiled": ("mt5", "safetensors", behind("_orig_mod.module.")),
    "DeepSpeed": ("t5_v1_1", "bin", behind("_forward_module.model.")),
    "shards": ("flan_t5", "shards", behind("module._orig_mod.")),
    "a head outside": ("flan_t5", "safetensors", behind("transformer.", but="lm_head.")),
    "a name of one's own": ("madlad400", "safetensors", behind("net.generator.")),
    "PEFT, merged": ("t5", "bin", behind("base_model.model.")),
    "blocks of FSDP": ("t5", "bin", wrapped("block.1", "_fsdp_wrapped_module")),
    "the whole and blocks of FSDP": (
        "flan_t5",
        "safetensors",
        renamed(
            lambda name: (
                "_fsdp_wrapped_module."
                + name.replace(
                    "block.0.", "block.0._fsdp_wrapped_module._checkpoint_wrapped_module."
                )
            )
        ),
    ),
    "T5Gemma": ("t5gemma", "safetensors", behind("module.")),
    "T5Gemma, in Lightning": ("t5gemma2", "safetensors", behind("model.")),
}


def write(folder: Path, family: str, form: str = "safetensors") -> Any:
    """Save a model (torch) of any family."""
    if family.startswith("t5gemma"):
        return write_gemma(folder, 2 if family == "t5gemma2" else 1)
    return write_family(folder, family, form)


@pytest.mark.parametrize("case", WRAPPED)
def test_wrappers_are_taken_off_names(case: str, tmp_path: Path) -> None:
    family, form, change = WRAPPED[case]
    folder = tmp_path / "saved"
    model = write(folder, family, form)
    spoil(folder, change)
    check(folder, model)


def test_two_copies_of_a_model_are_refused(tmp_path: Path) -> None:
    write_family(tmp_path, "t5")
    edit_tensors(tmp_path, lambda t: t.update({f"module.{n}": t[n] for n in [*t]}))
    with refused("has two tensors for .*, one of them module.*: save the model alone", tmp_path):
        load(tmp_path)


def test_what_is_not_in_the_wrapper_is_named(tmp_path: Path) -> None:
    write_family(tmp_path, "t5")
    spoil(tmp_path, behind("model."))
    edit_tensors(tmp_path, lambda t: t.update({"value_head.weight": torch.ones(2)}))
    with refused("has tensors that a T5 does not: value_head.weight", tmp_path):
        load(tmp_path)


ARCHITECTURES = (
    ("t5", "FSDPT5ForConditionalGeneration"),
    ("mt5", "FSDPMT5ForConditionalGeneration"),
    ("flan_t5", "PeftModelForSeq2SeqLM"),
    ("t5", "PeftModel"),
    ("t5", "OptimizedModule"),
    ("t5_v1_1", "DistributedDataParallel"),
    ("t5gemma", "FSDPT5GemmaForConditionalGeneration"),
)


@pytest.mark.parametrize(("family", "name"), ARCHITECTURES)
def test_the_class_of_a_wrapper_is_no_other_model(family: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    model = write(folder, family)
    edit_json(folder / "config.json", architectures=[name])
    check(folder, model)


@pytest.mark.parametrize("name", ["PeftModelForClassificationT5", "T5Stack", "FSDP"])
def test_classes_that_do_not_generate_are_refused(name: str, tmp_path: Path) -> None:
    write_family(tmp_path, "t5")
    edit_json(tmp_path / "config.json", architectures=[name])
    if name.startswith("Peft"):  # by its tensors, as any wrapper
        spoil(tmp_path, lambda t: t.update({"classifier.weight": torch.ones(2)}))
    with refused(f"this is a {name}|has tensors that a T5 does not: classifier.weight"):
        load(tmp_path)


def only_as_head(tensors: Tensors) -> None:
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "shared.weight")
    found = [tensors.pop(name) for name in names if name in tensors]
    if found:
        tensors["lm_head.weight"] = found[0]


@pytest.mark.parametrize(
    ("family", "form", "beginning"),
    [
        ("t5", "safetensors", ""),
        ("t5", "bin", ""),
        ("t5", "shards", ""),
        ("codet5", "safetensors", ""),
        ("t5", "bin", "module."),
    ],
)
def test_an_embedding_may_be_stored_as_the_head(
    family: str, form: str, beginning: str, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    model = write_family(folder, family, form)
    spoil(folder, only_as_head)
    spoil(folder, behind(beginning))
    check(folder, model)


def test_a_head_of_its_own_is_no_embedding(tmp_path: Path) -> None:
    write_family(tmp_path, "flan_t5")
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    edit_tensors(tmp_path, lambda t: t.pop("shared.weight"))
    with refused("has the tensor lm_head.weight and no embedding, and by config.json .* differ"):
        load(tmp_path)


def with_biases(
    value: float, *, dtype: torch.dtype = torch.float32, of: str = "layer_norm"
) -> Callable[[Tensors], None]:
    """Add a bias for each layer of a kind."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if f"{of}.weight" in name]:
            bias = torch.full((len(tensors[name]),), value, dtype=dtype)
            tensors[name.replace(".weight", ".bias")] = bias

    return change


@pytest.mark.parametrize(
    ("form", "biases"),
    [
        ("safetensors", with_biases(0.0)),
        ("safetensors", with_biases(0.0, dtype=torch.float16)),
        ("bin", with_biases(-0.0)),
        ("bin", with_biases(0.0, dtype=torch.bfloat16)),
        ("safetensors", with_biases(0.0, of="Attention.q")),
        ("old_bin", with_biases(0.0, of="DenseReluDense.wo")),
    ],
)
def test_biases_of_zeros_change_nothing(
    form: str, biases: Callable[[Tensors], None], tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    model = write_family(folder, "t5", form)
    spoil(folder, biases)
    check(folder, model)


def parts_of(name: str) -> Callable[[Tensors], None]:
    """Replace a weight by what PEFT makes of it."""

    def change(tensors: Tensors) -> None:
        module = f"decoder.block.0.layer.0.SelfAttention.{name}"
        weight = tensors.pop(f"{module}.weight")
        tensors[f"{module}.base_layer.weight"] = weight
        tensors[f"{module}.lora_A.default.weight"] = weight[:2].clone()
        tensors[f"{module}.lora_B.default.weight"] = weight[:, :2].clone()

    return change


def empty(*, but: str = "-") -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in tensors:
            if but not in name:
                tensors[name] = torch.zeros(0)

    return change


UNREADABLE: list[tuple[Callable[[Tensors], None], str]] = [
    (parts_of("q"), "adapter of PEFT that was not merged, as decoder.*base_layer.* shows: merge"),
    (parts_of("o"), "merge it by merge_and_unload.. and save the model, or give the adapter alone"),
    (
        lambda t: t.update({"lm_head.modules_to_save.default.weight": torch.ones(2)}),
        "adapter of PEFT that was not merged, as lm_head.modules_to_save.default.weight shows",
    ),
    (
        empty(),
        r"has \d+ tensors without numbers, such as .* of shape \(0,\), as DeepSpeed's ZeRO-3",
    ),
    (
        empty(but="norm"),
        r"has \d+ tensors without numbers.*: merge the parts with its zero_to_fp32",
    ),
    (
        lambda t: t.update({"shared.weight": torch.zeros(0)}),
        "has 1 tensor without numbers, such as",
    ),
    (with_biases(0.5), "layer_norm.bias is not zero, and the norms of a T5 have no bias: choose"),
    (with_biases(float("nan")), "layer_norm.bias is not zero"),
    (with_biases(0.5, of="Attention.q"), "has tensors that a T5 does not: .*Attention.q.bias"),
]


@pytest.mark.parametrize(("change", "message"), UNREADABLE)
def test_what_cannot_be_read_says_how_it_was_saved(
    change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    write_family(tmp_path / "saved", "t5")
    edit_tensors(tmp_path / "saved", change)
    for read in (load, lambda folder: convert(str(folder), tmp_path / "out")):
        with refused(message, tmp_path / "saved"):
            read(tmp_path / "saved")  # type: ignore[operator]
    assert not (tmp_path / "out").exists()


def test_an_index_shows_no_long_name_whole(tmp_path: Path) -> None:
    write_family(tmp_path, "flan_t5", "shards")
    path = next(tmp_path.glob("*.index.json"))
    index = json.loads(path.read_text())
    for name in ("m" * 5000, "m" * 5000 + ".safetensors"):
        index["weight_map"]["shared.weight"] = name
        path.write_text(json.dumps(index))
        with refused("names the shard 'mmm.*mmm.*', expected a file's name alone", tmp_path) as _:
            load(tmp_path)


# The rows of the new embedding, beside 320.
ENLARGED = [
    ("t5", 330, {}),
    ("flan_t5", 330, {}),
    ("t5", 340, {"modules_to_save": ["shared"]}),
    ("t5_v1_1", 333, {"modules_to_save": ["shared", "lm_head"]}),
    ("t5", 310, {}),
    ("mt5", 401, {"use_rslora": True}),
]


@pytest.mark.parametrize(("family", "rows", "options"), ENLARGED)
def test_an_adapter_may_bring_an_embedding_and_its_tokenizer(
    family: str, rows: int, options: dict[str, Any], tmp_path: Path
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = write_family(base, family)
    model.resize_token_embeddings(rows, mean_resizing=False)
    torch.manual_seed(3)
    model.get_input_embeddings().weight.data.normal_()
    options = {"target_modules": ["q", "v"], "task_type": "SEQ_2_SEQ_LM"} | options
    trained = write_adapter(adapter, model, base, **options)
    trained.save_pretrained(adapter, save_embedding_layers=True)
    edit_json(adapter / "adapter_config.json", base_model_name_or_path=str(base))
    write_tokenizer(adapter, "spiece")
    added = {f"<added_{i}>": 220 + i for i in range(5)}
    (adapter / "added_tokens.json").write_text(json.dumps(added))
    merged = merged_by_peft(trained)
    if "modules_to_save" in options:  # PEFT's passes read the resized embedding, ours the trained
        merged.set_input_embeddings(merged.shared)
    expected = reference_logits(merged, SOURCE, TARGET)
    assert expected.shape[2] == rows
    assert_close(logits(base, adapter), expected)
    folder = convert(str(adapter), tmp_path / "out")
    for name in (adapter, folder):
        assert_close(logits(name), expected)
        found = load(name)[1]
        assert found is not None and found.vocabulary.size == 225
        assert found.encode("<added_3>")[:-1] == [223]


def test_an_adapter_without_a_tokenizer_keeps_its_models(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = write_gemma(base, 2)
    model.resize_token_embeddings(328, mean_resizing=False)
    trained = write_adapter(adapter, model, base, target_modules=["q_proj"])
    trained.save_pretrained(adapter, save_embedding_layers=True)
    edit_json(adapter / "adapter_config.json", base_model_name_or_path=str(base))
    found, tokenizer = load(adapter, dtype=mx.float32)
    assert found.info.vocab_size == 328
    assert tokenizer is not None and tokenizer.vocabulary == load(base)[1].vocabulary  # type: ignore[union-attr]
    merged = merged_by_peft(trained)
    assert_close(logits(adapter), reference_logits(merged, SOURCE, TARGET))


def test_an_embedding_without_its_head_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "base", SHAPE, own_head=True)
    write_tokenizer(tmp_path / "base", "spiece")
    edit_json(tmp_path / "base" / "config.json", tie_word_embeddings=False)
    model.resize_token_embeddings(330, mean_resizing=False)
    adapter = tmp_path / "adapter"
    trained = write_adapter(adapter, model, tmp_path / "base", target_modules=["q"])
    trained.save_pretrained(adapter, save_embedding_layers=True)
    edit_json(adapter / "adapter_config.json", base_model_name_or_path=str(tmp_path / "base"))
    edit_tensors(adapter, lambda t: t.pop("base_model.model.lm_head.weight"))
    with refused(r"embedding of shape \(330, 24\), and its lm_head.weight has \(320, 24\): save"):
        load(adapter)
