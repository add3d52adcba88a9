"""Batches: a row's output is what it would be alone, whoever its neighbours are."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from speculative_t5 import Generation, SpeculativeDecoder
from speculative_t5.decoding.draft import Draft
from speculative_t5.decoding.drafters import ModelDrafter
from speculative_t5.decoding.loop import Plan, decode, in_order_of_length
from speculative_t5.decoding.sampling import Sampler
from speculative_t5.decoding.schedule import FixedSchedule, Outcome
from speculative_t5.decoding.verify import Verifier

import numpy as np
import pytest
from conftest import KINDS, VARIED, Watched, tiny, tiny_draft

EOS = 1
SAMPLED = {"temperature": 1.0, "seed": 7}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "filtered": SAMPLED | {"top_k": 8, "top_p": 0.9},
}


@pytest.fixture(scope="module", params=KINDS)
def target(request: Any) -> Any:
    """Its outputs vary; some end by EOS, some at the limit."""
    return tiny(request.param, vocab_size=20, layers=2, seed=VARIED[request.param])


def prompts(count: int = 64, longest: int = 40) -> list[list[int]]:
    found = []
    for i in range(count):
        rng = np.random.default_rng(i)
        found.append([*rng.integers(2, 20, rng.integers(1, longest)).tolist(), EOS])
    return found


def engine(target: Any, drafter: str, **options: Any) -> SpeculativeDecoder:
    draft = tiny_draft(target, noise=0.2) if drafter in ("model", "both") else None
    lookup = drafter in ("lookup", "both")
    return SpeculativeDecoder(target, draft, num_draft=4, lookup=lookup, **options)


def told(outputs: list[Generation]) -> list[tuple[Any, ...]]:
    """All of an output that is not about time."""
    return [
        (o.tokens, o.finish_reason, o.stats.num_draft, o.stats.num_drafted, o.stats.num_accepted)
        for o in outputs
    ]


WAYS = [("greedy", "auto"), ("sampled", "token"), ("sampled", "block"), ("filtered", "block")]
DRAFTERS = ["model", "lookup", "both", "none"]
INVARIANT = [(kind, *way, drafter) for kind in KINDS for way in WAYS for drafter in DRAFTERS]
# One of each other kind: the session is the same as the second's.
INVARIANT += [(kind, "sampled", "block", "both") for kind in VARIED if kind not in KINDS]


@pytest.mark.parametrize(("target", "way", "rule", "drafter"), INVARIANT, indirect=["target"])
def test_outputs_do_not_hang_on_the_batch_size(
    target: Any, drafter: str, way: str, rule: Any
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


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_round_reads_no_more_of_a_long_output(
    target: Any, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, start = engine(target, drafter), type(target).start
    started: list[Watched] = []

    def watched(self: Any, prompts: Any) -> Any:
        session, contexts = start(self, prompts)
        if self is target:
            contexts = [Watched(context) for context in contexts]
            started.extend(contexts)
        return session, contexts

    monkeypatch.setattr(type(target), "start", watched)
    endless = property(lambda self: frozenset[int]())
    monkeypatch.setattr(type(target), "eos_token_ids", endless, raising=False)
    rounds = decoder.stream([5, 6, 7, EOS], max_tokens=120)
    reads = [started[0].count for _ in rounds][:-1]  # the last round copies the output
    each = [later - earlier for earlier, later in itertools.pairwise(reads)]
    assert len(each) > 5 and max(each) < 20, each


def with_keys_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows keyed by where they are in the batch."""
    from speculative_t5.decoding import loop as engine

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
    target: Any, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = engine(target, "model")
    options = OPTIONS["sampled"] | {"max_tokens": 13}
    alone = decoder.generate_batch(prompts(), batch_size=1, **options)
    bug(monkeypatch)
    assert told(decoder.generate_batch(prompts(), batch_size=8, **options)) != told(alone)


def test_the_first_of_a_batch_is_what_generate_gives(target: Any) -> None:
    decoder = engine(target, "model")
    for options in OPTIONS.values():
        batch = decoder.generate_batch(prompts(5), **options)
        assert told([decoder.generate(prompts()[0], **options)]) == told(batch[:1])


def test_a_row_hangs_on_the_index_that_it_is_given(target: Any) -> None:
    decoder = engine(target, "model")
    options = OPTIONS["sampled"]
    batch = decoder.generate_batch(prompts(12), **options)
    numbered = list(enumerate(prompts(12)))
    odd = decoder.iter_batch(numbered[1::2], batch_size=4, **options)
    assert {i: o.tokens for i, o in odd} == {i: batch[i].tokens for i in range(1, 12, 2)}
    same = decoder.generate_batch([prompts()[0]] * 8, **options)
    assert len({tuple(o.tokens) for o in same}) > 1, "the same prompt, other draws"


def test_prompts_are_taken_when_there_is_room_and_outputs_given_as_they_end(target: Any) -> None:
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
    target: Any, drafter: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
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
    order = [len(ids) for _, ids in in_order_of_length(requests, 4)]
    assert order == [5, 3, 2, 1, 7, 7, 8, 9, 4]
    assert list(in_order_of_length(requests, 1)) == requests


def test_nothing_gives_nothing(target: Any) -> None:
    for num_draft in (4, "auto"):
        decoder = SpeculativeDecoder(target, "lookup", num_draft=num_draft)  # type: ignore
        assert decoder.generate_batch([]) == []


def test_seconds_are_those_of_a_row(target: Any) -> None:
    began = time.perf_counter()
    outputs = engine(target, "model").generate_batch(prompts(12), batch_size=4, max_tokens=13)
    total = time.perf_counter() - began
    for stats in (o.stats for o in outputs):
        assert 0 < stats.seconds <= total


@pytest.mark.parametrize("size", [0, -1, 1.5, 2**70])
def test_a_batch_size_out_of_range_is_refused(target: Any, size: Any) -> None:
    with pytest.raises(ValueError, match=f"batch_size must be an integer .*, got {size}"):
        engine(target, "none").generate_batch(prompts(2), batch_size=size)


@pytest.mark.parametrize("index", [-1, "a", 1.5, None])
def test_an_index_that_is_none_is_refused(target: Any, index: Any) -> None:
    with pytest.raises(ValueError, match=f"index must be an integer of at least 0, got {index!r}"):
        list(engine(target, "none").iter_batch([(index, [3, 1])]))


def test_prompts_may_share_an_index(target: Any) -> None:
    decoder = engine(target, "model")
    alone = [decoder.generate(p, max_tokens=13).tokens for p in prompts(6)]
    same = decoder.iter_batch(((0, p) for p in prompts(6)), batch_size=3, max_tokens=13)
    assert sorted(o.tokens for _, o in same) == sorted(alone)


def test_prompts_are_encoded_ahead_until_they_are_many_tokens(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, sizes = type(target.start([[3, 1]])[0]), []
    encode = kind.encode

    def counted(self: Any, sources: Any) -> Any:
        sizes.append(len(sources))
        return encode(self, sources)

    monkeypatch.setattr(kind, "encode", counted)
    decoder = engine(target, "lookup")
    for tokens, largest in ((10_000, 5), (1, 1)):
        monkeypatch.setattr("speculative_t5.decoding.loop.AHEAD_TOKENS", tokens)
        sizes.clear()
        decoder.generate_batch(prompts(20), batch_size=5, max_tokens=13)
        assert (sum(sizes), max(sizes)) == (15, largest)


def test_a_schedule_is_told_of_rows_that_were_drafted_for_in_full(target: Any) -> None:
    told: list[Outcome] = []

    class Told(FixedSchedule):
        def observe(self, outcome: Outcome) -> None:
            told.append(outcome)

    drafter = ModelDrafter(target, Sampler(), 20)  # whose every token is accepted
    plan = Plan(drafter, Told(4), Verifier(Sampler()), max_tokens=13)
    rows = Counter(r.index for r in decode(target, enumerate(prompts(30)), plan, batch_size=6))
    assert len(set(rows.values())) > 1
    assert any(len(outcome.num_drafted) < 6 for outcome in told[:8])
    for outcome in told:
        assert set(outcome.num_drafted) == {outcome.num_draft}
