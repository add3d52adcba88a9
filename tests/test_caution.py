"""Taking corrections out of training examples where a model is not sure of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece as spm
import torch
from caution import Caution
from corruption import PREFIX
from train_correct import batches, load_tokenizer

UNSURE = 0.4


@pytest.fixture(scope="module")
def tokenizer() -> spm.SentencePieceProcessor:
    return load_tokenizer(Path(__file__).parents[1] / "weights" / "correct-base")


class Model:
    """Gives each token of the labels probability 1, but `UNSURE` to those of some words."""

    def __init__(self, unsure: set[int]) -> None:
        self._unsure = unsure

    def eval(self) -> Model:
        return self

    def __call__(self, *, labels: torch.Tensor, **_: torch.Tensor) -> Any:
        logits = torch.full((*labels.shape, 3200), -30.0)
        known = labels.clamp(min=0)[..., None]
        chosen = torch.tensor(0.0).expand(known.shape).clone()
        for token in self._unsure:
            logits[..., 2][labels == token] = torch.tensor(1 - UNSURE).log()  # the rest
            chosen[known == token] = torch.tensor(UNSURE).log()
        return SimpleNamespace(logits=logits.scatter(-1, known, chosen))


def targets(
    tokenizer: spm.SentencePieceProcessor, pairs: list[tuple[str, str]], unsure: str, least: float
) -> list[str]:
    """Return the targets that are left of some pairs, by a model that is unsure of some words."""
    caution = Caution(Model(set(tokenizer.encode(unsure))), tokenizer, least=least)
    encoded = [
        (tokenizer.encode(PREFIX + source, add_eos=True), tokenizer.encode(target, add_eos=True))
        for source, target in pairs
    ]
    found = []
    for batch in batches(iter(encoded), 0, tokens=64, forever=False):
        for row in caution(*batch).tolist():
            ids = [i for i in row if i >= 0]
            assert ids[-1] == 1
            assert ids.count(1) == 1
            found.append(tokenizer.decode(ids[:-1]))
    return sorted(found)


@pytest.mark.parametrize(
    ("source", "target", "unsure"),
    [
        ("He go home.", "He goes home.", "goes"),
        ("He is very tired.", "He is tired.", "tired"),
        ("I like music.", "I like the music.", "the"),
        ("The childrens play.", "The children play.", "play"),
        ("He rains, but not now.", "He rains but not now.", "but"),
        ("What you are doing?", "What are you doing?", "are"),
        ("I go to", "I go to school.", "school"),
        ("sometmies we meet.", "Sometimes we meet.", "Sometimes"),
    ],
)
def test_what_a_model_is_not_sure_of_stays(
    tokenizer: spm.SentencePieceProcessor, source: str, target: str, unsure: str
) -> None:
    pairs = [(source, target)]
    assert targets(tokenizer, pairs, unsure, 0.5) == [source]
    assert targets(tokenizer, pairs, unsure, 0.01) == [target]
    assert targets(tokenizer, pairs, "money", 0.99) == [target]


def test_other_corrections_are_made_unless_they_are_close(
    tokenizer: spm.SentencePieceProcessor,
) -> None:
    pairs = [
        ("He go home, and then we sees him.", "He goes home, and then we see him."),
        ("He go if we sees him.", "He goes if we see him."),
        ("He go and sees him.", "He goes and see him."),
    ]  # fmt: skip
    assert targets(tokenizer, pairs, "goes", 0.5) == sorted(
        [
            "He go home, and then we see him.",
            "He go if we see him.",
            "He go and sees him.",
        ]
    )


def test_right_text_is_left_to_be_learnt(tokenizer: spm.SentencePieceProcessor) -> None:
    assert targets(tokenizer, [("We see him.", "We see him.")], "see him", 0.5) == ["We see him."]
