"""Encoders alone: transformers' hidden states, sentence-transformers' vectors, rankings."""

import shutil
from pathlib import Path
from typing import Any

from speculative_t5 import Encoder, SpeculativeDecoder, load, rank
from speculative_t5.checkpoints import as_listing, convert, inspect
from speculative_t5.generation.encoder import TOKENS_IN_PASS, groups_of
from speculative_t5.kernels import takes_stored
from speculative_t5.models import EncoderDecoder, TextEncoder

import mlx.core as mx
import numpy as np
import pytest
import torch
import transformers
from checkpoints import opened, refused
from conftest import V1_0, V1_1, edit_json, write_checkpoint
from families import write_adapter, write_tokenizer
from local_hub import Hub, use
from test_mlx_folders import KINDS, WIDE, write_kind

TEXTS = [
    "1, 2, 3",
    "one two",
    "",
    "a b c d e f g h i j k l m n o p",
    "3",
    "4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22",
]
TOKENS = mx.array([[5, 17, 9, 4, 1], [7, 8, 1, 0, 0]])
MASK = mx.array([[True] * 5, [True, True, True, False, False]])
ALONE = {"t5": "T5EncoderModel", "flan-t5": "T5EncoderModel", "umt5": "UMT5EncoderModel"}


def expected_states(folder: Path) -> np.ndarray:
    model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    ids, mask = torch.tensor(TOKENS.tolist()), torch.tensor(MASK.tolist()).long()
    with torch.inference_mode():
        found = model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
    states: np.ndarray = found.numpy()
    return states


def write_encoder(source: Path, folder: Path, kind: str) -> None:
    """Save the encoder of a checkpoint as transformers does."""
    model: Any = getattr(transformers, ALONE[kind]).from_pretrained(source)
    model.save_pretrained(folder)
    shutil.copy(source / "spiece.model", folder)


@pytest.mark.parametrize("kind", [*KINDS])
def test_states_are_those_of_transformers(kind: str, tmp_path: Path, spiece: bytes) -> None:
    """Of a whole checkpoint, converted or not, and of an encoder alone."""
    write_kind(tmp_path / "source", kind, spiece)
    expected, places = expected_states(tmp_path / "source"), [tmp_path / "source"]
    places.append(convert(str(tmp_path / "source"), tmp_path / "npz"))
    if kind in ALONE:
        write_encoder(tmp_path / "source", tmp_path / "alone", kind)
        places.append(tmp_path / "alone")
    for place in places:
        model, _ = load(place, dtype="float32", encoder_only=True)
        assert isinstance(model, TextEncoder) and "decoder" not in model
        states = np.array(model.encode(TOKENS, MASK))
        real = np.array(MASK)
        assert np.abs(states - expected)[real].max() < 1e-5 * np.abs(expected).max()
        alone = np.array(model.encode(TOKENS[1:, :3]))
        assert np.abs(alone[0] - states[1, :3]).max() < 1e-5 * np.abs(expected).max()


def test_an_encoder_alone_is_read_without_being_asked(tmp_path: Path, spiece: bytes) -> None:
    write_kind(tmp_path / "source", "flan-t5", spiece)
    write_encoder(tmp_path / "source", tmp_path / "alone", "flan-t5")
    assert isinstance(load(tmp_path / "alone")[0], TextEncoder)
    with refused("alone is an encoder alone, which generates nothing: use it by Encoder"):
        SpeculativeDecoder.from_pretrained(tmp_path / "alone")
    whole, _ = load(tmp_path / "source")
    assert not isinstance(whole, TextEncoder)
    wrong: Any = whole
    with refused("model must be an encoder, got T5: use load with encoder_only"):
        Encoder(wrong, load(tmp_path / "source")[1])


def test_an_encoder_is_listed_as_one_and_drafts_for_nobody(
    tmp_path: Path, spiece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kind(tmp_path / "source", "flan-t5", spiece)
    (tmp_path / "weights").mkdir()
    convert(str(tmp_path / "source"), tmp_path / "weights" / "small", encoder_only=True)
    monkeypatch.chdir(tmp_path)
    listing = "\n".join(as_listing(inspect("weights/small")))
    assert "encoder of T5 v1.1" in listing and "3 encoder, no decoder" in listing
    assert "none that shares its tokenizer" in listing
    assert not inspect("source").drafts


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantize": 8}, {"quantize": 4}])
@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_encoders_are_converted_and_quantized(
    options: dict[str, Any], format: str, tmp_path: Path, spiece: bytes
) -> None:
    """With the bits that the encoder of the whole model would have."""
    write_kind(tmp_path / "source", "flan-t5", spiece)
    write_encoder(tmp_path / "source", tmp_path / "alone", "flan-t5")
    kept = options | ({"keep_wo": False, "group_size": 32} if "quantize" in options else {})
    made = {
        name: convert(str(tmp_path / name), tmp_path / f"{name}-{format}", format=format, **kept)
        for name in ("source", "alone")
    }
    assert opened(made["alone"]).config.encoder_only
    made["stripped"] = convert(
        str(tmp_path / "source"), tmp_path / "stripped", format=format, encoder_only=True, **kept
    )
    weights = "weights.npz" if format == "npz" else "model.safetensors"
    assert (made["stripped"] / weights).read_bytes() == (made["alone"] / weights).read_bytes()
    assert isinstance(load(made["stripped"])[0], TextEncoder)
    models = [load(path, encoder_only=True)[0] for path in made.values()]
    states = [np.array(model.encode(TOKENS, MASK).astype(mx.float32)) for model in models]
    assert all(np.array_equal(each, states[0]) for each in states)
    bits = options.get("quantize")
    how = models[1].config.quantization
    assert (how is not None) == (bits is not None and takes_stored())


# --- Folders of sentence-transformers


def write_sentence_folder(
    folder: Path, source: Path, steps: list[tuple[str, dict[str, Any]]], length: int = 12
) -> Any:
    """Save a model of sentence-transformers; returns it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    word = modules.Transformer(str(source), max_seq_length=length)
    size = word.get_embedding_dimension()
    made: list[Any] = [word]
    torch.manual_seed(0)
    for kind, options in steps:
        sizes = {"Pooling": (size,), "Dense": (size, 24)}.get(kind, ())
        made.append(getattr(modules, kind)(*sizes, **options))
    model = SentenceTransformer(modules=made, device="cpu")
    model.save(str(folder))
    return model


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A T5's encoder with a tokenizer that transformers reads."""
    place = tmp_path / "alone"
    torch.manual_seed(0)
    config = transformers.T5Config(**(V1_1 | WIDE), pad_token_id=0, eos_token_id=1)
    model: Any = transformers.T5EncoderModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    model.save_pretrained(place)
    write_tokenizer(place, "spiece")
    return place


DENSE = ("Dense", {"bias": False, "activation_function": torch.nn.Identity()})
STEPS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "sentence-t5": [("Pooling", {"pooling_mode": "mean"}), DENSE, ("Normalize", {})],
    "a dense layer with a bias": [
        ("Pooling", {"pooling_mode": "mean"}),
        ("Dense", {"bias": True, "activation_function": torch.nn.Tanh()}),
    ],
    "means": [("Pooling", {"pooling_mode": "mean"})],
    "last tokens": [("Pooling", {"pooling_mode": "lasttoken"}), ("Normalize", {})],
    "first tokens": [("Pooling", {"pooling_mode": "cls"})],
    "maxima": [("Pooling", {"pooling_mode": "max"}), ("Normalize", {})],
}


@pytest.mark.parametrize("case", STEPS)
def test_vectors_are_those_of_sentence_transformers(case: str, alone: Path, tmp_path: Path) -> None:
    theirs = write_sentence_folder(tmp_path / "sentence", alone, STEPS[case])
    encoder = Encoder.from_pretrained(tmp_path / "sentence", dtype="float32")
    found = np.array(encoder.embed(TEXTS, batch_size=2))
    expected = theirs.encode(TEXTS, batch_size=3)
    assert found.shape == expected.shape == (len(TEXTS), encoder.size)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    one = np.array(encoder.embed(TEXTS[0]))
    assert one.shape == (1, encoder.size) and np.abs(one - found[:1]).max() < 1e-5
    assert max(len(encoder.ids(text)) for text in TEXTS) == 12


@pytest.mark.parametrize("includes", [True, False])
def test_prompts_are_pooled_or_not_as_the_folder_says(
    includes: bool, alone: Path, tmp_path: Path
) -> None:
    steps = [("Pooling", {"pooling_mode": "mean", "include_prompt": includes})]
    theirs = write_sentence_folder(tmp_path / "sentence", alone, steps, length=40)
    theirs.prompts = {"query": "1, 2: "}
    theirs.save(str(tmp_path / "sentence"))
    encoder = Encoder.from_pretrained(tmp_path / "sentence", dtype="float32")
    for prompt in ("query", "3, 4, 5: "):
        named = {"prompt_name": "query"} if prompt == "query" else {"prompt": prompt}
        found = np.array(encoder.embed(TEXTS, prompt=prompt))
        expected = theirs.encode(TEXTS, **named)
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    plain = np.array(encoder.embed(TEXTS))
    assert np.abs(plain - theirs.encode(TEXTS)).max() < 1e-5 * np.abs(plain).max()


def test_a_repository_of_sentence_transformers_is_downloaded_whole(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps lie in folders, without which vectors would be others."""
    hub = Hub(tmp_path / "hub")
    use(monkeypatch, hub.endpoint, cache=tmp_path / "cache")
    folder = hub.root / "me" / "sentences"
    theirs = write_sentence_folder(folder, alone, STEPS["sentence-t5"])
    (folder / "2_Dense" / "pytorch_model.bin").write_text("not needed")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_text("not needed")
    found = np.array(Encoder.from_pretrained("me/sentences", dtype="float32").embed(TEXTS))
    assert np.abs(found - theirs.encode(TEXTS)).max() < 1e-5
    sent = {path.rpartition("/")[2] for path in hub.requests if path.startswith("GET /me")}
    assert not sent & {"pytorch_model.bin", "model.onnx"}
    hub.server.shutdown()
    hub.server.server_close()


def test_steps_that_are_not_offered_are_refused(alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sentence"
    write_sentence_folder(folder, alone, STEPS["sentence-t5"])
    pooling = next(folder.glob("1_Pooling/config.json"))
    edit_json(pooling, pooling_mode="weightedmean")
    with refused("the pooling in .* is 'weightedmean', expected one of mean, eos, cls, max"):
        Encoder.from_pretrained(folder)
    edit_json(pooling, pooling_mode=None, pooling_mode_cls_token=True, pooling_mode_max_tokens=True)
    edit_json(next(folder.glob("2_Dense/config.json")), out_features=7)
    with refused("pooling in .* is "):
        Encoder.from_pretrained(folder)
    edit_json(pooling, pooling_mode="mean")
    with refused("2_Dense has .*, expected "):
        Encoder.from_pretrained(folder)
    modules = folder / "modules.json"
    modules.write_text(modules.read_text().replace("1_Pooling", "../elsewhere"))
    with refused("expected one with a type and a folder's name as its path"):
        Encoder.from_pretrained(folder)
    modules.write_text('[{"type": "a.b.LSTM", "path": ""}]')
    with refused("has the step LSTM, expected Transformer, Pooling, Dense or Normalize"):
        Encoder.from_pretrained(folder)
    modules.write_text("{}")
    with refused("holds a dict, expected a list"):
        Encoder.from_pretrained(folder)


def test_plain_encoders_take_means_of_length_one(alone: Path) -> None:
    encoder = Encoder.from_pretrained(alone, dtype="float32")
    found = np.array(encoder.embed(TEXTS))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    states = encoder.embed(TEXTS, pooling="none")
    assert [len(each) for each in states] == [len(encoder.ids(text)) for text in TEXTS]
    means = np.stack([np.array(each).mean(axis=0) for each in states])
    np.testing.assert_allclose(np.array(encoder.embed(TEXTS, normalize=False)), means, atol=1e-5)
    last = np.stack([np.array(each)[-1] for each in states])
    found = np.array(encoder.embed(TEXTS, pooling="eos", normalize=False))
    np.testing.assert_allclose(found, last, atol=1e-5)
    assert encoder.embed([]).shape == (0, 64) and encoder.embed([], pooling="none") == []
    long = " ".join(["1, 2, 3"] * 300)  # positions are relative: any length is read
    assert len(encoder.embed(long, pooling="none")[0]) > 1000
    short = Encoder.from_pretrained(alone, dtype="float32", max_length=5)
    ids = short.ids(long)
    assert len(ids) == 5 and ids[-1] == 1 and ids[:4] == encoder.ids(long)[:4]


def test_rows_of_similar_length_are_encoded_together() -> None:
    rows = [[0] * length for length in (3, 4000, 2, 50, 3, 40)]
    groups = list(groups_of(rows, 3))
    assert groups == [[1], [3, 5, 0], [4, 2]]
    rows = [[0] * TOKENS_IN_PASS] * 2
    assert list(groups_of(rows, 8)) == [[0], [1]]


def test_options_out_of_range_are_refused(alone: Path) -> None:
    encoder = Encoder.from_pretrained(alone)
    for options, message in (
        ({"pooling": "sum"}, "pooling must be one of mean, eos, cls, max, none, got 'sum'"),
        ({"batch_size": 0}, "batch_size must be"),
    ):
        wrong: Any = options
        with refused(message):
            encoder.embed(TEXTS, **wrong)
    with refused("texts must be strings, got 3"):
        encoder.embed([3])  # type: ignore[list-item]
    with refused("max_length must be"):
        Encoder.from_pretrained(alone, max_length=1)


def test_an_adapter_of_a_whole_model_changes_its_encoder(tmp_path: Path, spiece: bytes) -> None:
    model = write_checkpoint(tmp_path / "base", V1_0, spiece)
    write_adapter(tmp_path / "adapter", model, tmp_path / "base", target_modules=["q", "wo"])
    whole, _ = load(tmp_path / "base", adapter=tmp_path / "adapter", dtype="float32")
    assert isinstance(whole, EncoderDecoder)
    expected = np.array(TextEncoder.of(whole).encode(TOKENS, MASK))
    plain = np.array(load(tmp_path / "base", dtype="float32", encoder_only=True)[0].encode(TOKENS))
    for place, adapter in ((tmp_path / "base", tmp_path / "adapter"), (tmp_path / "adapter", None)):
        found = Encoder.from_pretrained(place, adapter=adapter, dtype="float32")
        assert np.array_equal(np.array(found.model.encode(TOKENS, MASK)), expected)
    assert not np.allclose(plain[0], expected[0], atol=1e-3)


# --- Rankings


@pytest.fixture
def ranker(tmp_path: Path, spiece: bytes) -> SpeculativeDecoder:
    write_checkpoint(tmp_path / "ranker", V1_0, spiece)
    return SpeculativeDecoder.from_pretrained(tmp_path / "ranker", dtype="float32")


def test_documents_are_ranked_by_the_first_tokens_probabilities(
    ranker: SpeculativeDecoder, tmp_path: Path
) -> None:
    """As transformers computes them, whatever lies beside a document in a batch."""
    assert ranker.tokenizer is not None
    words = {"positive": "1", "negative": "a"}
    ids = [ranker.tokenizer.encode(word)[0] for word in words.values()]
    model: Any = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ranker").eval()
    expected = []
    for text in TEXTS:
        prompt = f"Query: 3 Document: {text} Relevant:"
        source = torch.tensor([ranker.tokenizer.encode(prompt)])
        with torch.inference_mode():
            logits = model(input_ids=source, decoder_input_ids=torch.tensor([[0]])).logits[0, 0]
        expected.append(torch.softmax(logits[ids], dim=0)[0].item())
    for batch_size in (1, 4, 16):
        found = rank(ranker, "3", TEXTS, batch_size=batch_size, **words)
        assert [each.index for each in found] == sorted(
            range(len(TEXTS)), key=lambda i: -expected[i]
        )
        for each in found:
            assert abs(each.score - expected[each.index]) < 1e-5
            assert each.document == TEXTS[each.index]
    assert rank(ranker, "3", TEXTS, top_n=2, **words) == found[:2]
    assert rank(ranker, "3", [], **words) == []


def test_what_cannot_be_ranked_is_refused(ranker: SpeculativeDecoder) -> None:
    words = {"positive": "1", "negative": "a"}
    for options, message in (
        ({"positive": "1, 2"}, "positive must be a word of one token of the model, not of"),
        ({"template": "{query}"}, "template must be a text with .query. and .document., each once"),
        ({"top_n": 0}, "top_n must be"),
        ({"batch_size": 0}, "batch_size must be"),
    ):
        wrong: Any = words | options
        with refused(message):
            rank(ranker, "3", ["1"], **wrong)
    with refused("documents must be text, got 1"):
        rank(ranker, "3", ["1", 1], **words)  # type: ignore[list-item]
