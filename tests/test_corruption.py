"""The rules that damage sentences, and the measures of the correction task."""

from __future__ import annotations

import random

import pytest
from corruption import (
    PREFIX,
    Corruptor,
    double_word,
    drop_apostrophe,
    drop_capital,
    drop_stop,
    drop_word,
    held_out,
    slip,
    word_errors,
)
from families import TEXT


def test_damage_is_reproducible_and_leaves_some_sentences_alone() -> None:
    corruptor = Corruptor(TEXT)
    one = [corruptor.sentence(t, random.Random(i)) for i, t in enumerate(TEXT * 4)]
    two = [corruptor.sentence(t, random.Random(i)) for i, t in enumerate(TEXT * 4)]
    assert one == two
    unchanged = sum(a == b for a, b in zip(one, TEXT * 4, strict=True))
    assert 5 <= unchanged <= 50


def test_examples_join_one_to_four_sentences() -> None:
    rng = random.Random(0)
    examples = [Corruptor(TEXT).example(TEXT, rng) for _ in range(100)]
    assert all(source.startswith(PREFIX) for source, _ in examples)
    counts = {sum(text in target for text in TEXT) for _, target in examples}
    assert counts == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("rule", "words", "expected"),
    [
        (drop_stop, "It is late.", {"It is late"}),
        (drop_stop, "It is late", {None}),
        (drop_capital, "Tom likes Mary.", {"tom likes Mary.", "Tom likes mary."}),
        (drop_apostrophe, "It's late, isn't it?", {"Its late, isn't it?", "It's late, isnt it?"}),
        (drop_apostrophe, "It is late.", {None}),
        (drop_word, "He went to the sea.", {"He went the sea.", "He went to sea."}),
        (double_word, "Tom ran.", {"Tom tom ran."}),
        (slip, "I do.", {None}),
    ],
)
def test_rules(rule: object, words: str, expected: set[str | None]) -> None:
    assert callable(rule)
    found = {
        None if (out := rule(words.split(), random.Random(seed))) is None else " ".join(out)
        for seed in range(20)
    }
    assert found == expected


def test_slips_change_one_word_by_one_letter() -> None:
    for seed in range(50):
        out = slip(["wonderful", "of"], random.Random(seed))
        assert out is None or (out[1] == "of" and 8 <= len(out[0]) <= 10)


def test_word_errors_is_the_edit_distance() -> None:
    assert word_errors("a b c", "a b c") == 0
    assert word_errors("a x c", "a b c") == 1
    assert word_errors("a a b c", "a b c") == 1
    assert word_errors("", "a b c") == 3


def test_the_split_is_fixed() -> None:
    share = sum(held_out(f"sentence {i}") for i in range(20_000)) / 20_000
    assert share == pytest.approx(0.02, abs=0.004)
    assert [i for i in range(300) if held_out(f"sentence {i}")] == [
        108,
        124,
        152,
        203,
        220,
        237,
        248,
    ]
