"""Batches: a row's output is what it would be alone, whoever its neighbours are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from speculative_t5 import Generation, SpeculativeDecoder
from speculative_t5.decoder import by_length
from speculative_t5.draft import Draft
from speculative_t5.t5 import T5

import numpy as np
import pytest
from conftest import tiny_draft, tiny_model

EOS = 1
SAMPLED = {"temperature": 1.0, "seed": 7}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "filtered": SAMPLED | {"top_k": 8, "top_p": 0.9},
}


@pytest.fixture(scope="module")
def target() -> T5:
    """Its outputs vary; some end by EOS, some at the limit."""
    return tiny_model(vocab_size=20, layers=2, seed=3)


def prompts(count: int = 64, longest: int = 40) -> list[list[int]]:
    found = []
    for i in range(count):
        rng = np.random.default_rng(i)
        found.append([*rng.integers(2, 20, rng.integers(1, longest)).tolist(), EOS])
    return found


def engine(target: T5, drafter: str, **options: Any) -> SpeculativeDecoder:
    draft = tiny_draft(target, noise=0.2) if drafter in ("model", "both") else None
    lookup = drafter in ("lookup", "both")
    return SpeculativeDecoder(target, draft, num_draft=4, lookup=lookup, **options)


def told(outputs: list[Generation]) -> list[tuple[Any, ...]]:
    """All of an output that is not about time."""
    return [
        (o.tokens, o.finish_reason, o.stats.num_draft, o.stats.num_drafted, o.stats.num_accepted)
        for o in outputs
    ]


@pytest.mark.parametrize("drafter", ["model", "lookup", "both", "none"])
@pytest.mark.parametrize(
    ("way", "rule"),
    [("greedy", "auto"), ("sampled", "token"), ("sampled", "block"), ("filtered", "block")],
)
def test_outputs_do_not_hang_on_the_batch_size(
    target: T5, drafter: str, way: str, rule: Any
) -> None:
    decoder = engine(target, drafter, verify=rule)
    options = OPTIONS[way] | {"max_tokens": 13}
    alone = decoder.generate_batch(prompts(), batch_size=1, **options)
    assert {o.finish_reason for o in alone} == {"eos", "length"}
    assert len({o.stats.rounds for o in alone}) > 3, "rows should end at different times"
    if drafter != "none":
        assert len({n for o in alone for n in o.stats.num_accepted}) > 1, "and accept differently"
    for batch_size in (3, 8, 64):
        batch = decoder.generate_batch(prompts(), batch_size=batch_size, **options)
        assert told(batch) == told(alone), batch_size


def with_keys_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows keyed by where they are in the batch."""
    from speculative_t5 import engine

    def bug(self: Any) -> Any:
        rows = self.rows
        for place, row in enumerate(rows):
            row.index, row.told = place, row.index
        try:
            return keys(self)
        finally:
            for row in rows:
                row.index = row.told

    keys = engine._Batch._keys
    monkeypatch.setattr(engine._Batch, "_keys", bug)


def with_the_neighbours_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows near their end drafted for as long as their neighbours are."""
    monkeypatch.setattr(Draft, "limited", lambda self, limits: self)


@pytest.mark.parametrize("bug", [with_keys_by_place, with_the_neighbours_limit])
def test_the_check_fails_for_planted_bugs(
    target: T5, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = engine(target, "model")
    options = OPTIONS["sampled"] | {"max_tokens": 13}
    alone = decoder.generate_batch(prompts(), batch_size=1, **options)
    bug(monkeypatch)
    assert told(decoder.generate_batch(prompts(), batch_size=8, **options)) != told(alone)


def test_the_first_of_a_batch_is_what_generate_gives(target: T5) -> None:
    decoder = engine(target, "model")
    for options in OPTIONS.values():
        batch = decoder.generate_batch(prompts(5), **options)
        assert told([decoder.generate(prompts()[0], **options)]) == told(batch[:1])


def test_a_row_hangs_on_the_index_that_it_is_given(target: T5) -> None:
    decoder = engine(target, "model")
    options = OPTIONS["sampled"]
    batch = decoder.generate_batch(prompts(12), **options)
    numbered = list(enumerate(prompts(12)))
    odd = decoder.iter_batch(numbered[1::2], batch_size=4, **options)
    assert {i: o.tokens for i, o in odd} == {i: batch[i].tokens for i in range(1, 12, 2)}
    same = decoder.generate_batch([prompts()[0]] * 8, **options)
    assert len({tuple(o.tokens) for o in same}) > 1, "the same prompt, other draws"


def test_prompts_are_taken_when_there_is_room_and_outputs_given_as_they_end(target: T5) -> None:
    taken = 0

    def asked() -> Iterator[list[int]]:
        nonlocal taken
        for prompt in prompts(60):
            taken += 1
            yield prompt

    decoder = engine(target, "model")
    ended = []
    for index, _ in decoder.iter_batch(enumerate(asked()), batch_size=4, max_tokens=13):
        ended.append(index)
        assert taken <= len(ended) + 4 + 4 + 16, "to encode some together, by length"
    assert sorted(ended) == list(range(60))
    assert ended != sorted(ended), "some should overtake others"


@pytest.mark.parametrize("drafter", ["model", "lookup", "none"])
def test_auto_in_batches_keeps_greedy_outputs(
    target: T5, drafter: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    alone = engine(target, drafter).generate_batch(prompts(40), batch_size=1, max_tokens=24)
    auto = SpeculativeDecoder(
        target,
        tiny_draft(target) if drafter == "model" else None,
        num_draft="auto",
        lookup=drafter == "lookup",
    )
    batch = auto.generate_batch(prompts(40), batch_size=6, max_tokens=24)
    assert [o.tokens for o in batch] == [o.tokens for o in alone]


def test_prompts_begin_by_length_some_at_a_time() -> None:
    requests = [(i, [0] * n) for i, n in enumerate([3, 5, 1, 2, 9, 8, 7, 7, 4])]
    order = [len(ids) for _, ids in by_length(requests, 4)]
    assert order == [5, 3, 2, 1, 7, 7, 8, 9, 4]
    assert list(by_length(requests, 1)) == requests


def test_nothing_gives_nothing(target: T5) -> None:
    for num_draft in (4, "auto"):
        decoder = SpeculativeDecoder(target, "lookup", num_draft=num_draft)  # type: ignore
        assert decoder.generate_batch([]) == []


def test_seconds_are_those_of_a_row(target: T5) -> None:
    outputs = engine(target, "model").generate_batch(prompts(12), batch_size=4, max_tokens=13)
    for stats in (o.stats for o in outputs):
        assert 0 < stats.draft_seconds + stats.verify_seconds <= stats.seconds


def test_a_batch_of_no_rows_is_refused(target: T5) -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        engine(target, "none").generate_batch(prompts(2), batch_size=0)
