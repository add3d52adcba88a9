"""Results as values, and in notebooks."""

import copy
import dataclasses
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

from speculative_t5 import Rewritten, SpeculativeDecoder
from speculative_t5.decoding.results import Round, Stats, Tally, origins_of_round
from speculative_t5.documents import Piece
from speculative_t5.generation.outputs import Chunk, Generation, as_chunk, as_generation
from speculative_t5.tokenizers import ByteTokenizer, Detokenizer

import pytest
from conftest import tiny_model

# Three rounds: a rejection, a whole draft, a draft that is cut at the end.
STATS = Stats((3, 3, 3), (3, 3, 3), (1, 3, 2), emitted=8, seconds=0.5)


@pytest.mark.parametrize(
    ("drafted", "accepted", "emitted", "last"),
    [(0, 0, 1, "regular"), (2, 0, 1, "recovered"), (2, 1, 2, "recovered"), (2, 2, 3, "bonus"),
     (2, 2, 2, "accepted"), (2, 1, 1, "accepted")],
)  # fmt: skip
def test_the_origin_of_a_rounds_last_token(
    drafted: int, accepted: int, emitted: int, last: str
) -> None:
    expected = [*["accepted"] * (emitted - 1), last]
    assert list(origins_of_round(drafted, accepted, emitted)) == expected
    stats = Stats((drafted,), (drafted,), (accepted,), emitted)
    assert Chunk("", [5] * emitted, accepted, stats).origins == expected
    cut = Chunk("", [5] * (emitted - 1), accepted, stats, "eos", end_id=1)
    assert cut.origins == expected[:-1], "EOS is among neither the tokens nor their origins"
    assert list(stats.origins()) == [(1, origin) for origin in expected]


ROUNDS = ((3, 3), (3, 1), (0, 0), (2, 0))  # drafted and accepted


def test_a_snapshot_does_not_change_later() -> None:
    tally, snapshots = Tally(), []
    for number, (drafted, accepted) in enumerate(ROUNDS, start=1):
        tally.add(3, drafted, accepted, accepted + 1)
        snapshots.append(tally.stats(float(number)))
    for number, stats in enumerate(snapshots, start=1):
        all_drafted, all_accepted = zip(*ROUNDS[:number], strict=True)
        emitted = sum(all_accepted) + number
        given = Stats((3,) * number, all_drafted, all_accepted, emitted, float(number))
        for name in ("rounds", "drafted", "accepted", "last_round", "acceptance_by_position"):
            assert getattr(stats, name) == getattr(given, name)
        assert (repr(stats), hash(stats)) == (repr(given), hash(given))
        assert stats == given and dataclasses.asdict(stats) == dataclasses.asdict(given)
        for other in (copy.copy(stats), copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
            assert other == stats
        with pytest.raises(dataclasses.FrozenInstanceError):
            stats.num_draft = ()  # type: ignore[misc]
    assert (stats.rounds, stats.drafted, stats.accepted, stats.emitted) == (4, 8, 4, 8)
    assert (stats.acceptance_by_position, stats.tokens_per_second) == ((2 / 3, 1 / 3, 1 / 2), 2.0)


def test_the_summary_is_a_line_for_people() -> None:
    line = "16 tok/s - 8 tokens - 67 % of drafts accepted - 2.7 tokens per round"
    assert STATS.summary() == line
    regular = Stats((0, 0), (0, 0), (0, 0), emitted=2, seconds=0.1)
    assert regular.summary() == "20 tok/s - 2 tokens - no draft"


def test_a_generation_is_plain_data_whose_repr_stays_short() -> None:
    many = (5,) * 1000
    stats = Stats(many, many, many, emitted=6000, seconds=1.0)
    long = repr(Generation("word " * 5000, list(range(5000)), "length", stats))
    assert len(long) < 200 and "'length'" in long and "rounds=1000" in long
    done = Generation("ab", [5, 6], "eos", STATS, ("a", "b"), ((0.5, None), (1.0, 0.25)))
    assert pickle.loads(pickle.dumps(done)) == done
    assert json.loads(json.dumps(dataclasses.asdict(done)))["pieces"] == ["a", "b"]
    assert [(t.text, t.p, t.q) for t in done.trace] == [("a", 0.5, None), ("b", 1.0, 0.25)]
    bare = Generation("", [5, 6], "eos", STATS)
    assert [(t.id, t.text) for t in bare.trace] == [(5, ""), (6, "")]


DONE = Generation(
    'He <b>is</b> & "was"\nhere.',
    [5, 6, 7, 8, 9, 10, 11, 12],
    "eos",
    Stats((3, 3, 3), (3, 3, 3), (1, 3, 2), emitted=9, seconds=0.5),
    ("He", " <b>", "is", "</b>", " &", ' "was"', "\nhere", "."),
    tuple((0.5, 0.25) for _ in range(8)),
)


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
        ("accepted", "He"),
        ("recovered", " <b>"),
        ("accepted", "is"),
        ("accepted", "</b>"),
        ("accepted", " &"),
        ("bonus", ' "was"'),
        ("accepted", "\nhere"),
        ("accepted", "."),
    ]
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
    bare = dataclasses.replace(DONE, probabilities=None)
    assert tokens(bare)[1][2] == "round 1: recovered\nid 6"
    assert "probabilities=True" in bare._repr_html_()


def results_of(decoder: SpeculativeDecoder) -> list[Any]:
    out = decoder.generate([3, 4, 1], max_tokens=5, probabilities=True)
    chunks = list(decoder.stream([3, 4, 1], max_tokens=5))
    rewritten = Rewritten("b", "a", (Piece(1, "a", "b", stats=STATS),), STATS)
    timed = [replace(each, stats=STATS) for each in (out, *chunks)]
    return [*timed, *out.trace, STATS, rewritten]


def test_equal_results_have_equal_hashes() -> None:
    decoder = SpeculativeDecoder(tiny_model(vocab_size=20), "lookup", num_draft=2)
    results, again = results_of(decoder), results_of(decoder)
    assert results == again
    assert [*map(hash, results)] == [*map(hash, again)]
    for chunk in decoder.stream([3, 4, 1], max_tokens=5):
        assert hash(chunk) == hash(copy.deepcopy(chunk)), "with counts that still grow"
