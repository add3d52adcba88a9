"""Adapters made by PEFT are merged as PEFT merges them, or refused by name."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints import ModelFolder, convert, list_models, locate, tensors
from speculative_t5.checkpoints.adapters import Merged, WeightChange
from speculative_t5.checkpoints.inspection import inspect
from speculative_t5.checkpoints.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from speculative_t5.checkpoints.tensors import StoredTensor
from speculative_t5.models import same_weights, sample_weights

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import edit_tensors, refused
from commands import Call
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
from huggingface_hub import constants
from local_hub import Hub, use

SOURCE = np.random.default_rng(0).integers(6, 120, (2, 9))
TARGET = np.random.default_rng(1).integers(6, 120, (2, 7))
BASES: dict[str, Callable[[Path], Any]] = {
    "t5": lambda folder: write_family(folder, "t5"),
    "t5_v1_1": lambda folder: write_family(folder, "t5_v1_1"),
    "t5gemma": lambda folder: write_gemma(folder, 1),
    "t5gemma2": lambda folder: write_gemma(folder, 2),
}
T5S, GEMMAS = ("t5", "t5_v1_1"), ("t5gemma", "t5gemma2")
TIED = [  # of the output head and the embedding, which are one, training changes one alone
    (("t5gemma",), ["embed_tokens", "v_proj"], None), (("t5gemma",), ["q_proj"], "embed_tokens"),
    (GEMMAS, ["out_proj", "k_proj"], None), (("t5",), ["lm_head", "v"], None),
]  # fmt: skip
LORAS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {  # and the bases that they are for
    "every matrix": ((*T5S, *GEMMAS), {"target_modules": "all-linear"}),
    "rank-stabilized": (T5S, {"target_modules": ["q", "v"], "use_rslora": True}),
    "DoRA": (("t5", "t5gemma2"), {"target_modules": r".*\.(q|wo|q_proj)", "use_dora": True}),
    "ranks by pattern": (
        ("t5_v1_1",),
        {
            "target_modules": ["q", "v"],
            "rank_pattern": {r".*decoder.*\.q": 2, "v": 3},
        },
    ),
    "an output head": (("t5_v1_1",), {"target_modules": ["lm_head"], "fan_in_fan_out": True}),
    "norms": (T5S, {"target_modules": ["k"], "modules_to_save": ["layer_norm"]}),
    "a head of its own": (("t5",), {"target_modules": ["o"], "modules_to_save": ["lm_head"]}),
    "norms of T5Gemma": (GEMMAS, {"target_modules": ["k_proj"], "modules_to_save": ["norm"]}),
    **{
        f"tied head: {' '.join(targets)} {saved}": (
            bases,
            {"target_modules": targets, "modules_to_save": [saved] if saved else None},
        )
        for bases, targets, saved in TIED
    },
}
CASES = [(lora, base) for lora, (bases, _) in LORAS.items() for base in bases]


def logits(name: Path | str, adapter: Path | None = None) -> mx.array:
    model, _ = load(name, dtype=mx.float32, adapter=adapter)
    found: mx.array = model(mx.array(SOURCE), mx.array(TARGET))
    return found


@pytest.mark.parametrize(("lora", "base"), CASES)
def test_merged_models_compute_what_peft_computes(lora: str, base: str, tmp_path: Path) -> None:
    """The base is a checkpoint or has been converted; the adapter is given with it or alone."""
    folder, adapter = tmp_path / "base", tmp_path / "adapter"
    reference = write_adapter(adapter, BASES[base](folder), folder, **LORAS[lora][1])
    expected = reference_logits(reference, SOURCE, TARGET)
    if not lora.startswith("tied head"):  # where PEFT warns of merging
        theirs = reference_logits(merged_by_peft(reference), SOURCE, TARGET)
        assert_close(mx.array(theirs), expected)
    assert_close(logits(folder, adapter), expected)
    assert_close(logits(convert(str(adapter), tmp_path / "merged")), expected)
    convert(str(folder), tmp_path / "converted")
    shutil.rmtree(folder)
    (tmp_path / "converted").rename(folder)
    assert_close(logits(adapter), expected)


def test_blocks_of_a_weight_get_their_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights are read, changed and written some rows at a time."""
    weight, up, down = (np.random.rand(*s).astype("f4") for s in ((64, 16), (64, 4), (4, 16)))
    stored, a, b = (
        StoredTensor(each.shape, mx.float32, partial(np.copy, each)) for each in (weight, down, up)
    )
    change = WeightChange("q", parts={"lora_A": a, "lora_B": b})
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 512)
    merged = Merged(weight.shape, mx.float32, stored.open, change, 0.5)
    assert {len(block) for block in merged.blocks()} == {8}
    np.testing.assert_allclose(merged.read(), weight + 0.5 * up @ down, rtol=1e-6)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of a size that can be quantized, an adapter, and what PEFT merges them into."""
    root = tmp_path_factory.mktemp("originals")
    shape = SHAPE | {"d_model": 64, "d_ff": 64, "vocab_size": 120}
    model = write_model(root / "base", shape, own_head=False)
    write_tokenizer(root / "base", "spiece")
    changed = write_adapter(root / "lora", model, root / "base", target_modules=["q", "v"])
    shutil.copytree(root / "base", root / "reference")
    merged_by_peft(changed).save_pretrained(root / "reference")
    return root


@pytest.fixture
def here(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The originals as models by name."""
    monkeypatch.setenv("SPECULATIVE_T5_WEIGHTS", str(tmp_path / "weights"))
    shutil.copytree(originals, tmp_path / "weights")
    edit_json(tmp_path / "weights" / "lora" / ADAPTER_CONFIG, base_model_name_or_path="base")
    yield tmp_path / "weights"


def test_weights_are_quantized_after_merging(here: Path) -> None:
    folders = [
        convert(str(here / name), here / f"{name}-{bits}-{i}", quantize=bits, group_size=32)
        for bits in (4, 8)
        for i in (1, 2)
        for name in ("lora", "reference")
    ]
    for i in range(0, len(folders), 4):
        ours, reference, again, _ = folders[i : i + 4]
        assert (ours / "weights.npz").read_bytes() == (again / "weights.npz").read_bytes()
        assert_close(logits(ours), np.array(logits(reference)))
    small = convert(str(here / "base"), here / "small" / "base", quantize=8)
    with refused("small/base is quantized, and an adapter is merged before that: convert"):
        load(small, adapter=here / "lora")


def test_what_was_merged_is_known(here: Path, call: Call) -> None:
    convert(str(here / "base"), here / "plain")
    merged = convert(str(here / "base"), here / "merged", adapter=str(here / "lora"))
    assert ModelFolder(merged).origin["adapter"] == "lora"
    families = {each.folder.name: (each.family, each.error) for each in list_models()}
    assert families["merged"] == ("T5 v1.0 with lora", None)
    assert families["plain"] == ("T5 v1.0", None)
    assert families["lora"] == ("adapter for base", None)
    assert "adapter for base" in call("models").out
    base, changed = (load(name, dtype=mx.float32)[0] for name in ("base", "lora"))
    assert base.fingerprint != changed.fingerprint
    assert not same_weights(sample_weights(base), sample_weights(changed))
    digests = {each.digest() for each in (locate("base"), locate("base", "lora"), locate("lora"))}
    assert len(digests) == 2
    assert inspect(str(here / "lora")).num_parameters == inspect(str(here / "base")).num_parameters


def test_every_command_takes_an_adapter(here: Path, call: Call) -> None:
    expected = SpeculativeDecoder.from_pretrained("reference", None, dtype=mx.float32)
    prompt = "He go home with a dog."
    text = expected.generate(prompt, max_tokens=8).text
    base = SpeculativeDecoder.from_pretrained("base", None, dtype=mx.float32)
    assert text != base.generate(prompt, max_tokens=8).text
    wanted = ["--max-tokens", "8", "--dtype", "float32", "--draft-model", "lookup"]
    for given in (
        ["--adapter", "lora"],
        ["--model", "lora"],
        ["--model", "base", "--adapter", str(here / "lora")],
    ):
        done = call("--prompt", prompt, "--json", *given, *wanted)
        assert done.records[0]["text"] == text, given
    (here / "prompts.txt").write_text(f"{prompt}\n")
    (record,) = call("batch", str(here / "prompts.txt"), "--adapter", "lora", *wanted).records
    assert record["text"] == text
    done = call("document", str(here / "prompts.txt"), "--adapter", "lora", *wanted)
    assert done.code == 0
    done = call("convert", "--adapter", "lora", "--output", str(here / "out"))
    assert done.code == 0 and done.out.startswith(str(here / "out"))
    call("--prompt", "A.", "--adapter", "base").check_error("base is not an adapter")
    call("--prompt", "A.", "--model", "reference", "--adapter", "lora").check_error("base")


def test_a_draft_of_the_base_is_left_out(here: Path) -> None:
    edit_json(here / "base" / "config.json", draft="reference")
    assert SpeculativeDecoder.from_pretrained("base").draft
    for given in ({"adapter": "lora"}, {"adapter": here / "lora", "draft": "lookup"}):
        assert not SpeculativeDecoder.from_pretrained("base", **given).draft  # type: ignore[arg-type]
    assert not SpeculativeDecoder.from_pretrained("lora").draft
    assert not ModelFolder(convert(str(here / "lora"), here / "out")).draft


def set_config(**entries: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / ADAPTER_CONFIG, **entries)


def rename(old: str, new: str) -> Callable[[Path], None]:
    def change(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return lambda folder: edit_tensors(folder, change)


LORA_A = "decoder.block.0.layer.0.SelfAttention.q.lora_A"
REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (set_config(peft_type="LOHA"), "with peft_type 'LOHA', which is not offered: merge it"),
    (set_config(init_lora_weights="pissa_niter_4"), "init_lora_weights 'pissa_niter_4', which is"),
    (set_config(lora_bias=True), "with lora_bias True, which is not offered"),
    (set_config(trainable_token_indices=[1]), r"trainable_token_indices \[1\], which is not"),
    (set_config(lora_alpha=10**400), "adapter_config.json: lora_alpha is 1000.*, expected a n"),
    (set_config(alpha_pattern={"q": 5}), "with alpha_pattern {'q': 5}, which is not offered"),
    (set_config(base_model_name_or_path="a" * 300), "is an adapter that names no model: give the"),
    (set_config(revision="v2"), "is an adapter for revision 'v2' of base: download that, and give"),
    (set_config(lora_alpha="8"), "adapter_config.json: lora_alpha is '8', expected a number"),
    (set_config(base_model_name_or_path=None), "is an adapter that names no model: give the model"),
    (set_config(base_model_name_or_path="/no/where"), "the model of the adapter .* is missing: no"),
    (rename("SelfAttention.q", "r"), "r.weight, which this model does not have: give base as"),
    (rename("lora_B", "lora_D"), "has {'lora_A': .*}.* expected .*|lora_D.* does not have: give"),
    (rename("lora_A", "lora_embedding_A"), "has {'lora_B': .*, 'lora_embedding_A': .*}.* expected"),
    (
        lambda f: edit_tensors(f, lambda t: t.update({n: t[n][:, 1:] for n in t if LORA_A in n})),
        r"has {'lora_A': \(4, 63\), .*}.* expected {'lora_A': \(4, 64\)",
    ),
    (lambda f: edit_tensors(f, lambda t: t.clear()), "changes nothing in a model of texts"),
    (lambda f: (f / ADAPTER_WEIGHTS[0]).unlink(), "no weights in .*lora: expected adapter_model"),
    (lambda f: (f / ADAPTER_CONFIG).write_text("["), "adapter_config.json is not JSON"),
]


@pytest.mark.parametrize(("spoil", "message"), REFUSED)
def test_what_cannot_be_merged_is_refused(
    spoil: Callable[[Path], object], message: str, here: Path
) -> None:
    spoil(here / "lora")
    with refused(message):
        load(here / "lora")
    with refused(message):
        convert(str(here / "lora"), here / "out")
    assert not (here / "out").exists()


def test_an_adapter_for_another_model_is_refused(here: Path) -> None:
    with refused("is an adapter for base, and the model is reference: give base as the model, or"):
        load("reference", adapter="lora")
    with refused("base is not an adapter: give a folder with adapter_config.json and no model"):
        load("base", adapter="base")
    with refused("does not go with an adapter: leave --revision out|--revision"):
        convert(str(here / "lora"), here / "out", revision="main")
    convert(str(here / "base"), here / "plain")
    edit_json(here / "lora" / ADAPTER_CONFIG, base_model_name_or_path="plain")
    with refused("plain is or holds the checkpoint itself: choose another --output"):
        convert("plain", here / "plain", adapter="lora", force=True)
    write_gemma(here / "small", 2)
    edit_json(here / "lora" / ADAPTER_CONFIG, base_model_name_or_path="/some/where/base")
    assert mx.array_equal(logits("lora"), logits("base", here / "lora"))
    edit_json(here / "lora" / ADAPTER_CONFIG, base_model_name_or_path="some/where/small")
    with refused("changes .*, which this model does not have: give some/where/small as the mod"):
        load("small", adapter="lora")


def test_adapters_come_from_the_hub(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its base, each once."""
    hub = Hub(tmp_path / "hub")
    edit_json(here / "lora" / ADAPTER_CONFIG, base_model_name_or_path="someone/base")
    shutil.move(here, hub.root / "someone")
    use(monkeypatch, hub.endpoint, cache=tmp_path / "cache")
    merged = convert("someone/lora", tmp_path / "out")
    assert {ADAPTER_CONFIG, ADAPTER_WEIGHTS[0], "model.safetensors"} <= {*hub.downloads()}
    expected = np.array(logits("someone/lora"))
    assert_close(logits(merged), expected)
    quantized = convert("someone/base", quantize=8)
    assert ModelFolder(quantized).origin["repository"] == "someone/base"
    assert_close(logits("someone/lora"), expected)
    assert ModelFolder(tmp_path / "out").origin == {
        "base": "base",
        "adapter": "lora",
        "dtype": None,
        "quantize": None,
        "group_size": 64,
        "keep_wo": None,
    }
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert_close(logits("someone/lora"), expected)
    assert hub.requests == []
    hub.server.shutdown()
    hub.server.server_close()
