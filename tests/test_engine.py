"""Batches: each row's output is the same as without its neighbours."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from speculative_t5 import Generation, SpeculativeDecoder
from speculative_t5.decoding import loop
from speculative_t5.decoding.draft_length import FixedSchedule, Outcome
from speculative_t5.decoding.drafters import ModelDrafter
from speculative_t5.decoding.loop import Plan, Request, RowOptions, decode, in_order_of_length
from speculative_t5.decoding.results import Stats
from speculative_t5.decoding.verify import Verifier

import numpy as np
import pytest
from conftest import EOS, KINDS, VARIED, Watched, tiny_pair

SAMPLED = {"temperature": 1.0, "seed": 7}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "filtered": SAMPLED | {"top_k": 8, "top_p": 0.9},
    "penalized": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_tokens": 4},
}
OPTIONS["penalized and sampled"] = SAMPLED | OPTIONS["penalized"]


@cache
def models(kind: str) -> tuple[Any, Any]:
    """Return a target whose outputs end with EOS or at the limit, and a draft."""
    return tiny_pair(kind, noise=0.2, vocab_size=20, layers=2, seed=VARIED[kind])


def make_decoder(kind: str, drafter: str, **options: Any) -> SpeculativeDecoder:
    target, draft = models(kind)
    return SpeculativeDecoder(
        target,
        draft if drafter in ("model", "both") else None,
        lookup=drafter in ("lookup", "both"),
        **{"num_draft": 4} | options,
    )


def prompts(count: int = 16) -> list[list[int]]:
    rngs = map(np.random.default_rng, range(count))
    return [[*rng.integers(2, 20, rng.integers(1, 40)).tolist(), EOS] for rng in rngs]


def facts(tokens: list[int], reason: str | None, stats: Stats) -> tuple[Any, ...]:
    """All that an output is and cost, times left out."""
    return tokens, reason, stats.num_draft, stats.num_drafted, stats.num_accepted


def without_times(outputs: list[Generation]) -> list[tuple[Any, ...]]:
    return [facts(output.tokens, output.finish_reason, output.stats) for output in outputs]


DRAFTERS = ["model", "lookup", "both", "none"]
BATCHED = [("t5", "sampled", "token", drafter) for drafter in DRAFTERS]
BATCHED += [("t5", "greedy", "auto", "both"), ("t5", "filtered", "block", "model")]
BATCHED += [("qwen3", "filtered", "block", "none"), ("qwen3", "greedy", "auto", "both")]
BATCHED += [("sharing", "greedy", "auto", "model"), ("sharing", "filtered", "block", "model")]
BATCHED += [("t5", "penalized", "auto", "both"), ("qwen3", "penalized", "auto", "model")]
BATCHED += [("sharing", "penalized and sampled", "block", "both")]
# The other kinds share Qwen3's session: one case each.
BATCHED += [(kind, "sampled", "block", "both") for kind in VARIED if kind not in KINDS]


@pytest.mark.parametrize(("kind", "way", "rule", "drafter"), BATCHED)
def test_outputs_do_not_depend_on_the_batch_size(
    kind: str, way: str, rule: Any, drafter: str
) -> None:
    decoder = make_decoder(kind, drafter, verify=rule)
    options = OPTIONS[way] | {"max_tokens": 13}
    alone = decoder.generate_batch(prompts(), batch_size=1, **options)
    assert {o.finish_reason for o in alone} == {"eos", "length"}
    assert len({o.stats.rounds for o in alone}) > 2, "rows should end at different times"
    if drafter != "none":
        assert len({n for o in alone for n in o.stats.num_accepted}) > 1, "and accept differently"
    batch = decoder.generate_batch(prompts(), batch_size=6, **options)
    assert without_times(batch) == without_times(alone)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_round_reads_no_more_of_a_long_output(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make_decoder("t5", drafter)
    target, start = decoder.model, type(decoder.model).start
    started: list[Watched] = []

    def watched(self: Any, prompts: Any, **options: Any) -> Any:
        session, contexts = start(self, prompts, **options)
        if self is target:
            contexts = [Watched(context) for context in contexts]
            started.extend(contexts)
        return session, contexts

    monkeypatch.setattr(type(target), "start", watched)
    endless = dataclasses.replace(target.info, eos_token_ids=frozenset())
    monkeypatch.setattr(target, "info", endless)
    rounds = decoder.stream([5, 6, 7, EOS], max_tokens=120)
    reads = [started[0].count for _ in rounds][:-1]  # the last round copies the output
    each = [later - earlier for earlier, later in itertools.pairwise(reads)]
    assert len(each) > 5 and max(each) < 20, each


def test_a_row_samples_by_its_index() -> None:
    decoder, options = make_decoder("t5", "model"), SAMPLED | {"max_tokens": 13}
    batch = decoder.generate_batch(prompts(12), **options)
    assert without_times([decoder.generate(prompts()[0], **options)]) == without_times(batch[:1])
    numbered = list(enumerate(prompts(12)))
    odd = decoder.iter_batch(numbered[1::2], batch_size=4, **options)
    assert {i: o.tokens for i, o in odd} == {i: batch[i].tokens for i in range(1, 12, 2)}
    same = decoder.generate_batch([prompts()[0]] * 8, **options)
    assert len({tuple(o.tokens) for o in same}) > 1, "equal prompts should get other samples"
    first = [o for _, o in decoder.iter_batch([(0, prompts()[0])] * 3, batch_size=2, **options)]
    assert without_times(first) == without_times(batch[:1]) * 3, "prompts may share an index"
    assert decoder.generate_batch([]) == []


def test_prompts_are_taken_when_there_is_room_and_outputs_come_as_they_end() -> None:
    taken = 0

    def requested() -> Iterator[list[int]]:
        nonlocal taken
        for prompt in prompts(60):
            taken += 1
            yield prompt

    decoder = make_decoder("t5", "model")
    ended = []
    for index, _ in decoder.iter_batch(enumerate(requested()), batch_size=4, max_tokens=13):
        ended.append(index)
        assert taken <= len(ended) + 4 + 4 + 16, "rows, prompts encoded ahead, and a window"
    assert sorted(ended) == list(range(60))
    assert ended != sorted(ended), "some should overtake others"


def test_prompts_begin_by_length_a_window_at_a_time() -> None:
    requests = [(i, [0] * n) for i, n in enumerate([3, 5, 1, 2, 9, 8, 7, 7, 4])]
    order = [len(ids) for _, ids in in_order_of_length(requests, 4)]
    assert order == [5, 3, 2, 1, 7, 7, 8, 9, 4]
    assert list(in_order_of_length(requests, 1)) == requests


@pytest.mark.parametrize("size", [0, 1.5])
def test_batch_sizes_and_indices_out_of_range_are_refused(size: Any) -> None:
    decoder = make_decoder("t5", "none")
    with pytest.raises(ValueError, match=f"batch_size must be an integer .*, got {size}"):
        decoder.generate_batch(prompts(2), batch_size=size)
    for index in (-1, "a", None):
        with pytest.raises(ValueError, match=f"index must be .* at least 0, got {index!r}"):
            list(decoder.iter_batch([(index, [3, 1])]))


@pytest.mark.parametrize(("tokens", "largest"), [(10_000, 5), (1, 1)])
def test_prompts_are_encoded_together_up_to_a_number_of_tokens(
    tokens: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make_decoder("t5", "lookup")
    session, sizes = type(decoder.model.start([[3, 1]])[0]), []
    encode = session.encode

    def counted(self: Any, sources: Any) -> Any:
        sizes.append(len(sources))
        return encode(self, sources)

    monkeypatch.setattr(session, "encode", counted)
    monkeypatch.setattr(loop, "PREFETCH_TOKENS", tokens)
    decoder.generate_batch(prompts(), batch_size=5, max_tokens=13)
    assert (sum(sizes), max(sizes)) == (11, largest)


def test_a_schedule_observes_only_rows_that_were_drafted_for_in_full() -> None:
    seen: list[Outcome] = []

    class Recording(FixedSchedule):
        def observe(self, outcome: Outcome) -> None:
            seen.append(outcome)

    target, _ = models("t5")
    drafter = ModelDrafter(target, 20)  # whose every token is accepted
    plan = Plan(drafter, Recording(4), Verifier())
    options = RowOptions(max_tokens=13)
    requests = [Request(i, prompt, options) for i, prompt in enumerate(prompts(30))]
    rows = Counter(r.index for r in decode(target, requests, plan, batch_size=6))
    assert len(set(rows.values())) > 1
    assert any(len(outcome.num_drafted) < 6 for outcome in seen[:8])
    for outcome in seen:
        assert set(outcome.num_drafted) == {outcome.num_draft}
