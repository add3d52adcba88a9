"""Errors made by rule for training, what is taken out again, and how corrections are judged."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corruption
import pytest
import sentencepiece as spm
import torch
from caution import Caution
from conftest import REPOSITORY
from corruption import PREFIX, training_examples
from evaluate_correct import corrections, corrections_line
from judge_correct import LEARNERS, Judged, listing, read_pairs, summary
from learner_errors import Learner, nouns, phrases, spelling, verbs
from learner_errors.surroundings import TEMPLATES, fill, rename, surround
from learner_errors.tables import Lexicon, Row, Table
from learner_errors.unseen import Words
from train_correct import batches, load_tokenizer

# Verbs are known by their forms, and a plural by its singular.
WORDS = """live lives lived living work works worked working like likes liked liking talk talks
talked talking enjoy enjoys enjoyed enjoying want wants wanted wanting finish finishes arrive
arrives arrived arriving hour book quick careful help helps helped helping""".split()
LEXICON = Lexicon(WORDS * 5)
MADE_UP = Words(WORDS)
TABLES = [
    table
    for module in (phrases, nouns, verbs, spelling)
    for table in vars(module).values()
    if isinstance(table, Table)
]


def wrong(rule: object, text: str) -> set[str | None]:
    assert callable(rule)
    return {rule(text, random.Random(seed), LEXICON) for seed in range(60)}


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        (phrases.GOVERNED, "It depends on you.", {"It depends of you.", "It depends from you."}),
        (phrases.GOVERNED, "It is late.", {None}),
        (phrases.PLACE_AND_TIME, "I went home.", {"I went to home.", "I went at home."}),
        (phrases.WORD_CHOICE, "He told me.", {"He said me.", "He said to me that."}),
        (phrases.UNCOUNTABLE, "So much money!", {"So many money!", "So much moneys!"}),
        (nouns.ARTICLE, "The sun is hot.", {"Sun is hot."}),
        (nouns.PLURAL, "The children ran.", {"The childs ran.", "The childrens ran.",
                                             "The child ran."}),
        (nouns.COMPARISON, "It is worse.", {"It is more bad.", "It is more worse.",
                                            "It is badder.", "It is worser."}),
        (nouns.ADJECTIVE, "I was bored.", {"I was boreds.", "I was to bored.", "I was boring."}),
        (nouns.ADVERB, "She can swim well.", {"She can swim good."}),
        (nouns.POSSESSIVE, "It is mine.", {"It is my.", "It is mines."}),
        (nouns.bare_adverb, "Drive carefully.", {"Drive careful."}),
        (nouns.bare_adverb, "The family is here.", {None}),
        (nouns.bare_plural, "I read two books.", {"I read two book."}),
        (nouns.bare_plural, "I read books.", {None}),
        (verbs.TENSE, "Call me when you arrive.", {"Call me when you will arrive."}),
        (verbs.TENSE, "He smiles when you arrive.", {None}),
        (verbs.WOULD, "If I were you, I would go.", {"If I would be you, I would go.",
                                                     "If I will be you, I would go."}),
        (verbs.SINCE, "I've lived here for two years.", {
            "I live here for two years.", "I've lived here since two years.",
            "I've lived here during two years."}),
        (verbs.PAST, "She worked yesterday.", {
            "She has worked yesterday.", "She work yesterday.", "She works yesterday."}),
        (verbs.PAST, "She worked here.", {None}),
        (verbs.AGREEMENT, "He likes it.", {"He like it."}),
        (verbs.COMPLEMENT, "I enjoy talking.", {"I enjoy to talk.", "I enjoy talk."}),
        (verbs.NEGATION, "I don't work.", {
            "I not work.", "I no work.", "I work not.", "I am not work."}),
        (verbs.QUESTION, "Where are you?", {"Where you are?"}),
        (verbs.ORDER, "I like tea very much.", {"I like very much tea."}),
        (verbs.SUBJECT, "It's late.", {"Is late."}),
        (spelling.MISSPELT, "I know because.", {
            "I now because.", "I konw because.", "I kno because.", "I know becouse.",
            "I know becuase.", "I know becaus.", "I know becose.", "I know beacause.",
            "I know cause of."}),
        (spelling.APART, "Thank you!", {"Thankyou!", "Thank's you!"}),
        (spelling.PUNCTUATION, "It's late.", {"Its late.", "It´s late."}),
        (spelling.lower_title, "I speak French.", {"i speak French.", "I speak french."}),
        (spelling.upper_noun, "I like the book.", {"I like the Book."}),
        (spelling.question_stop, "Who?", {"Who.", "Who", "Who ?"}),
        (spelling.question_stop, "Who.", {None}),
    ],
)  # fmt: skip
def test_rules(rule: object, text: str, expected: set[str | None]) -> None:
    assert wrong(rule, text) == expected


def test_rows_are_skipped_only_where_they_do_not_match() -> None:
    def everywhere(row: Row) -> Row:
        return Row(row.pattern, row.forms, row.wrong, frozenset())

    sentences = (REPOSITORY / "tests" / "sentences.txt").read_text().splitlines()
    texts = [
        side
        for line in (REPOSITORY / "tests" / "learners.tsv").read_text().splitlines()
        for side in line.split("\t")
    ]
    for table in TABLES:
        slow = Table(table.meaning, table.text, table.needs)
        object.__setattr__(slow, "rows", tuple(map(everywhere, table.rows)))
        for text in [*sentences, *texts][::2]:
            found = [t(text, random.Random(0), LEXICON) for t in (table, slow)]
            assert found[0] == found[1], text


def test_surroundings_are_the_same_on_both_sides() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        source, target = surround(("He go.", "He goes."), rng, MADE_UP)
        assert source.replace("He go.", "He goes.") == target
        source, target = rename(("Tom go.", "Tom goes."), rng, MADE_UP)
        assert source.split()[0] == target.split()[0]
        assert rename(("tom go.", "Tom goes."), rng, MADE_UP) == ("tom go.", "Tom goes.")
    for template in TEMPLATES:
        assert not re.search(r"[{}#]{2}|\{", fill(template, random.Random(0), ["Hallo"], MADE_UP))


def test_examples_join_sentences_and_leave_some_alone() -> None:
    sentences = [line for line in (REPOSITORY / "tests" / "sentences.txt").read_text().splitlines()]
    learner = Learner(sentences * 5, ["Guten Tag."])
    pairs = list(islice(training_examples(sentences, learner, seed=0), 200))
    assert pairs[:20] == list(islice(training_examples(sentences, learner, seed=0), 20))
    same = sum(source == PREFIX + target for source, target in pairs)
    assert 200 * 0.2 < same < 200 * 0.5
    assert max(len(target) for _, target in pairs) > 200
    assert any("\n" in target for _, target in pairs)


def test_split_is_fixed() -> None:
    out = [i for i in range(20_000) if corruption.held_out(f"sentence {i}")]
    assert len(out) / 20_000 == pytest.approx(0.02, abs=0.004)
    assert out[:7] == [108, 124, 152, 203, 220, 237, 248]


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


def test_what_a_model_is_not_sure_of_stays(tokenizer: spm.SentencePieceProcessor) -> None:
    for source, target, unsure in (
        ("He go home.", "He goes home.", "goes"),
        ("He is very tired.", "He is tired.", "tired"),
        ("I like music.", "I like the music.", "the"),
        ("The childrens play.", "The children play.", "play"),
        ("He rains, but not now.", "He rains but not now.", "but"),
        ("What you are doing?", "What are you doing?", "are"),
        ("I go to", "I go to school.", "school"),
        ("sometmies we meet.", "Sometimes we meet.", "Sometimes"),
    ):
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
    assert targets(tokenizer, pairs, "goes", 0.5) == [
        "He go and sees him.",
        "He go home, and then we see him.",
        "He go if we see him.",
    ]
    # Right text is left to be learnt.
    assert targets(tokenizer, [("We see him.", "We see him.")], "see him", 0.5) == ["We see him."]


def test_texts_are_counted_by_what_became_of_them() -> None:
    judged = [
        Judged("He go home.", "He goes home.", "He goes home."),
        Judged("He go at home.", "He goes home.", "He go home."),
        Judged("He go home.", "He goes home.", "He go home."),
        Judged("He go home.", "He goes home.", "He gone home."),
        Judged("He go home.", "He goes home.", "She go to home."),
        Judged("It is late.", "It is late.", "It is late."),
        Judged("It is 9:30.", "It is 9:30.", "It is 9."),
    ]
    assert summary(judged) == [
        "5 texts with errors: 1 corrected exactly; 2 improved, 1 unchanged, "
        "1 as wrong in another way, 1 worse",
        "  wrong words: 6 before, 6 after",
        "2 right ones: 1 unchanged, 1 wrong words after",
        "corrections: precision 16.7%, recall 20.0%, F0.5 17.2%; 1 of 2 right texts unchanged",
    ]
    assert listing(judged[4:]) == [
        "",
        "   text  He go home.",
        "   good  He goes home.",
        "1 > 3  She go to home.",
        "",
        "   good  It is 9:30.",
        "0 > 1  It is 9.",
    ]


def test_texts_to_judge_by_are_two_fields_and_no_text_comes_twice() -> None:
    pairs = [pair for path in LEARNERS for pair in read_pairs(path)]
    assert len(pairs) == 300
    assert sum(text == correction for text, correction in pairs) == 50 + 60
    for field in {field for pair in pairs for field in pair}:
        assert field.isprintable() and field == field.strip() and "  " not in field
        assert unicodedata.normalize("NFC", field) == field
    once = [field for pair in pairs for field in dict.fromkeys(pair)]
    assert len({re.sub(r"\W+", "", text.casefold()) for text, _ in pairs}) == len(pairs)
    assert len(set(once)) == len(once)


def test_corrections_are_told_by_their_place_and_words() -> None:
    assert corrections("He go at home now.", "He goes home now.") == {(1, 3, ("goes",))}
    assert corrections("It is late.", "It is late.") == set()
    assert corrections("I go to school", "I go to the school.") == {(3, 4, ("the", "school."))}


def test_precision_counts_twice_as_much_as_recall() -> None:
    texts = ["a x c d", "a x c y", "a b", "a b"]
    outputs = ["a b c d", "a z c y", "a b", "a c"]
    references = ["a b c d", "a b c d", "a b", "a b"]
    line = corrections_line(texts, outputs, references)
    # Three were made, one of them right; three were wanted.
    assert "precision 33.3%, recall 33.3%, F0.5 33.3%; 1 of 2 right texts unchanged" in line
    line = corrections_line(texts, ["a b c d", *texts[1:]], references)
    assert "precision 100.0%, recall 33.3%, F0.5 71.4%; 2 of 2 right" in line


def test_the_table_of_quantized_targets_has_the_figures_that_were_measured() -> None:
    readme = (REPOSITORY / "weights" / "README.md").read_text()
    measured = json.loads((REPOSITORY / "weights" / "quantized.json").read_text())
    assert [*measured] == ["correct-base", "8 bits", "4 bits"]
    for name, found in measured.items():
        figures = [
            f"{100 * kind['f05']:.1f}, {100 * kind['exact']:.1f}"
            for kind in found["kinds"].values()
        ]
        row = " | ".join(["float16" if name == "correct-base" else name, *figures])
        assert f"| {row} |" in readme
        assert found["examples"] == 400
