"""Small pairs for other tasks: what they learn from, what they begin with, and what is written."""

import json
import lzma
import random
import shutil
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints import convert
from speculative_t5.models import SharingDraft

import pytest
import torch
import train_correct
import train_tasks
from conftest import write_checkpoint
from further_training import start
from train_tasks import Layers, read_texts, reshaped, without_capitals, without_words

SHAPE = {
    "vocab_size": 256, "d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 32, "num_layers": 3,
    "num_decoder_layers": 1, "feed_forward_proj": "relu", "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def first_weights(tmp_path: Path, spiece: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_checkpoint(tmp_path / "source", SHAPE, spiece)
    folder = convert(str(tmp_path / "source"), tmp_path / "first")
    monkeypatch.setattr(train_tasks, "FIRST_WEIGHTS", folder)
    monkeypatch.setattr(train_tasks, "JUDGED", 2)
    monkeypatch.setattr(train_correct, "POOL", 64)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text(
        "It is a cat. She saw it at home.\nShort. Two \x07 bells ring now.\n"
    )
    with lzma.open(folder / "b.txt.xz", "wt", encoding="utf-8") as file:
        file.writelines(f"He has {i} apples for you.\tEr hat Äpfel.\n" for i in range(300))
    return folder


def test_texts_are_sentences_that_have_words(data: Path, tmp_path: Path) -> None:
    found = list(read_texts(data))
    assert found[:3] == ["It is a cat.", "She saw it at home.", "He has 0 apples for you."]
    assert len(found) == 2 + 300
    with pytest.raises(ValueError, match=r"no file that ends in .txt or .txt.xz"):
        list(read_texts(tmp_path))


def test_prompts_lack_what_the_task_puts_back() -> None:
    rng = random.Random(0)
    assert without_capitals("He's here: at 5, Main St.!", rng) == "he s here at 5 main st"
    found = {without_words("The cat is on a mat.", rng) for _ in range(200)}
    assert {"cat mat.", "The cat is on a mat."} < found
    assert all(text.endswith("mat.") and "cat" in text for text in found)


def test_layers_that_are_added_change_little_until_they_learn(
    first_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = start(first_weights, 120).eval()
    ids = {"input_ids": torch.tensor([[5, 9, 7, 1]]), "decoder_input_ids": torch.tensor([[0, 6]])}

    def logits(layers: Layers) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = reshaped(model, layers).eval()(**ids).logits
        return found

    own, longer = logits(Layers(3, 1)), logits(Layers(3, 4))
    with torch.no_grad():
        assert torch.equal(own, model(**ids).logits)
    monkeypatch.setattr(train_tasks, "ADDED", 1.0)
    repeated = logits(Layers(3, 4))
    assert 0 < (longer - own).norm() < (repeated - own).norm() / 2
    shorter = reshaped(model, Layers(2, 1))
    assert (len(shorter.encoder.block), len(shorter.decoder.block)) == (2, 1)


@pytest.mark.parametrize("draft", ["distilled", "separate"])
def test_a_pair_loads_by_its_target_and_resumes(
    first_weights: Path, data: Path, tmp_path: Path, draft: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "runs"

    def train() -> None:
        train_tasks.train_pair("words", data, work, 1e-4, draft, 1e-2, prompts=40)

    train()
    prompts = (work / "words-prompts.txt").read_text().splitlines()
    whole = [text for text in read_texts(data) if text in prompts]  # nothing was left out of them
    assert len(prompts) == 200 and whole and all(map(train_tasks.held_out, whole))
    decoder = SpeculativeDecoder.from_pretrained(work / "words-base")
    assert isinstance(decoder.draft, SharingDraft) == (draft == "distilled")
    assert decoder.model.config.num_decoder_layers == 3
    assert decoder.generate(prompts[0], max_tokens=4).stats.drafted > 0
    before = (work / "words-base" / "weights.npz").read_bytes()
    if draft == "separate":
        assert load(work / "words-draft")[0].config.num_layers == 2
        shutil.rmtree(work / "words-draft")
    train()  # with what is there
    assert (work / "words-base" / "weights.npz").read_bytes() == before
    assert json.loads((work / "words-base" / "config.json").read_text())["draft"] == "words-draft"


def test_no_text_is_both_learned_and_held_out(
    first_weights: Path, data: Path, tmp_path: Path
) -> None:
    pair = train_tasks.Pair("words", data, tmp_path / "runs")
    seen, unseen = set(pair._seen), set(pair._unseen)
    assert seen and unseen and not seen & unseen
    assert seen | unseen == {*read_texts(data)}


def test_texts_that_are_too_few_are_refused(first_weights: Path, tmp_path: Path) -> None:
    folder = tmp_path / "few"
    folder.mkdir()
    (folder / "a.txt").write_text("It is a cat.\n")
    with pytest.raises(ValueError, match=r"^1 texts in .* are too few: none is held out"):
        train_tasks.Pair("words", folder, tmp_path / "runs")
