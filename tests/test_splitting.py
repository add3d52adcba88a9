"""Which parts of a text are sentences, and where they stand."""

from speculative_t5.documents.splitting import (
    SENTENCE_LANGUAGES,
    keeps_lines,
    paragraphs,
    sentences,
)

import pytest

FULL = "These are eight words of a line that is full"  # 40 characters or more


def found(text: str, language: str = "en") -> list[tuple[int, str]]:
    """Line and words of each sentence."""
    return [
        (part.line, part.flat(text))
        for passage in paragraphs(text)
        for part in sentences(text, passage, language)
    ]


def test_sentences_have_the_numbers_of_their_lines() -> None:
    lines = ["One is here. Two goes", "on. Three ends.", "", "", "> Four is", "> a quote."]
    for end in ("\n", "\r\n", "\r"):
        assert found(end.join(lines)) == [
            (1, "One is here."),
            (1, "Two goes on."),
            (2, "Three ends."),
            (5, "Four is a quote."),
        ]


@pytest.mark.parametrize(
    "line",
    ["# A heading. It is one.", "###### Six", "| He go. | She go. |", "He go. | She go. | It.",
     "He go.\tShe have.", "He go.     She have.", "    he.go(home)\n    return home and stay there",
     "\tx = 3 and so on for long", "```\nHe go.\n```", "~~~ text\nHe go.\n```\n~~~~",
     "A heading of more than four words\n=====", "Another of more than four words\n---",
     "3. 4. 5.", "* * *", "milk and eggs", "- three apples", "Chapter 3: The Old House",
     "Dear Sir,", "What we should bring the next time:", "> ", "\ufeff# Top"],
)  # fmt: skip
def test_what_is_no_sentence_is_left_out(line: str) -> None:
    assert found(line) == []
    assert found(f"Before it.\n\n{line}\n\nAfter it.") == [
        (1, "Before it."),
        (4 + line.count("\n") + 1, "After it."),
    ]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("The old house of my father\n~~~~\nHe go.\n\nTop\n~~~\nShe go.", [3, 7]),
        ("The old house of my father\n~~~\nHe go.\n~~~\nShe go.", [1, 5]),  # too few
        ("It looks like this one:\n~~~~\nHe go.\n~~~~\nShe go.", [5]),
        ("He go.\n~~~~\nHe go.\n~~~~\nShe go.", [1, 5]),
        ("> The house of my father\n~~~~\nHe go.\n~~~~\nShe go.", [1, 5]),
        ("```` ```x = 1``` is code.````\n\nHe go.\n```\nHe go.\n```\nShe go.", [3, 7]),
        ("```x``` is one.\nHe go.\n```\nHe go.\n```\nShe go.", [1, 2, 6]),
        ("~~~ a`b\nHe go.\n~~~\nShe go.", [4]),
        ("> ```\n> He go.\n\nHe go.\n> She go.", [4, 5]),
        ("> > ~~~\n> > He go.\n> He go.\n> ~~~\n> She go.\n> ~~~\n", [3]),
        ("```\n> ```\nHe go.\n```\nShe go.", [5]),  # a quotation in code
        ("```\nHe go.\n``` ~~~\nHe go.\n```\nShe go.", [6]),
        ("- ```\n  He go.\n  ```\n\nHe go.\n\n1. ~~~\n   He go.\n   ~~~\n\nShe go.", [5, 11]),
        ("He go.\n```\nHe go.\n~~~\nShe go.", [1, 3, 5]),
        ("````\nHe go.\n```\nHe go.\n```\nShe go.\n\n```", [2, 6]),
        ("> ```\n> He go.\n\n", [2]),
        ("---\n~~~\nHe go.\n~~~\nShe go.", [5]),  # a rule is no heading
        ("* * *\n    x = he.go() or y.stay()\n\n- He go.\n\n# Top\n\n    He.go = x + y or it", [4]),
        ("He go.\n___\nhe go.", [1, 3]),
    ],
)  # fmt: skip
def test_sentences_behind_a_fence_that_is_none_are_found(text: str, lines: list[int]) -> None:
    assert [line for line, _ in found(text)] == lines


def test_long_lines_and_many_fences_are_read_in_one_go() -> None:
    """They took hours where the steps grew with the square of their length."""
    assert found("He go home." + " " * 100_000) == [(1, "He go home.")]
    assert found("He go home. |" + " \t" * 50_000 + "\nShe go.")[-1] == (2, "She go.")
    assert found("~~~ a\n" * 20_000 + "He go home.") == [(20_001, "He go home.")]


def test_marks_before_a_sentence_are_no_part_of_it() -> None:
    lists = ("- ", "* ", "+ ", "\u2022 ", "1. ", "12) ", "(3) ", "a) ", "- [ ] ", "1. [x] ")
    for marks in (*lists, "> ", "> > ", ">> - ", "  ", "> 1. ", "\ufeff"):
        assert found(f"{marks}He go home.") == [(1, "He go home.")]


def test_a_line_break_is_within_a_sentence_if_the_line_is_full_or_the_next_begins_small() -> None:
    assert found(f"{FULL}\nAnd more of it.") == [(1, f"{FULL} And more of it.")]
    assert found("He go\nhome now.") == [(1, "He go home now.")]
    assert found("He go to school now\nShe go to school now") == [
        (1, "He go to school now"),
        (2, "She go to school now"),
    ]
    long = f"{FULL} {FULL} {FULL}"
    assert found(f"{long}\nAnd more of it.") == [(1, long), (2, "And more of it.")]
    assert found(f"> {FULL}\n>> And more of it.") == [(1, FULL), (2, "And more of it.")]
    assert found(f"- {FULL}\n- And more of it.") == [(1, FULL), (2, "And more of it.")]
    assert found(f"- {FULL}\n  And more of it.") == [(1, f"{FULL} And more of it.")]


def test_indented_prose_and_items_are_no_code() -> None:
    assert found(f"    {FULL},\n    and he go home.") == [(1, f"{FULL}, and he go home.")]
    assert found("- He go home.\n\n    he stay there too") == [(1, "He go home.")]
    assert found("- He go home.\n\n    And he stay there.")[1] == (3, "And he stay there.")


def test_rules_are_those_of_the_language() -> None:
    german = "Am 3. Mai kam Dr. Meier. Er blieb."
    assert found(german, "de") == [(1, "Am 3. Mai kam Dr. Meier."), (1, "Er blieb.")]
    text = "\u3053\u308c\u306f\u6587\u3067\u3059\u3002\u4e8c\u3064\u76ee\u3067\u3059\u3002"
    assert [part for _, part in found(text, "ja")] == [text[:7], text[7:]], "without a space"
    for language in SENTENCE_LANGUAGES:
        assert len(found("He is here! He is there!", language)) in (1, 2)


def test_an_output_does_not_make_a_rule_of_a_line() -> None:
    text = "He go to school\nand home."
    for rule in ("---", "***", "=", "-", "2)", "___", "- - -"):
        for wrong in (f"He goes to school\n{rule}", f"{rule}\nHe goes to school."):
            assert not keeps_lines(text, next(paragraphs(text)), wrong)


def test_marks_within_a_line_are_words() -> None:
    text = "One is here. He go home. Two has\nit."
    (paragraph,) = paragraphs(text)
    _, second, third = sentences(text, paragraph, "en")
    assert keeps_lines(text, second, "2) - # He goes home.")
    assert keeps_lines(text, third, "- Two have\nit.")
    assert not keeps_lines(text, third, "Two have\n- it.")
    assert not keeps_lines(text, second, "He goes | home."), "a row has two bars"
