"""Texts that no person wrote: very long sentences, separators that nobody sees, and NUL."""

import io
import random
import re
from itertools import pairwise
from typing import Any

from speculative_t5.documents import RewriteOptions, read_file, rewrite, rewriting
from speculative_t5.documents.rewriting import Document
from speculative_t5.documents.splitting import (
    SEEN_AT_ONCE,
    _Fences,
    _lines,
    keeps_lines,
    paragraphs,
    segments,
)
from speculative_t5.tokenizers.languages import Languages, is_code

import pytest
from docx import Document as Word
from messages import check_message
from pieces import Scripted
from sentencex import segment

SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x1f\x85\u2028\u2029\0"
WORDS = "He goes home and Mr. Smith stays as he did in May 1984 at 10 p.m. with a book".split()


def prose(rng: random.Random, size: int) -> str:
    words = [rng.choice(WORDS) + rng.choice(("", "", "", "", ".", "?", "!")) for _ in range(size)]
    return " ".join(words)


def spread(text: str) -> str:
    """Each sentence gets a word more."""
    return text.replace("go", "goes there").replace("have", "has")


def done(text: str, decoder: Scripted | None = None, **options: Any) -> Any:
    return rewrite(decoder or Scripted(spread, limit=9999), text, **options)


def test_long_paragraphs_are_split_as_a_whole_would_be() -> None:
    rng = random.Random(0)
    for language in ("en", "de", "ja"):
        for size in (1, 300, 4 * SEEN_AT_ONCE // 5):
            text = prose(rng, size)
            found = segments(language, text)
            assert "".join(found) == text
            assert found == segment(language, text)


def test_a_sentence_longer_than_what_is_seen_at_a_time_is_one() -> None:
    long = "He go home " + "!" * 3 * SEEN_AT_ONCE + " and so on."
    assert segments("en", f"He is here. {long}") == ["He is here. ", long]
    found = segments("en", f"{'go ' * SEEN_AT_ONCE}home. She is here.")
    assert [each[-8:] for each in found] == ["o home. ", "is here."]
    for text in ("a" * 5 * SEEN_AT_ONCE, "\u201ca " * 2 * SEEN_AT_ONCE, "- " * 2 * SEEN_AT_ONCE):
        assert "".join(segments("en", text)) == text


def test_what_is_too_long_to_be_read_is_listed_and_kept() -> None:
    text = f"He go home. {'word ' * 5000}end. She have it all."
    result = done(text, min_similarity=0)
    assert result.text == spread(text)
    (kept,) = result.kept
    assert kept.source == f"{'word ' * 5000}end."
    assert kept.reason == "it has 25,004 characters, more than the 20,000 read at a time"


@pytest.mark.parametrize("by", ["sentence", "paragraph", "tokens"])
@pytest.mark.parametrize("separator", [*SEPARATORS, " \x0b ", "\0\0", "\x0c\n"], ids=repr)
def test_separators_keep_their_places(by: Any, separator: str) -> None:
    some = ("He go home.", "They have it", "we go", "She have\tan apple.", "it go on.", "Go.")
    for one in some:
        for other in some:
            text = f"{one}{separator}{other}"
            for answer in (spread, str.upper, lambda text: " ".join(text.split()[::-1])):
                result = done(text, Scripted(answer, limit=99), by=by, min_similarity=0).text
                assert re.findall(r"[\0\v\f\n\x1c-\x1f\x85\u2028\u2029]", result) == re.findall(
                    r"[\0\v\f\n\x1c-\x1f\x85\u2028\u2029]", text
                )
            words = re.split(r"[\s\0]+", done(text, by=by, min_similarity=0).text)
            if "\n" not in separator:
                plain = text.replace(separator, " ")
                assert words == done(plain, by=by, min_similarity=0).text.split()


def test_nul_is_a_blank_that_stays() -> None:
    decoder = Scripted(spread)
    assert done("She have\0 a apple.\0He go\0home.", decoder, min_similarity=0).text == (
        "She has\0 a apple.\0He goes there\0home."
    )
    assert sorted(decoder.read) == ["He go home.", "She have a apple."]


def test_sentences_are_packed_as_one_by_one() -> None:
    """Numbers of sentences are tried by doubling, and the parts are those of trying each."""
    rng = random.Random(1)
    for _ in range(50):
        sizes = [rng.randint(5, 9) for _ in range(rng.randint(1, 30))]
        text = " ".join("Go " * (size - 1) + "home." for size in sizes)
        packs: list[int] = []
        for size in sizes:
            if packs and packs[-1] + size + 1 <= 40:  # and the prefix
                packs[-1] += size
            else:
                packs.append(size)
        decoder: Any = Scripted(str, limit=40)
        document = Document(decoder, text, RewriteOptions(by="paragraph"))
        assert [len(part.passage.spans) for part in document._parts] == packs


def test_marks_are_seen_before_a_sentence_however_many_there_are() -> None:
    for marks in (3, 3000):
        text = f"{'> ' * marks}He go home."
        (paragraph,) = paragraphs(text)
        assert not keeps_lines(text, paragraph, "# He goes home.")
        assert keeps_lines(text, paragraph, "He goes home.")


def test_the_end_of_code_is_found_as_by_a_search_line_by_line() -> None:
    rng = random.Random(2)
    kinds = (
        "```",
        "````",
        "~~~",
        "~~~~~",
        "> ```",
        "> ~~~",
        "> > ~~~~",
        "He go.",
        "> It.",
        "``` a",
    )
    for _ in range(500):
        lines = _lines("\n".join(rng.choices(kinds, k=rng.randint(1, 12))), ())
        fences = _Fences(lines)
        for first, line in enumerate(lines):
            if (fence := line.words.split()[0])[0] in "`~":
                assert fences.behind(first, fence) == behind(lines, first, fence)


def behind(lines: list[Any], first: int, fence: str) -> int | None:
    for place in range(first + 1, len(lines)):
        line = lines[place]
        if line.depth < lines[first].depth:
            return place
        closes = line.words.startswith(fence) and not line.words.strip(fence[0])
        if line.depth == lines[first].depth and closes:
            return place + 1
    return None


def test_numbers_of_characters_in_html_may_have_any_length() -> None:
    for number, shown in (("65", "A"), ("0" * 5000 + "65", "A"), ("9" * 5000, "\ufffd")):
        page = read_file(f"<p>a &#{number}; b</p>".encode(), "a.html")
        assert page.text == f"a {shown} b"


def test_lines_of_html_are_numbered_as_in_the_file() -> None:
    text = "<p>a</p>\r\n<p>b\n<b>c</b></p>\r<!-- \n -->\n\n<p>d</p>"
    page = read_file(text.encode(), "a.html")
    assert page.text == "a\nb c\nd"
    assert [page.number(line) for line in (1, 2, 3)] == [1, 2, 7]


def test_what_stands_around_a_speech_is_found_from_both_ends() -> None:
    for before, words, behind in (
        ("<i>", "He go home.", "</i>"),
        ("{\\an8}\u266a ", "La la", " \u266a"),
        ("", "a <i>b</i> c", ""),
        ("<i><b>", "a", " </b></i>"),
        ("", "a", " </ b</i >"),
        ("", "a < b", "</i >"),
        ("", "a </b", ""),
        ("", "a </b> c", ""),
        ("", "a" + " " * 60_000 + "b", ""),
        ("<i>", "", ""),
        ("", "1 < 2 > 3", ""),
        ("", "a", "</b </i>"),
    ):
        cue = f"1\n00:00:01,000 --> 00:00:02,000\n{before}{words}{behind}\n"
        form = read_file(cue.encode(), "a.srt")
        # Tags within a speech stay in their places, and hide none of its words from the model.
        tags = re.findall(r"</?\w+>", words)
        assert form.text == " ".join(re.sub(r"</?\w+>", "", words).split())
        if words:
            changed = form.rewritten("xy").decode().splitlines()[2]
            assert re.findall(r"</?\w+>", changed[len(before) :])[: len(tags)] == tags
            assert tags or changed == f"{before}xy{behind}"


def test_word_takes_a_paragraph_of_many_runs() -> None:
    made = Word()
    paragraph = made.add_paragraph()
    for i in range(400):
        paragraph.add_run(f"go{i} ").bold = i % 2 == 0
    file = io.BytesIO()
    made.save(file)
    form = read_file(file.getvalue(), "a.docx")
    form.rewritten(form.text.replace("go7 ", "went "))
    assert form.not_kept() == []


def test_names_of_languages_are_short() -> None:
    pairs = Languages({("", "de"): "a", ("", "fr"): "b"})
    for name in ("a" * 10**6, "german " * 10**5, "en" + "-abcde" * 2000):
        with pytest.raises(ValueError) as raised:
            pairs.pair(name)
        check_message(str(raised.value), name[:20])
        assert not is_code(name)
    assert pairs.pair("German") == ("", "de") and is_code("zh-Hant-TW")


def test_the_bound_of_a_sentence_is_above_all_that_people_write() -> None:
    assert rewriting.MAX_READ > 2 * 64 * 128
    assert [b - a for a, b in pairwise((SEEN_AT_ONCE, rewriting.MAX_READ))][0] > 0
