"""What becomes of a text whose sentences are rewritten, with outputs that are set."""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.documents import Document, RewriteOptions, Rewritten, rewrite
from speculative_t5.documents.layout import arranged, same_facts, similarity

import mlx.core as mx
import pytest
from conftest import tiny_model
from messages import check_message
from pieces import STATS, Scripted

TEXT = (
    "# Top\r\n\r\n> He go to school now.\u00a0It  are late,\r\n> so he run. \n"
    "  1. I has it there.\r\rEnd it.\n\n"
)


def corrected(text: str) -> str:
    for wrong, right in (("go", "goes"), ("are", "is"), ("run", "runs"), ("has", "have")):
        text = re.sub(rf"\b{wrong}\b", right, text)
    return text


def fixed(text: str, decoder: Scripted | None = None, **options: Any) -> Rewritten:
    return rewrite(decoder or Scripted(corrected), text, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("by", ["sentence", "paragraph", "tokens"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_only_words_change(by: Any, end: str) -> None:
    text = TEXT.replace("\n", end).replace("\r\r", "\r")
    done = fixed(text, by=by)
    assert done.text == (
        text.replace("go ", "goes ")
        .replace("are", "is")
        .replace("run", "runs")
        .replace("has", "have")
    )
    assert done.source == text and not done.kept
    assert fixed(text, Scripted(str), by=by).text == text


def test_pieces_are_sentences_or_as_many_as_fit() -> None:
    text = "One two. Three four. Five six. Seven eight nine.\n\nTen."
    sentence, paragraph, tokens = (
        Scripted(corrected, limit=9), Scripted(corrected, limit=9), Scripted(corrected)
    )  # fmt: skip
    fixed(text, sentence)
    assert sorted(sentence.read) == [
        "Five six.",
        "One two.",
        "Seven eight nine.",
        "Ten.",
        "Three four.",
    ]
    fixed(text, paragraph, by="paragraph")
    assert sorted(paragraph.read) == ["One two. Three four. Five six.", "Seven eight nine.", "Ten."]
    fixed(text, tokens, by="tokens", piece_tokens=6)
    assert sorted(tokens.read) == ["Five six. Seven eight nine.", "One two. Three four.", "Ten."]


def test_pieces_that_cannot_be_read_do_not_go_through_the_model() -> None:
    decoder = Scripted(corrected, limit=9)
    text = "He go home. He\u2603 go home.\nThen he go and go and go and go and go home. He go out."
    done = fixed(text, decoder, by="paragraph")
    assert done.text == text.replace("He go", "He goes")
    assert [(p.line, p.status, p.reason) for p in done.pieces] == [
        (1, "changed", None), (1, "kept", "the model's vocabulary lacks \u2603"),
        (2, "kept", "it has 13 tokens, more than the model reads"), (2, "changed", None),
    ]  # fmt: skip
    assert sorted(decoder.read) == ["He go home.", "He go out."]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "its output is empty"),
        ("He is.", "its output is too different, with a similarity of at most"),
        ("He goes to\nschool at 10 and we all go to it as well, and to it, and to it.",
         "its output is too different, with a similarity of at most"),
        ("He goes to school at 11.", "its output has other numbers or addresses"),
        ("Hegotoschool at10.", None),
        ("Hegotoschoolat-10.", "its output has fewer words than it has lines"),
    ],
)  # fmt: skip
def test_bad_outputs_are_not_used(answer: str, reason: str | None) -> None:
    text = "- He go to\n  school at 10.\n"
    done = fixed(text, Scripted(lambda _: answer))
    (piece,) = done.pieces
    assert re.sub(r"( at most) 0\.\d\d", r"\1", piece.reason or "") == (reason or "")
    assert (done.text == text) == (reason is not None)
    free = fixed(text, Scripted(lambda _: answer), min_similarity=0)
    layout = len(answer.split()) < 2
    assert (free.text == text) == layout


@pytest.mark.parametrize("bad", ["\ufffd", "\ufffd\ufffd", "\u2047"])
def test_outputs_with_unknown_characters_are_not_used(bad: str) -> None:
    text = "He \ufffd go home. She go home."
    tokenizer = SimpleNamespace(unknown_id=hash("\u2047"))
    decoder = Scripted(lambda each: each.replace("go", bad), tokenizer=tokenizer)
    done = fixed(text, decoder, min_similarity=0)
    assert done.text == text
    assert {piece.reason for piece in done.kept} == {"its output has an unknown character"}
    assert fixed(text).text == corrected(text), "the source has one itself"


def test_an_output_that_did_not_end_is_not_used() -> None:
    decoder = Scripted(corrected, cut=lambda text: "school" in text)
    done = fixed("He go to school. He go home.", decoder)
    assert done.text == "He go to school. He goes home."
    assert done.kept[0].reason == "its output did not end within 2 tokens"
    assert done.summary() == "1 of 2 pieces changed, 1 kept unchanged"


@pytest.mark.cpu  # probabilities of a batch are compared with those of single prompts
def test_outputs_that_the_model_is_not_sure_of_are_not_used() -> None:
    decoder = SpeculativeDecoder.from_pretrained("correct-base", dtype=mx.float32)
    sentences = ["He go home.", "We has met a old friend of my.", "It is sad.", "I saw teh red."]
    lowest = {}
    for sentence in sentences:
        alone = decoder.generate(sentence, probabilities=True)
        if alone.text != sentence:
            lowest[sentence] = min(p for p, _ in alone.probabilities or ())
    assert len(lowest) == 3, "what stays as it is needs no probability"
    ordered = sorted(lowest.values())
    for unsure, least in enumerate([0, *((a + b) / 2 for a, b in pairwise(ordered)), 1]):
        done = decoder.rewrite(" ".join(sentences), min_probability=least)
        kept = [piece.source for piece in done.kept]
        assert kept == [each for each in sentences if lowest.get(each, 1) < least]
        assert len(kept) == unsure
    assert done.text == " ".join(sentences)
    assert [piece.reason for piece in done.kept] == [
        f"a token of its output has a probability of {p:.4f}, which is below 1"
        for p in lowest.values()
    ]


def test_a_model_says_how_sure_it_must_be_unless_told_otherwise() -> None:
    decoder = SpeculativeDecoder.from_pretrained("correct-base")
    text = "He go home. The 2^3 is are eight."
    given, own = (decoder.rewrite(text, **least) for least in ({"min_probability": 0.7}, {}))
    assert own.text == given.text == "He goes home. The 2^3 is are eight."
    assert decoder.rewrite(text, min_probability=0).text != own.text
    plain = SpeculativeDecoder(decoder.model, None, decoder.tokenizer)
    assert plain.rewrite(text).text == own.text


def test_outputs_may_be_twice_as_long_as_their_pieces() -> None:
    decoder = Scripted(corrected, limit=99)
    fixed("He go. She go. " + "He " * 20 + "go.", decoder)
    assert decoder.limits == [32, 64], "powers of two"
    for limit, size in zip(decoder.limits, (3, 22), strict=True):
        assert limit / 2 < 2 * size + 16 <= limit
    fixed("He go.", decoder, max_tokens=7)
    assert decoder.limits[-1] == 7


def test_parts_that_are_done_are_left_out() -> None:
    decoder: Any = Scripted(lambda each: corrected(each).replace("there", "1 there"))
    document = Document(decoder, TEXT, RewriteOptions())
    pieces = dict(document.rewrite())
    whole = document.result(pieces)
    assert [piece.refused for piece in whole.kept] == ["I have it 1 there."]
    for skipped in ({0}, {1, 2}, set(range(len(document)))):
        done = {n: pieces[n] for n in skipped}
        kept = {n: document.piece(n, p.output, p.reason, p.refused) for n, p in done.items()}
        assert kept == {n: replace(piece, stats=None) for n, piece in done.items()}
        rest = dict(document.rewrite(skip=kept))
        assert not rest.keys() & kept.keys()
        assert document.result(kept | rest).text == whole.text
    assert whole.stats.emitted == len(document) * STATS.emitted
    assert whole.stats.rounds == len(document)


@pytest.mark.parametrize(
    ("text", "options", "found"),
    [
        ("x", {"by": "word"}, "'word'"),
        ("x", {"language": "xx"}, "'xx'"),
        ("x", {"language": None}, "None"),
        ("x", {"max_tokens": 0}, "got 0"),
        ("x", {"piece_tokens": 1}, "got 1"),
        ("x", {"min_similarity": 1.5}, "1.5"),
        ("x", {"min_similarity": "a"}, "'a'"),
        ("x", {"min_probability": -0.1}, "-0.1"),
        ("x", {"min_probability": "a"}, "'a'"),
        ("x", {"batch_size": 0}, "got 0"),
        (b"x", {}, "bytes"),
        ("\udcff", {}, "0xff"),
    ],
)
def test_bad_options_are_refused(text: Any, options: Any, found: str) -> None:
    decoder = SpeculativeDecoder(tiny_model(), None, Scripted(str))  # type: ignore[arg-type]
    with pytest.raises(ValueError) as raised:
        decoder.rewrite(text, **options)
    check_message(str(raised.value), found)


def test_a_text_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError) as raised:
        SpeculativeDecoder(tiny_model()).rewrite("He go.")
    check_message(str(raised.value), "has none")


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
