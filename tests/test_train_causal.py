"""Training the tiny decoder-only pair: what is read, held out, learned and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import documents
import mlx.core as mx
import numpy as np
import pytest
import train_causal
from conftest import REPOSITORY
from mlx.utils import tree_flatten
from train_causal import END, HELD_OUT_FILE

Corpus = tuple[Any, np.ndarray, np.ndarray]  # tokenizer, ids to train on, ids held out
PAGES = [REPOSITORY / "docs" / name for name in ("design.md", "how-it-works.md", "exactness.md")]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return documents.read_documents(PAGES)


@pytest.fixture(scope="module")
def prepared(texts: list[str]) -> Corpus:
    training, held_out = documents.split(texts)
    tokenizer = train_causal.train_tokenizer(training)
    return tokenizer, *(train_causal.encode(tokenizer, part) for part in (training, held_out))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A pair after a few steps."""
    folder = tmp_path_factory.mktemp("pair") / "new" / "pair"
    train_causal.train_pair(texts, folder, 4, seed=0)
    return folder


@pytest.mark.parametrize("name", ["target", "draft"])
def test_transformers_reads_a_folder_and_has_the_same_logits(
    pair: Path, texts: list[str], name: str
) -> None:
    import torch
    from mlx_lm.utils import load_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(pair / name).eval()
    tokenizer = AutoTokenizer.from_pretrained(pair / name)
    model, config = load_model(pair / name)
    ids = tokenizer.encode(texts[0][:400], add_special_tokens=False)
    assert tokenizer.decode(ids) == texts[0][:400]
    assert tokenizer.eos_token_id == config["eos_token_id"] == reference.config.eos_token_id
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits.numpy()
    assert expected.std() > 0.1
    np.testing.assert_allclose(np.array(model(mx.array([ids]))), expected, atol=1e-4)


def test_pair_shares_a_tokenizer_and_keeps_the_end_of_the_text(
    pair: Path, texts: list[str]
) -> None:
    assert sorted(path.name for path in pair.iterdir()) == ["draft", HELD_OUT_FILE, "target"]
    assert [path.name for path in pair.parent.iterdir()] == ["pair"]
    ours, other = ((pair / name / "tokenizer.json").read_bytes() for name in ("target", "draft"))
    assert ours == other
    assert texts[-1].endswith((pair / HELD_OUT_FILE).read_text(encoding="utf-8"))
    config = json.loads((pair / "target" / "config.json").read_text())
    assert config["vocab_size"] == train_causal.PIECES


def test_weights_depend_on_the_seed_alone(prepared: Corpus) -> None:
    """And training lowers the loss on the text held out."""
    found = []
    for seed in (0, 0, 1):
        model, _ = train_causal.make_model("draft", prepared[0], seed)
        train_causal.train(model, prepared[1], 3, seed)
        found.append([weight for _, weight in tree_flatten(model.parameters())])
    assert all(mx.array_equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not mx.array_equal(found[0][0], found[2][0])
    before = train_causal.mean_loss(model, prepared[2])
    train_causal.train(model, prepared[1], 30, seed=0)
    assert train_causal.mean_loss(model, prepared[2]) < before - 0.5


def test_end_is_held_out_and_cut_at_a_line() -> None:
    texts = ["a\nb\nc\n", "d\n", "e\nfgh\ni\n"]
    assert documents.split(texts, 0.4) == (["a\nb\nc\n", "d\n", "e\n"], ["fgh\ni\n"])
    assert documents.split(texts, 0.7) == (["a\nb\n"], ["c\n", "d\n", "e\nfgh\ni\n"])
    assert documents.split(["abcdefghij"], 0.2) == (["abcdefgh"], ["ij"])


def test_spelling_the_end_does_not_end_a_document(texts: list[str]) -> None:
    tokenizer = train_causal.train_tokenizer(texts)
    end = tokenizer.token_to_id(END)
    ids = train_causal.encode(tokenizer, ["one", f"two {END} three"]).tolist()
    assert ids.count(end) == 2 and ids[-1] == end
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"onetwo {END} three"


@pytest.mark.parametrize(
    ("name", "content", "output", "message"),
    [
        ("a.txt.xz", b"no archive", "pair", "error: .*a.txt.xz cannot be read as text"),
        ("a.txt", b"too little\n" * 90, "pair", "to hold out, and each has to be more than 256"),
        ("a.txt", b"", ".", "holds a.txt and is not a pair: choose another"),
        ("a.txt", b"", "a.txt", "is a file and is not a pair: choose another"),
    ],
)
def test_unusable_text_and_output_are_refused(
    tmp_path: Path, name: str, content: bytes, output: str, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        train_causal.main(text=[tmp_path / name], output=tmp_path / output, steps=1, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_failure_leaves_the_old_pair(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "pair" / "target" / "config.json"
    old.parent.mkdir(parents=True)
    old.write_text("{}")
    monkeypatch.setattr(train_causal, "train", Mock(side_effect=[0.0, OSError("no more")]))
    with pytest.raises(OSError, match="no more"):
        train_causal.train_pair(texts, tmp_path / "pair", 1, seed=0)
    assert old.read_text() == "{}" and [*old.parent.iterdir()] == [old]
