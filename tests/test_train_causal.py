from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import train_causal
from conftest import REPOSITORY
from mlx.utils import tree_flatten
from train_causal import END, HELD_OUT_FILE, Length

PAGES = [REPOSITORY / "docs" / name for name in ("design.md", "how-it-works.md", "exactness.md")]


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return train_causal.read_documents(PAGES)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    """A pair after a few steps."""
    folder = tmp_path_factory.mktemp("pair") / "new" / "pair"
    train_causal.train_pair(documents, folder, Length(4), seed=0)
    return folder


@pytest.mark.parametrize("name", ["target", "draft"])
def test_transformers_reads_a_folder_and_has_the_same_logits(
    pair: Path, documents: list[str], name: str
) -> None:
    import torch
    from mlx_lm.utils import load_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(pair / name).eval()
    tokenizer = AutoTokenizer.from_pretrained(pair / name)
    model, config = load_model(pair / name)
    ids = tokenizer.encode(documents[0][:400], add_special_tokens=False)
    assert tokenizer.decode(ids) == documents[0][:400]
    assert tokenizer.eos_token_id == config["eos_token_id"] == reference.config.eos_token_id
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits.numpy()
    assert expected.std() > 0.1
    np.testing.assert_allclose(np.array(model(mx.array([ids]))), expected, atol=1e-4)


def test_a_pair_shares_a_tokenizer_and_keeps_the_end_of_the_text(
    pair: Path, documents: list[str]
) -> None:
    assert sorted(path.name for path in pair.iterdir()) == ["draft", HELD_OUT_FILE, "target"]
    assert [path.name for path in pair.parent.iterdir()] == ["pair"]
    spelt = [(pair / name / "tokenizer.json").read_bytes() for name in ("target", "draft")]
    assert spelt[0] == spelt[1]
    assert documents[-1].endswith((pair / HELD_OUT_FILE).read_text(encoding="utf-8"))
    config = json.loads((pair / "target" / "config.json").read_text())
    assert config["vocab_size"] == train_causal.PIECES


def prepared(documents: list[str]) -> tuple[Any, np.ndarray, np.ndarray]:
    training, held_out = train_causal.split(documents)
    tokenizer = train_causal.train_tokenizer(training)
    encoded = (train_causal.encode(tokenizer, part) for part in (training, held_out))
    return tokenizer, *encoded


def test_training_lowers_the_loss_of_what_is_held_out(documents: list[str]) -> None:
    tokenizer, seen, unseen = prepared(documents)
    model, _ = train_causal.make("draft", tokenizer, 0)
    before = train_causal.mean_loss(model, unseen)
    train_causal.train(model, seen, Length(30), seed=0)
    assert train_causal.mean_loss(model, unseen) < before - 0.5


def test_weights_hang_on_the_seed_alone(documents: list[str]) -> None:
    found = []
    for seed in (0, 0, 1):
        tokenizer, seen, _ = prepared(documents)
        model, _ = train_causal.make("draft", tokenizer, seed)
        train_causal.train(model, seen, Length(3), seed)
        found.append([weight for _, weight in tree_flatten(model.parameters())])
    first, again, other = found
    assert all(mx.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not mx.array_equal(first[0], other[0])


def test_seconds_end_the_training_instead_of_steps(documents: list[str]) -> None:
    tokenizer, seen, _ = prepared(documents)
    model, _ = train_causal.make("draft", tokenizer, 0)
    assert np.isfinite(train_causal.train(model, seen, Length(10**9, seconds=0.3), seed=0))


def test_the_end_is_held_out_and_cut_at_a_line() -> None:
    documents = ["a\nb\nc\n", "d\n", "e\nfgh\ni\n"]
    assert train_causal.split(documents, 0.4) == (["a\nb\nc\n", "d\n", "e\n"], ["fgh\ni\n"])
    assert train_causal.split(documents, 0.7) == (["a\nb\n"], ["c\n", "d\n", "e\nfgh\ni\n"])
    assert train_causal.split(["abcdefghij"], 0.2) == (["abcdefgh"], ["ij"])


def test_documents_end_and_do_not_where_they_only_spell_it(documents: list[str]) -> None:
    tokenizer = train_causal.train_tokenizer(documents)
    end = tokenizer.token_to_id(END)
    ids = train_causal.encode(tokenizer, ["one", f"two {END} three"]).tolist()
    assert ids.count(end) == 2 and ids[-1] == end
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"onetwo {END} three"


def test_archives_are_read_and_long_files_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("Straße\n", encoding="utf-8")
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress("Straße\n".encode()))
    paths = [tmp_path / "a.txt", tmp_path / "a.txt.xz"]
    assert train_causal.read_documents(paths) == ["Straße\n"] * 2
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(train_causal, "MOST_READ", 3)
    assert train_causal.read_documents(paths) == ["Str"] * 2
    assert "only the first 3 characters" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"\xff\xfe\xfa", b"no archive"])
def test_what_is_no_text_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ("a.txt.xz" if content.isascii() else "a.txt")
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=rf"error: .*{path.name} cannot be read as text"):
        train_causal.main(text=[path], output=tmp_path / "pair", steps=1, seconds=None, seed=0)
    assert not (tmp_path / "pair").exists()


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="to hold out, and each has to be more than 256"):
        train_causal.train_pair(["too little\n" * 90], tmp_path / "pair", Length(1), seed=0)
    assert not any(tmp_path.iterdir())


def test_a_failure_leaves_what_was_there(
    tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = train_causal.train

    def failing(model: Any, ids: np.ndarray, length: Length, seed: int) -> float:
        if model.args.num_hidden_layers == 1:
            raise OSError("no more")
        return train(model, ids, length, seed)

    old = tmp_path / "pair" / "target"
    old.mkdir(parents=True)
    (old / "config.json").write_text("{}")
    monkeypatch.setattr(train_causal, "train", failing)
    for output in ("pair", "other"):
        with pytest.raises(OSError, match="no more"):
            train_causal.train_pair(documents, tmp_path / output, Length(1), seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]
    assert (old / "config.json").read_text() == "{}"
    monkeypatch.setattr(train_causal, "train", train)
    train_causal.train_pair(documents, tmp_path / "pair", Length(1), seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]
    assert (old / "model.safetensors").exists()


def test_a_folder_that_is_no_pair_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    for output, found in ((tmp_path, "holds thesis.tex"), (tmp_path / "thesis.tex", "is a file")):
        with pytest.raises(SystemExit, match=f"{found} and is no pair: choose another"):
            train_causal.main(text=PAGES, output=output, steps=1, seconds=None, seed=0)


def test_the_text_at_hand_is_the_projects_own() -> None:
    names = {path.name for path in train_causal.own_text()}
    assert {"README.md", "design.md", "decoder.py", "train_causal.py"} <= names
