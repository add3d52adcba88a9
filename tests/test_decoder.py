"""Whole outputs of tiny random models: samples, seeds, indices, limits, and the order of prompts.

test_exact.py and test_exact_loop.py prove the rules by enumeration. Sampling is for what
enumeration does not see: keys, and draft lengths that change.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from speculative_t5 import Generation, SpeculativeDecoder
from speculative_t5.decoding import loop
from speculative_t5.decoding.draft import Draft
from speculative_t5.decoding.draft_length import FixedSchedule, Schedule
from speculative_t5.decoding.drafters import EmptyDrafter, LookupDrafter
from speculative_t5.decoding.loop import Plan, Request, RowOptions, decode, in_order_of_length
from speculative_t5.decoding.model_drafter import ModelDrafter
from speculative_t5.decoding.outcomes import Outcome
from speculative_t5.decoding.results import Stats
from speculative_t5.decoding.sampling import Groups, Sampler
from speculative_t5.decoding.verify import Verifier
from speculative_t5.generation import GenerationOptions

import mlx.core as mx
import numpy as np
import pytest
from conftest import EOS, KINDS, PAIRS, VARIED, output_distribution, tiny_pair, unrelated_pair

SAMPLED = {"temperature": 1.0, "seed": 7}


@cache
def models(kind: str) -> tuple[Any, Any]:
    """Return a target whose outputs end with EOS or at the limit, and a draft."""
    return tiny_pair(kind, noise=0.2, vocab_size=20, layers=2, seed=VARIED[kind])


def with_drafter(pair: Any, drafter: str, **options: Any) -> SpeculativeDecoder:
    target, draft = pair
    small = draft if drafter in ("model", "both") else None
    return SpeculativeDecoder(target, small, lookup=drafter in ("lookup", "both"), **options)


def make_decoder(kind: str, drafter: str, **options: Any) -> SpeculativeDecoder:
    return with_drafter(models(kind), drafter, **{"num_draft": 4} | options)


def prompts(count: int = 16) -> list[list[int]]:
    rngs = map(np.random.default_rng, range(count))
    return [[*rng.integers(2, 20, rng.integers(1, 40)).tolist(), EOS] for rng in rngs]


def facts(tokens: list[int], reason: str | None, stats: Stats) -> tuple[Any, ...]:
    """All that an output is and cost, times left out."""
    return tokens, reason, stats.num_draft, stats.num_drafted, stats.num_accepted


def without_times(outputs: list[Generation]) -> list[tuple[Any, ...]]:
    return [facts(output.tokens, output.finish_reason, output.stats) for output in outputs]


DRAFTERS = ["model", "lookup", "both", "none"]

# The expected distance is below sqrt(15 / 2,500) / 2 = 0.039 for outputs of up to 3 tokens, of
# which there are 15, and below sqrt(63 / 8,000) / 2 = 0.044 for those of up to 5.
TOLERANCE = 0.055


class FollowingCounts(Schedule):
    """Lengths from 0 to 4 that depend on how many tokens the last round accepted."""

    def __init__(self) -> None:
        self._num_draft = 3

    def next(self, remaining: int, rows: int = 1) -> int:
        return min(self._num_draft, remaining - 1)

    def observe(self, outcome: Outcome) -> None:
        self._num_draft = sum(outcome.num_accepted) % 5


@pytest.mark.parametrize(
    ("drafter", "verify", "schedule", "max_tokens", "count"),
    [
        ("none", "auto", FixedSchedule(0), 3, 2500),
        ("model", "token", FixedSchedule(2), 3, 2500),
        ("both", "block", FollowingCounts(), 5, 8000),
        ("model", "coupled", FollowingCounts(), 5, 8000),
    ],
    ids=["none", "model", "both", "coupled"],
)
def test_sampled_outputs_follow_the_targets_distribution(
    drafter: str, verify: Any, schedule: Schedule, max_tokens: int, count: int
) -> None:
    pair, prompt = unrelated_pair("t5", vocab_size=3), [2, 2, 1]
    decoder = with_drafter(pair, drafter, verify=verify)
    options = GenerationOptions(max_tokens=max_tokens, temperature=1.0)
    requests = decoder.engine.requests(enumerate([prompt] * count), options)
    plan = replace(decoder.engine.plan(), schedule=schedule)
    rounds = decode(decoder.model, requests, plan, batch_size=500)
    outputs = [(*r.output, *[EOS] * (r.finish_reason == "eos")) for r in rounds if r.finish_reason]
    exact = output_distribution(decoder.model, prompt, max_tokens, options.sampler)
    assert len(outputs) == count and set(outputs) <= exact.keys()
    seen = Counter(outputs)
    assert sum(abs(seen[output] / count - mass) for output, mass in exact.items()) / 2 < TOLERANCE


class Guesses(EmptyDrafter):
    """Drafts the same token for each row."""

    def propose(self, contexts: Any, num_draft: int, groups: Groups, keys: Any) -> Draft:
        lengths = [num_draft] * len(contexts)
        return Draft(mx.full((len(contexts), num_draft), 4, dtype=mx.int32), lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_what_derives_from_the_empty_drafter_may_draft(kind: str) -> None:
    decoder = SpeculativeDecoder(models(kind)[0], "lookup", num_draft=2)
    plan, options = (
        replace(decoder.engine.plan(), drafter=Guesses()),
        GenerationOptions(max_tokens=24),
    )
    (request,) = decoder.engine.requests([(0, [10, 1])], options)
    *_, done = decode(decoder.model, [request], plan, batch_size=1)
    plain = decoder.generate([10, 1], max_tokens=24, speculative=False)
    assert done.output == plain.tokens and done.stats.drafted > 0


@pytest.mark.parametrize("max_tokens", [1, 7])
def test_max_tokens_is_exact_and_cut_drafts_are_counted(max_tokens: int) -> None:
    target, _ = models("t5")
    decoder = SpeculativeDecoder(target, target, num_draft=4)
    whole = decoder.generate([10, 1], max_tokens=15)
    sampled = decoder.generate([10, 1], max_tokens=15, temperature=0.7, suppress_tokens=[EOS])
    for stats in (whole.stats, sampled.stats):
        assert (stats.acceptance_rate, stats.rounds) == (1, 3), "the target is the draft"
    out = decoder.generate([10, 1], max_tokens=max_tokens)
    assert (out.tokens, out.finish_reason) == (whole.tokens[:max_tokens], "length")
    assert out.stats.emitted == max_tokens and out.stats.accepted <= out.stats.drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", PAIRS)
def test_a_draft_limited_to_the_first_ids_proposes_no_others(kind: str, temperature: float) -> None:
    few, prompt = 8, [5, 9, 1]
    decoder = SpeculativeDecoder(*models(kind), num_draft=3, draft_vocab=few)
    drafter = decoder.engine.plan().drafter
    drafter.start([prompt])
    keys = mx.array([[[1, i] for i in range(3)]], dtype=mx.uint32) if temperature else None
    proposed = drafter.propose([[0]], 3, Groups([Sampler(temperature)]), keys)
    assert max(proposed.tokens.tolist()[0]) < few
    if proposed.probs is not None:
        assert mx.all(proposed.probs[..., few:] == 0) and proposed.probs.shape[-1] == 20


def test_a_row_samples_by_its_seed_and_index() -> None:
    decoder, options = make_decoder("t5", "model"), SAMPLED | {"max_tokens": 13}
    batch = decoder.generate_batch(prompts(12), **options)
    assert without_times([decoder.generate(prompts()[0], **options)]) == without_times(batch[:1])
    assert decoder.generate(prompts()[0], **options | {"seed": 8}).tokens != batch[0].tokens
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


@pytest.mark.parametrize("num_draft", [0, 3])
def test_a_schedule_thinks_in_the_wait_of_each_round(
    num_draft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Thinking(FixedSchedule):
        def think(self, rows: int) -> None:
            events.append(f"thinks for {rows}")

        def observe(self, outcome: Outcome) -> None:
            events.append("observes")

    monkeypatch.setattr(mx, "async_eval", lambda array: events.append("begins"))
    target, _ = models("t5")
    plan = Plan(LookupDrafter(target.info), Thinking(num_draft), Verifier())
    requests = [Request(i, prompt, RowOptions(max_tokens=9)) for i, prompt in enumerate(prompts(2))]
    assert [*decode(target, requests, plan, batch_size=2)]
    thoughts = [i for i, event in enumerate(events) if event.startswith("thinks for")]
    assert len(thoughts) == events.count("observes") > 1 and "thinks for 2" in events
    assert {(events[i - 1], events[i + 1]) for i in thoughts} == {("begins", "observes")}


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
