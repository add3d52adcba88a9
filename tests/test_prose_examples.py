"""Training examples from edited prose: what is never damaged, and what text that is right has."""

from __future__ import annotations

import lzma
import random
import re
from pathlib import Path

import pytest
from conftest import REPOSITORY
from corruption import PREFIX, held_out
from held_text import held
from learner_errors import Learner, mixed_examples
from learner_errors.tables import Lexicon
from prose import (
    RULES,
    Paragraphs,
    Prose,
    drop_small_word,
    is_error,
    slip_in_known,
    straight,
    take_for_another,
    write_twice,
)

SENTENCES = (REPOSITORY / "tests" / "sentences.txt").read_text().splitlines()
TECHNICAL = [
    "The `list` type of Python 3.12 can be used to read files, and it's as fast as a tuple is.",
    "See [the documentation of attrs](https://www.attrs.org/en/stable/) for a list of the classes.",
    "Each **request** to example.com has a header, which depends on the ``Content-Type`` of it.",
    "Use :pep:`8` and `the guide <https://docs.python.org>`_ if you don't know how to write code.",
]
STORIES = ["“It is quite dark, Watson,” said he. I have never seen so many people in the street."]
KNOWN = " ".join([*TECHNICAL, *STORIES, *SENTENCES]).lower().split()
KEPT = r"`[^`]+`|https?://[\w./-]+|3\.12|example\.com|Watson|Python|Content-Type"


@pytest.fixture(scope="module")
def prose() -> Prose:
    return Prose([*TECHNICAL, *STORIES, *SENTENCES] * 5, ["Guten Tag"])


LEXICON = Lexicon([word.strip(".,!?") for word in KNOWN] * 5)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (TECHNICAL[0], TECHNICAL[0].replace("`", "")),
        (TECHNICAL[1], "See the documentation of attrs for a list of the classes."),
        (TECHNICAL[2], "Each request to example.com has a header, which depends on the "
                       "Content-Type of it."),
        (TECHNICAL[3], "Use PEP 8 and the guide if you don't know how to write code."),
        ("A <b>bold</b> x &amp; y, _so_ be it: `a_b`s.", "A bold x & y, so be it: a_bs."),
    ],
)  # fmt: skip
def test_marks_are_kept_or_left_out(text: str, plain: str) -> None:
    found = held(text, LEXICON.words)
    assert found.filled(found.text, plain=False) == text
    assert found.filled(found.text, plain=True) == plain


def test_code_addresses_numbers_and_names_are_never_damaged(prose: Prose) -> None:
    rng, changed = random.Random(0), 0
    for text in [*TECHNICAL, *STORIES] * 100:
        found = held(text, LEXICON.words)
        damaged = found.filled(prose.damaged(found, rng), plain=False)
        assert re.findall(KEPT, damaged) == re.findall(KEPT, text)
        changed += damaged != text
    assert changed > 450


def test_names_are_held_but_where_they_begin_a_sentence_as_known_words() -> None:
    for text, held_words in (
        ("The Name is Watson. The name is here.", ["Name", "Watson"]),
        ("“Watson,” I said on Monday. “Name it.”", ["Watson"]),
    ):
        found = held(text, {"the", "name", "is", "here"})
        assert [part for part, _ in found.parts] == held_words


def test_damage_that_loses_a_held_part_is_not_done(
    prose: Prose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one that makes another right text."""

    def rules(text: str, rng: random.Random, lexicon: Lexicon) -> str:
        return rng.choice([text[1:], text.replace("not ", ""), text.replace("here", "hear")])

    monkeypatch.setattr("prose.RULES", (rules,))
    monkeypatch.setattr("prose.WEIGHTS", (1,))
    found = held("3.12 is not here.", LEXICON.words)
    outputs = {prose.damaged(found, random.Random(seed)) for seed in range(40)}
    texts = {found.filled(text, plain=False) for text in outputs}
    assert texts == {"3.12 is not hear.", "3.12 is not here."}  # where all attempts were refused


def test_most_examples_are_right_and_both_sides_have_the_same_marks(prose: Prose) -> None:
    kinds = {"technical": Paragraphs(TECHNICAL, []), "stories": Paragraphs([], STORIES)}
    for kind, share in (("technical", 2 / 3), ("stories", 1 / 2)):
        rng = random.Random(1)
        pairs = [prose.example(kinds[kind], rng) for _ in range(600)]
        assert all(source.startswith(PREFIX) for source, _ in pairs)
        right = sum(source == PREFIX + target for source, target in pairs)
        assert right / 600 == pytest.approx(share, abs=0.08)
        for source, target in pairs:
            assert re.findall("[`*“”]", source) == re.findall("[`*“”]", target)
            assert len(target) < 500


def test_right_text_has_items_labels_and_names_in_small_letters(prose: Prose) -> None:
    rng = random.Random(2)
    shaped = [prose.shaped("The file is read, and it has a name.", rng) for _ in range(2000)]
    for form in (
        r"Note: the file is read, and it has a name\.",
        r"- the file is read, and it has a name",
        r"(\S+ )?`?[a-z]\S*`? [-–] the file .*name",
        "it has a name|The file is read",
        r"The file is read & it .*|The file is read, & it has a name",
        r"The file .* \(.?Guten Tag.?\)\.",
    ):
        assert any(re.fullmatch(form, text) for text in shaped), form
    named = [prose.shaped("Fsspec uses a file.", rng) for _ in range(100)]
    assert any(re.fullmatch(r"[a-z-]\S+ uses a file\.", text) for text in named)


def test_slips_make_no_other_word() -> None:
    known = {"their", "name", "was", "there"}
    for seed in range(300):
        slip = (
            slip_in_known("Their name was there.", random.Random(seed), Lexicon([*known] * 5)) or ""
        )
        unknown = [word for word in re.findall(r"\w+", slip.lower()) if word not in known]
        assert len(unknown) == bool(slip)


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        (take_for_another, "It's here.", {"Its here.", "It's hear."}),
        (take_for_another, "It’s ok.", {"Its ok."}),
        (write_twice, "He had that name.", {None}),
        (write_twice, "He saw it.", {"He saw saw it."}),
        (drop_small_word, "It can be used.", {"It can used."}),
        (drop_small_word, "It can be read.", {None}),
        (drop_small_word, "A part of the list.", {"A part the list."}),
    ],
)
def test_rules_for_prose(rule: object, text: str, expected: set[str | None]) -> None:
    assert callable(rule)
    assert {rule(text, random.Random(seed), LEXICON) for seed in range(60)} == expected


@pytest.mark.parametrize(
    ("right", "wrong", "error"),
    [
        ("He goes home.", "He go home.", True),
        ("It has an end.", "It has a end.", True),
        ("It has a name.", "It has the name.", False),
        ("The files are read.", "Files are read.", False),
        ("A few files.", "Few files.", False),
        ("We have written it.", "We have to write it.", False),
        ("It is not here.", "It is here.", False),
        ("Come by then.", "Come until then.", False),
        ("A kindly man.", "A kind man.", False),
        ("He goes home.", "He goes home.", False),
    ],
)
def test_damage_is_an_error_and_no_other_right_text(right: str, wrong: str, error: bool) -> None:
    assert is_error(right, wrong) == error


def test_no_rule_takes_the_first_capital_or_the_full_stop() -> None:
    text = "The file is read by this program, and it can be used as a list of names."
    for rule in RULES:
        for seed in range(40):
            damaged = rule(text, random.Random(seed), LEXICON) or text
            assert damaged[0].isupper(), damaged
            assert damaged.endswith("."), damaged


def test_straight_quotes() -> None:
    assert straight("“It’s ‘so’,” he said.") == "\"It's 'so',\" he said."


def test_a_share_of_the_examples_is_prose() -> None:
    learner = Learner(SENTENCES * 5, ["Guten Tag."])
    examples = mixed_examples(learner, learner, SENTENCES, 0, prose=lambda rng: ("p", "p"))
    found = [next(examples)[0] == "p" for _ in range(400)]
    assert sum(found) / 400 == pytest.approx(0.35, abs=0.06)


def test_paragraphs_are_held_out_by_their_text(tmp_path: Path) -> None:
    lines = [f"Sentence  {i} is here." for i in range(2000)]
    with lzma.open(tmp_path / "some.txt.xz", "wt") as file:
        file.write("\n".join([*lines, "", lines[0]]))
    (tmp_path / "more.txt").write_text("One more.\n")
    files = [tmp_path / "some.txt.xz", tmp_path / "more.txt"]
    seen, unseen = Paragraphs.read(files, ())
    assert [*unseen.technical] == [p for p in map(" ".join, map(str.split, lines)) if held_out(p)]
    assert len(seen.technical) + len(unseen.technical) == 2001
    assert not seen.stories
