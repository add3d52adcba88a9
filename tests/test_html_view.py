"""Outputs as values, and in notebooks."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree.ElementTree import Element, fromstring

from speculative_t5.decoding.results import Round, Stats
from speculative_t5.generation import Generation
from speculative_t5.generation.outputs import as_chunk, as_generation
from speculative_t5.tokenizers import ByteTokenizer, Detokenizer

DONE = Generation(
    'He <b>is</b> & "was"\nhere.', [5, 6, 7, 8, 9, 10, 11, 12], "eos",
    Stats((3, 3, 3), (3, 3, 3), (1, 3, 2), emitted=9, seconds=0.5),
    ("He", " <b>", "is", "</b>", " &", ' "was"', "\nhere", "."),
    tuple((0.5, 0.25) for _ in range(8)),
)  # fmt: skip


def test_texts_of_streams_and_outputs_are_the_same() -> None:
    """Even where an output ends within a character."""
    tokenizer, stats = ByteTokenizer(Path("absent")), Stats((0,), (0,), (0,), 1, 0.1)
    ids = tokenizer.encode("aé\u4e16")[:-2]  # the last byte and EOS are left out
    rounds = [Round(7, [token], 0, stats) for token in ids[:-1]]
    rounds.append(Round(7, ids[-1:], 0, stats, "length", ids))
    done = as_generation(rounds[-1], Detokenizer(tokenizer))
    assert done.text == "".join(done.pieces) == "aé\ufffd"
    detokenizer = Detokenizer(tokenizer)
    assert "".join(as_chunk(each, detokenizer).text for each in rounds) == done.text


def read(done: Generation) -> Element:
    """Parse the view, all of whose tags have to be closed."""
    return fromstring(f"<body>{done._repr_html_()}</body>")


def tokens(done: Generation) -> list[tuple[str | None, str | None, str]]:
    """Return class, text and hover of each token."""
    spans = read(done).iter("span")
    return [(s.get("class"), s.text, s.attrib["title"]) for s in spans if "title" in s.attrib]


def test_each_token_is_shaded_by_its_origin() -> None:
    assert [token[:2] for token in tokens(DONE)] == [
        ("accepted", "He"), ("recovered", " <b>"),
        ("accepted", "is"), ("accepted", "</b>"), ("accepted", " &"), ("bonus", ' "was"'),
        ("accepted", "\nhere"), ("accepted", "."),
    ]  # fmt: skip
    bare = Generation("", [5, 6], "length", Stats((1,), (1,), (1,), 2, 0.1))
    assert [text for _, text, _ in tokens(bare)] == [" 5", " 6"], "ids without a tokenizer"


def test_text_is_whole_and_shades_differ() -> None:
    text = next(div for div in read(DONE).iter("div") if "pre-wrap" in div.get("style", ""))
    assert "".join(text.itertext()) == DONE.text
    assert not re.search(r"<script|https?:|url\(|@import", DONE._repr_html_()), "nothing is loaded"
    sheet = read(DONE).findtext("style") or ""
    assert re.fullmatch(r"(\.speculative-t5 \.\w+\{[^{}]*\})+", sheet)
    rules = dict(re.findall(r"\.(\w+)\{background:(rgba\([\d,.]+\))", sheet))
    assert rules.keys() == {kind for kind, _, _ in tokens(DONE)} and len({*rules.values()}) == 3
    lines = re.findall(r"\.(\w+)\{[^}]*border-bottom:2px (\w+)", sheet)
    assert lines == [("recovered", "solid"), ("bonus", "dotted")], "for those who see no colours"


def test_hovering_shows_round_and_probabilities() -> None:
    assert tokens(DONE)[1][2] == "round 1: recovered\nid 6\np = 0.5, q = 0.25"
    assert "probabilities=True" not in DONE._repr_html_()
    bare = Generation(DONE.text, DONE.tokens, "eos", DONE.stats, DONE.pieces)
    assert tokens(bare)[1][2] == "round 1: recovered\nid 6"
    assert "probabilities=True" in bare._repr_html_()


def test_the_chart_has_a_bar_for_each_round() -> None:
    rows = ((1, 1), (2, 3), (3, 2))
    titles = [f"round {i}: {n} of 3 drafted tokens accepted" for i, n in rows]
    assert [title.text for title in read(DONE).iter("title")] == titles
    bars = [
        (float(bar.attrib["y"]), float(bar.attrib["height"])) for bar in read(DONE).iter("rect")
    ]
    assert bars[::2] == [(4, 60)] * 3 and bars[1::2] == [(44, 20), (4, 60), (24, 40)]
    plain = Generation("a", [5], "length", Stats((0,), (0,), (0,), 1, 0.1), ("a",))
    assert "<svg" not in plain._repr_html_()
