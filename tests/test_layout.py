"""Words of an output in the places of their source's words."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from itertools import product

from speculative_t5.documents.layout import arranged, same_facts, similarity

import pytest


def placed(source: str, output: str) -> str | None:
    words = re.findall(r"[^\s>]+", source)
    gaps = re.findall(r"[\s>]+", source)
    return arranged(words, gaps, output.split())


@pytest.mark.parametrize(
    ("source", "output", "expected"),
    [
        ("He go to\nschool now.", "He goes to school now.", "He goes to\nschool now."),
        ("He go to\n> school now.", "He goes school now.", "He goes\n> school now."),
        ("I go\nschool", "I go to the school", "I go to the\nschool"),
        ("the the\r\nthe man", "the man", "the\r\nman"),
        ("one two\nthree four", "uno dos tres cuatro", "uno dos\ntres cuatro"),
        ("one two\nthree four", "un deux", "un\ndeux"),
        ("a\nb\nc d e f", "c d e f", "c\nd\ne f"),
        ("a b c d\ne\nf", "a b c d", "a b\nc\nd"),
        ("He  go\u00a0home  now", "He goes home now", "He  goes\u00a0home  now"),
        ("He very  go", "He goes", "He goes"),
        ("a\nb", "ab", None),
        ("a\nb\nc", "a b", None),
    ],
)
def test_line_breaks_stand_before_what_their_words_became(
    source: str, output: str, expected: str | None
) -> None:
    assert placed(source, output) == expected


def test_no_line_and_no_word_is_lost() -> None:
    source = "a b\nc d\r\ne f g\n> h  i"
    for size in range(1, 12):
        for first in range(9):
            output = list("abcdefghixyz"[first : first + size])
            found = placed(source, " ".join(output))
            if found is None:
                assert len(output) < 4
                continue
            assert re.findall(r"[^\s>]+", found) == output
            assert re.findall(r"[\r\n>][\s>]*", found) == ["\n", "\r\n", "\n> "]


def test_similarity_is_that_of_letters_and_digits() -> None:
    assert similarity("He go, home.", "he GO home") == 1 == similarity("...", "!")
    assert similarity("abcd", "abxy") == 0.5
    assert similarity("He is here.", "") == 0


def test_a_bound_of_the_similarity_decides_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["".join(letters) for size in range(1, 5) for letters in product("abc", repeat=size)]
    for a, b, least in product(texts[::3], texts[::2], (0.4, 0.5, 0.75, 1)):
        exact, found = similarity(a, b), similarity(a, b, least)
        assert exact == found if exact >= least else exact <= found < least

    def ratio(_: object) -> float:
        pytest.fail("difflib takes seconds")

    monkeypatch.setattr(SequenceMatcher, "ratio", ratio)
    text = "The old man has a garden with many red flowers. " * 50
    assert similarity(text, text[::-1], 0.75) < 0.75  # of the same letters


def test_facts_are_numbers_and_addresses() -> None:
    text = "It cost 1,250.50 (in 2019, 3rd), see www.a.example/x, mail a.b@c.example."
    assert same_facts(text, "Mail a.b@c.example; www.a.example/x: 3rd 2019 - 1,250.50!")
    for old, new in (("1,250.50", "1,250"), ("a.b@", "ab@"), ("/x", ""), ("3rd", "3rd 3")):
        assert not same_facts(text, text.replace(old, new))
