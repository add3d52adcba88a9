"""What becomes of a text whose sentences are rewritten, with outputs that are set, and its page.

Random Markdown keeps its structure, as markdown-it reads it, whatever a model makes of it.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from xml.etree.ElementTree import fromstring

from speculative_t5 import SpeculativeDecoder
from speculative_t5.documents import (
    Document,
    RewriteOptions,
    Rewritten,
    lines,
    rewrite,
)
from speculative_t5.documents.comparison import CONTEXT_LINES
from speculative_t5.documents.judging import same_facts
from speculative_t5.documents.layout import arranged, similarity
from speculative_t5.errors import rounded_down

import mlx.core as mx
import pytest
from conftest import tiny_model
from markdown_it import MarkdownIt
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
    return rewrite(decoder or Scripted(corrected), text, **options)


@pytest.mark.parametrize("by", ["sentence", "paragraph", "tokens"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_only_words_change(by: Any, end: str) -> None:
    text = TEXT.replace("\n", end).replace("\r\r", "\r")
    done = fixed(text, by=by)
    assert done.text == corrected(text) != text
    assert done.source == text and not done.kept
    assert fixed(text, Scripted(str), by=by).text == text


def test_pieces_are_sentences_or_as_many_as_fit() -> None:
    text = "One two. Three four. Five six. Seven eight nine.\n\nTen."
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, ["Five six.", "One two.", "Seven eight nine.", "Ten.", "Three four."]),
        ({"by": "paragraph"}, ["One two. Three four. Five six.", "Seven eight nine.", "Ten."]),
        (
            {"by": "tokens", "piece_tokens": 6},
            ["Five six. Seven eight nine.", "One two. Three four.", "Ten."],
        ),
    ]
    for options, read in cases:
        decoder = Scripted(corrected, limit=12 if "piece_tokens" in options else 9)
        fixed(text, decoder, **options)
        assert sorted(decoder.read) == read


def test_pieces_that_cannot_be_read_do_not_go_through_the_model() -> None:
    decoder = Scripted(corrected, limit=9)
    text = "He go home. He\u2603 go home.\nThen he go and go and go and go and go home. He go out."
    done = fixed(text, decoder, by="paragraph")
    assert done.text == text.replace("He go", "He goes")
    assert [(p.line, p.status, p.reason) for p in done.pieces] == [
        (1, "changed", None),
        (1, "kept", "the model's vocabulary lacks \u2603"),
        (2, "kept", "it has 13 tokens, more than the model reads"),
        (2, "changed", None),
    ]
    assert sorted(decoder.read) == ["He go home.", "He go out."]


def test_bad_outputs_are_not_used() -> None:
    text = "- He go to\n  school at 10.\n"
    different = "its output is too different, with a similarity of"
    for answer, reason in (
        ("", "its output is empty"),
        ("He is.", different),
        ("He goes to\nschool at 10 and we all go to it as well, and to it, and to it.", different),
        ("He go to school at 11.", '"11." for "10." would change a name, a number or a symbol'),
        (
            "Hegotoschool at10.",
            '"Hegotoschool at10." for "He go to school at 10." would lose words',
        ),
        ("Hegotoschoolat-10.", "its output has fewer words than it has lines"),
    ):
        done, free = (
            fixed(text, Scripted(lambda _, answer=answer: answer), min_similarity=least)
            for least in (0.75, 0)
        )
        assert re.sub(r" 0\.\d\d$", "", done.pieces[0].reason or "") == (reason or "")
        assert (done.text == text) == (reason is not None)
        assert (free.text == text) == (len(answer.split()) < 2)


def test_outputs_with_unknown_characters_or_without_an_end_are_not_used() -> None:
    text = "He \ufffd go home. She go home."
    tokenizer = SimpleNamespace(unknown_id=hash("\u2047"))
    for bad in ("\ufffd", "\ufffd\ufffd", "\u2047"):
        decoder = Scripted(lambda each, bad=bad: each.replace("go", bad), tokenizer=tokenizer)
        done = fixed(text, decoder, min_similarity=0)
        assert done.text == text
        assert {piece.reason for piece in done.kept} == {"its output has an unknown character"}
    assert fixed(text).text == corrected(text), "the source has one itself"
    done = fixed("He go to school. He go home.", Scripted(corrected, cut=lambda x: "school" in x))
    assert done.text == "He go to school. He goes home."
    assert done.kept[0].reason == "its output did not end within 2 tokens"
    assert done.summary() == "1 of 2 pieces changed, 1 kept unchanged"


@pytest.fixture(scope="module")
def shipped() -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained("correct-base", dtype=mx.float32)


@pytest.mark.cpu  # probabilities of a batch are compared with those of single prompts
def test_outputs_that_the_model_is_not_sure_of_are_not_used(shipped: SpeculativeDecoder) -> None:
    sentences = ["He go home.", "We has met a old friend of my.", "It is sad.", "I saw teh red."]
    lowest = {}
    for sentence in sentences:
        alone = shipped.generate(sentence, probabilities=True)
        if alone.text != sentence:
            lowest[sentence] = min(p for p, _ in alone.probabilities or ())
    assert len(lowest) == 3, "what stays as it is needs no probability"
    ordered = sorted(lowest.values())
    for unsure, least in enumerate([0, *((a + b) / 2 for a, b in pairwise(ordered)), 1]):
        done = shipped.rewrite(" ".join(sentences), min_probability=least)
        kept = [piece.source for piece in done.kept]
        assert {*kept} <= {each for each in sentences if lowest.get(each, 1) < least}
        assert len(kept) <= unsure
    assert done.text == " ".join(sentences)
    for piece in done.kept:
        assert re.search(r'".+" has a probability of 0\.\d+, which is', piece.reason or "")
    whole = shipped.rewrite(sentences[0], min_probability=1, min_similarity=0)
    shown = rounded_down(lowest[sentences[0]], 4)
    assert whole.kept[0].reason == (
        f"a token of its output has a probability of {shown}, which is below 1"
    ), "what is no correction is good or not as a whole"


def test_how_sure_the_model_is_takes_no_pass_of_its_own(
    shipped: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[int] = []
    start = type(shipped.model).start

    def counted(self: Any, prompts: Sequence[Any], **keywords: Any) -> Any:
        starts.append(len(prompts))
        return start(self, prompts, **keywords)

    monkeypatch.setattr(type(shipped.model), "start", counted)
    plain = SpeculativeDecoder(shipped.model, None, shipped.tokenizer)
    done = plain.rewrite("He go home. It is sad. I saw teh red.", min_probability=1.0)
    assert [piece.status for piece in done.pieces] == ["kept", "same", "kept"] and starts == [3]


@pytest.mark.cpu
def test_a_model_says_how_sure_it_must_be_unless_told_otherwise(
    shipped: SpeculativeDecoder,
) -> None:
    text = "He go home. Every students have to bring their own laptop."
    given, own = (shipped.rewrite(text, **least) for least in ({"min_probability": 0.7}, {}))
    assert own.text == given.text == text.replace("go", "goes")
    assert shipped.rewrite(text, min_probability=0).text != own.text
    plain = SpeculativeDecoder(shipped.model, None, shipped.tokenizer)
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
    pieces = [*document.rewrite()]
    whole = document.result(pieces)
    assert [piece.refused for piece in whole.kept] == ["I have it 1 there."]
    for skipped in ({0}, {1, 2}, set(range(len(document)))):
        kept = {pieces[n].start: replace(pieces[n], stats=None) for n in skipped}
        rest = [*document.rewrite(done=kept)]
        assert not {piece.start for piece in rest} & kept.keys()
        assert document.result([*kept.values(), *rest]).text == whole.text
    assert whole.stats.emitted == len(document) * STATS.emitted
    assert whole.stats.rounds == len(document)


def test_what_cannot_be_rewritten_is_refused() -> None:
    tokenizer: Any = Scripted(str)
    decoder = SpeculativeDecoder(tiny_model(), None, tokenizer)
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (decoder, "x", {name: value}, found)
        for name, value, found in (
            ("by", "word", "'word'"),
            ("language", "xx", "'xx'"),
            ("language", 1, "language 1"),
            ("max_tokens", 0, "got 0"),
            ("piece_tokens", 1, "got 1"),
            ("batch_size", 0, "got 0"),
            ("min_similarity", 1.5, "1.5"),
            ("min_similarity", "a", "'a'"),
            ("min_probability", -0.1, "-0.1"),
        )
    ]
    cases += [(decoder, b"x", {}, "bytes"), (decoder, "\udcff", {}, "0xff")]
    cases += [(SpeculativeDecoder(tiny_model()), "He go.", {}, "has none")]
    for each, text, options, found in cases:
        with pytest.raises(ValueError) as raised:
            each.rewrite(text, **options)
        check_message(str(raised.value), found)


def placed(source: str, output: str) -> str | None:
    return arranged(re.findall(r"[^\s>]+", source), re.findall(r"[\s>]+", source), output.split())


def test_line_breaks_stand_before_what_their_words_became() -> None:
    for source, output, expected in (
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
    ):
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
    assert similarity("abcd", "abxy") == 0.5 and similarity("He is here.", "") == 0
    # Words that both have are counted at once, if these are enough.
    assert similarity("one two, six", "one too six", 0.6) == 12 / 18
    assert similarity("one two, six", "one too six", 0.7) == 16 / 18
    assert similarity("one two", "two one", 0.5) == 0.5 == similarity("one two", "two one")


def test_facts_are_numbers_and_addresses() -> None:
    text = "It cost 1,250.50 (in 2019, 3rd), see www.a.example/x, mail a.b@c.example."
    assert same_facts(text, "Mail a.b@c.example; www.a.example/x: 3rd 2019 - 1,250.50!")
    for old, new in (("1,250.50", "1,250"), ("a.b@", "ab@"), ("/x", ""), ("3rd", "3rd 3")):
        assert not same_facts(text, text.replace(old, new))


DOCUMENTS = 100
BLOCKS = MarkdownIt("commonmark", {"html": True}).enable("table")
WORDS = "He she go have a old house, and 12 (apples) in it is the *best* `x = 1` 1984".split()
# What a model might put before a word, within one or instead of one.
MARKS = (
    "2) * - + > # ## | || ``` ~~~~ --- === *** ___ 1. 1984. a) <div> <!-- [x] - [ ] [a]: \ufffd "
    "\u2013 \u2022 = : \\ >> 10) -> <b>"
).split(" ")
FIXED = (
    "# The Old House", "## He go home. ##", "The house of my father\n===", "~~~\nHe go.\n~~~",
    "```python\nHe go. = 1\n\n- She go.\n```", "| a | b |\n|---|---|\n| c | d |", "* * *",
    "    x = he.go()\n    y = 2", "<div>\nHe go.\n</div>\n", "---", "- [ ] milk and eggs",
    "[1]: https://a.example/b", "",
)  # fmt: skip
BEFORE = ("", "", "", "- ", "* ", "1. ", "2) ", "> ", "> > ", "> - ", "- [x] ", "  ", "- > ", "a) ")


def sentence(rng: random.Random, further: str) -> str:
    """Some words with an end, perhaps on several lines."""
    words = rng.choices(WORDS, k=rng.randint(3, 24))
    text = "He " + " ".join(words) + rng.choice(".?!")
    while rng.random() < 0.4:
        gaps = [found.start() for found in re.finditer(r"(?<=\w) (?=[a-z])", text)]
        if gaps:
            place = rng.choice(gaps)
            text = f"{text[:place]}\n{further}{text[place + 1 :]}"
    return text


def document(rng: random.Random) -> str:
    blocks = []
    for _ in range(rng.randint(1, 6)):
        if rng.random() < 0.3:
            blocks.append(rng.choice(FIXED))
            continue
        before = rng.choice(BEFORE)
        further = re.sub(r"[^>\s]", " ", before.replace("[x] ", ""))
        several = (sentence(rng, further) for _ in range(rng.randint(1, 3)))
        blocks.append(before + " ".join(several))
    joint = rng.choice(("\n\n", "\n\n", "\n"))
    return joint.join(blocks).replace("\n", rng.choice(("\n", "\r\n"))) + rng.choice(("", "\n"))


def damaged(text: str, rng: random.Random) -> str:
    """An output with marks among its words, and some words less or more."""
    words = text.split()
    for _ in range(rng.randint(0, 4)):
        place = rng.choice((0, rng.randrange(len(words) + 1)))
        mark, word = rng.choice(MARKS), rng.choice(WORDS)
        merged = mark + "".join(words[place : place + 1])
        words[place : place + rng.randint(0, 1)] = rng.choice(([mark], [merged], [word], []))
    return " ".join(words)


def structure(text: str) -> list[Any]:
    """The blocks of a text, where they are, and what stands in those that are no text."""
    return [
        (
            each.type,
            each.markup,
            each.info,
            each.level,
            each.map,
            each.content if each.type in ("fence", "code_block") else "",
        )
        for each in BLOCKS.parse(text)
    ]


@pytest.mark.parametrize("least", [0, 0.75])
def test_structure_and_untouched_text_stay(least: float) -> None:
    changed = kept = 0
    for seed in range(DOCUMENTS):
        rng = random.Random(seed)
        text = document(rng)
        decoder: Any = Scripted(lambda each, rng=rng: damaged(each, rng), limit=999)
        done = fixed(text, decoder, min_similarity=least)
        assert structure(done.text) == structure(text), f"seed {seed}: {text!r} {done.text!r}"
        before, after = (re.split(r"\r\n|\n", each) for each in (text, done.text))
        assert len(before) == len(after) and done.text.count("\r\n") == text.count("\r\n")
        rows = {
            piece.line + i for piece in done.pieces for i in range(piece.source.count("\n") + 1)
        }
        for number, (old, new) in enumerate(zip(before, after, strict=True), 1):
            assert number in rows or old == new
        assert fixed(text, Scripted(str, limit=999)).text == text
        changed += sum(piece.status == "changed" for piece in done.pieces)
        kept += len(done.kept)
    assert changed > DOCUMENTS / 2 and kept > DOCUMENTS / 2


FAR = "\n" * 12
PAGE_TEXT = f'<b>He</b> go & "see" them.\n\n{FAR}She <i>\u2603</i> go.{FAR}He stay.\n'


@pytest.fixture(scope="module")
def done() -> Rewritten:
    decoder = Scripted(lambda text: text.replace("go", "goes"))
    return fixed(PAGE_TEXT, decoder)


def test_lines_stand_side_by_side_with_what_changed(done: Rewritten) -> None:
    table = fromstring(f"<body>{done._repr_html_()}</body>").find("table")  # all tags are closed
    assert table is not None
    rows = [
        (row.get("class"), ["".join(cell.itertext()) for cell in row.iter("td")])
        for row in table.iter("tr")
    ]
    assert rows[1] == (
        "changed",
        ["1", '<b>He</b> go & "see" them.', "1", '<b>He</b> goes & "see" them.'],
    )
    (kept,) = [row for row in rows if row[0] == "kept"]
    assert kept[1][1] == "She <i>\u2603</i> go."
    assert kept[1][3] == kept[1][1] + "kept: the model's vocabulary lacks \u2603"
    far = [cells[0] for kind, cells in rows if kind == "far"]
    total = len(lines(PAGE_TEXT)) - (1 + CONTEXT_LINES) - (1 + 2 * CONTEXT_LINES)
    assert sum(int(re.findall(r"^\d+", text)[0]) for text in far) == total and len(far) == 2
    marked = [(mark.tag, mark.text) for mark in table.iter() if mark.tag in ("ins", "del")]
    assert marked == [("del", "go"), ("ins", "goes")]
    assert lines("a\r\nb\rc\n") == ["a", "b", "c", ""]


def test_the_page_is_whole_and_loads_nothing(done: Rewritten) -> None:
    page = done.to_html("<Changes> & more")
    assert page.startswith("<!DOCTYPE html>") and done._repr_html_() in page
    assert "<title>&lt;Changes&gt; &amp; more</title>" in page
    assert "color-scheme:light dark" in page
    assert not re.search(r"<script|https?:|url\(|@import|<b>|<i>", page)


def test_a_nul_stays_where_it_was_and_is_not_read() -> None:
    decoder = Scripted(str.upper)
    done = fixed("She ha\0ve it. He go.\n\0", decoder, min_similarity=0.0)
    assert done.text == "SHE HA\0VE IT. HE GO.\n\0" and "She ha ve it." in decoder.read
