"""Folders of safetensors that `convert` writes: read by others, and converted back."""

import shutil
from pathlib import Path
from typing import Any

from speculative_t5 import load
from speculative_t5.checkpoints import convert
from speculative_t5.checkpoints.dequantizing import KEEP_VARIABLE
from speculative_t5.checkpoints.tensors import parameters_of

import mlx.core as mx
import pytest
import torch
from checkpoints import opened, refused
from commands import Call
from conftest import REPOSITORY
from families import assert_close, write_gemma
from huggingface_hub import ModelCard
from test_mlx_folders import KINDS, quantize_folder, write_kind
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

TOKENS = torch.tensor([[5, 17, 9, 4]]), torch.tensor([[0, 9, 4, 3]])
QUANTIZED = {"quantize": 8, "group_size": 32}


@pytest.fixture(params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path: Path, spiece: bytes) -> Path:
    write_kind(tmp_path / "source", request.param, spiece)
    return tmp_path / "source"


@pytest.fixture
def flan(tmp_path: Path, spiece: bytes) -> Path:
    write_kind(tmp_path / "source", "flan-t5", spiece)
    return tmp_path / "source"


def stored(folder: Path) -> dict[str, mx.array]:
    """What MLX reads of a folder's files."""
    found: dict[str, mx.array] = {}
    for path in folder.glob("*.safetensors"):
        read: Any = mx.load(str(path))
        assert not found.keys() & read.keys()
        found |= read
    return found


def same(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    """Whether two sets of arrays are equal, types included."""
    pairs = [(a[name], b[name]) for name in a] if a.keys() == b.keys() else []
    return bool(pairs) and all(x.dtype == y.dtype and mx.array_equal(x, y) for x, y in pairs)


def test_transformers_reads_it_and_has_the_same_logits(source: Path) -> None:
    """And MLX its tensors, of the names and bits of the source."""
    made = convert(str(source), source.with_name("made"), format="safetensors")
    found, original = stored(made), stored(source)
    assert found and all(mx.array_equal(found[name], original[name]) for name in found)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(made).eval()
    with torch.inference_mode():
        expected = model(input_ids=TOKENS[0], decoder_input_ids=TOKENS[1]).logits.numpy()
    ours: Any = load(made, dtype="float32")[0]
    assert_close(ours(mx.array(TOKENS[0].numpy()), mx.array(TOKENS[1].numpy())), expected)


def test_transformers_reads_its_tokenizer(tmp_path: Path) -> None:
    write_gemma(tmp_path / "source", 1)
    made = convert(str(tmp_path / "source"), tmp_path / "made", format="safetensors")
    theirs = AutoTokenizer.from_pretrained(made)
    assert theirs("1, 2, 3").input_ids == load(made)[1].encode("1, 2, 3")


@pytest.mark.parametrize("options", [{}, QUANTIZED, QUANTIZED | {"dtype": "bfloat16"}])
def test_bits_survive_there_and_back(options: dict[str, Any], source: Path) -> None:
    place = source.parent
    ours = convert(str(source), place / "ours", **options)
    saved = convert(str(source), place / "saved", format="safetensors", **options)
    of_ours = convert(str(ours), place / "of-ours", format="safetensors")
    back, again = convert(str(saved), place / "back"), convert(str(of_ours), place / "again")
    for folder in (back, again):
        assert (folder / "weights.npz").read_bytes() == (ours / "weights.npz").read_bytes()
    assert same(stored(saved), stored(of_ours))
    for name in ("model.safetensors", "config.json"):
        assert (saved / name).read_bytes() == (of_ours / name).read_bytes(), name
    assert load(saved)[0].fingerprint == load(ours)[0].fingerprint


def test_what_mlx_has_quantized_is_what_convert_writes(source: Path) -> None:
    """Folders that others made have the bits of ours, and are converted as they are."""
    place = source.parent
    quantize_folder(source, place / "theirs", 8, 32)
    ours = convert(str(source), place / "ours", format="safetensors", keep_wo=False, **QUANTIZED)
    again = convert(str(place / "theirs"), place / "again", format="safetensors")
    # Embeddings of few weights stay as they are here, and elsewhere depend on how they are held.
    found, theirs = (
        {name: array for name, array in stored(path).items() if "embed" not in name}
        for path in (ours, again)
    )
    assert same(found, theirs)


def test_mixed_layers_stay_as_they_are(flan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEEP_VARIABLE, "1")
    place = flan.parent
    quantize_folder(
        flan,
        place / "theirs",
        chosen=lambda name: {"bits": 4, "group_size": 32} if ".block.1." in name else True,
    )
    for name, format in (("ours", "npz"), ("saved", "safetensors")):
        made = convert(str(place / "theirs"), place / name, format=format)
        assert opened(made).config.quantization == opened(place / "theirs").config.quantization
        found, theirs = (parameters_of(load(path)[0]) for path in (made, place / "theirs"))
        assert same(found, theirs)
    assert same(stored(place / "saved"), stored(place / "theirs"))


def test_dequantized_weights_are_what_the_bits_stand_for(flan: Path) -> None:
    place = flan.parent
    meant = quantize_folder(flan, place / "small", 4, 64)
    whole = convert(str(place / "small"), place / "whole", dequantize=True, format="safetensors")
    assert same(stored(whole), {name: meant[name] for name in stored(whole)})
    halves = convert(str(flan), place / "halves", dtype="bfloat16", **QUANTIZED)
    made = convert(str(halves), place / "made", dequantize=True)
    assert {tensor.dtype for tensor in opened(made).tensors.values()} == {mx.bfloat16}
    exact = convert(str(halves), place / "exact", dequantize=True, dtype="float32")
    assert same(parameters_of(load(exact, dtype="float32")[0]), dequantized(halves))


def dequantized(folder: Path) -> dict[str, mx.array]:
    """Every parameter of a folder of .npz, as float32."""
    found: Any = mx.load(str(folder / "weights.npz"))
    modules = [name.removesuffix(".scales") for name in found if name.endswith(".scales")]
    for module in modules:
        parts = [found.pop(f"{module}.{part}") for part in ("weight", "scales", "biases")]
        small = (part.astype(mx.float32) for part in parts[1:])
        found[f"{module}.weight"] = mx.dequantize(parts[0], *small, 32, 8)
    return {name: array.astype(mx.float32) for name, array in found.items()}


def test_large_models_are_written_in_shards(flan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = convert(str(flan), flan.with_name("whole"), format="safetensors", **QUANTIZED)
    monkeypatch.setattr("speculative_t5.checkpoints.tensors.SHARD_BYTES", 40_000)
    parts = convert(str(flan), flan.with_name("parts"), format="safetensors", **QUANTIZED)
    shards = sorted(path.name for path in parts.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert same(stored(whole), stored(parts))
    assert load(whole)[0].fingerprint == load(parts)[0].fingerprint
    # Replaced by one of another form, nothing of it is left behind.
    convert(str(flan), parts, force=True)
    assert not [*parts.glob("*.safetensors*"), *parts.glob("README.md")]


def test_every_tensor_begins_at_a_multiple_of_its_type(flan: Path) -> None:
    made = convert(str(flan), flan.with_name("made"), format="safetensors", quantize=4)
    content = (made / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0 and content[8:9] == b"{"


def test_the_card_says_what_it_is_and_how_to_run_it(flan: Path) -> None:
    made = convert(str(flan), flan.with_name("tiny-8bit"), format="safetensors", quantize=8)
    card = ModelCard.load(made / "README.md")
    assert card.data.library_name == "mlx" and card.data.tags == ["mlx", "speculative_t5"]
    assert card.data.pipeline_tag == "text2text-generation" and card.data.license is None
    assert "# tiny-8bit" in card.text and "matrices in 8 bits" in card.text
    assert "python -m speculative_t5 --model tiny-8bit" in card.text
    with pytest.raises(AttributeError):
        _ = card.data.attribution


def test_shipped_weights_keep_their_licence_and_attribution(tmp_path: Path) -> None:
    made = convert(
        str(REPOSITORY / "weights" / "correct-small"), tmp_path / "small", format="safetensors"
    )
    licence = (REPOSITORY / "weights" / "LICENSE").read_text()
    card = ModelCard.load(made / "README.md")
    assert card.data.license == "cc-by-2.0" and licence.strip() in card.text
    assert (made / "LICENSE").read_text() == licence


def test_only_what_this_package_has_written_is_replaced(flan: Path) -> None:
    place = flan.parent
    shutil.copytree(flan, place / "theirs")
    made = convert(str(flan), place / "made", format="safetensors")
    with refused("made exists: use --force to replace it"):
        convert(str(flan), made, format="safetensors")
    convert(str(flan), made, format="safetensors", force=True)
    for force in (False, True):
        with refused("theirs exists and is not a converted model: choose another --output"):
            convert(str(flan), place / "theirs", format="safetensors", force=force)
    assert sorted(stored(place / "theirs")) == sorted(stored(flan))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": "gguf"}, "format must be npz or safetensors, got 'gguf'"),
    "both": (
        {"dequantize": True, "quantize": 8},
        "dequantize and quantize exclude each other: leave one out",
    ),
    "dense": ({"dequantize": True}, "is not quantized: leave --dequantize out"),
    "bits": ({"quantize": 3, "format": "safetensors"}, "must be to 4 or 8 bits, got 3"),
}


@pytest.mark.parametrize("case", BAD)
def test_options_that_cannot_be_are_refused_before_anything_is_written(
    case: str, flan: Path
) -> None:
    options, message = BAD[case]
    with refused(message):
        convert(str(flan), flan.with_name("new"), **options)
    assert not flan.with_name("new").exists()


def test_the_command_writes_them(flan: Path, call: Call) -> None:
    new = flan.with_name("new")
    done = call("convert", str(flan), "-o", str(new), "--format", "safetensors", "--quantize", "8")
    assert done.code == 0 and (new / "model.safetensors").is_file()
    done = call("convert", str(new), "-o", str(flan.with_name("whole")), "--dequantize")
    assert done.code == 0
    done = call("--model", str(new), "--prompt", "1, 2, 3", "--max-tokens", "5")
    assert done.code == 0
