"""Rows with options of their own, which join and leave, each as if alone; and how they wait."""

import random
from functools import cache
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding import counters
from speculative_t5.decoding.logits import NOTHING_LEFT
from speculative_t5.decoding.loop import Batch, Request, decode
from speculative_t5.decoding.results import Round
from speculative_t5.generation import GenerationOptions

import mlx.core as mx
import pytest
from conftest import PAIRS
from test_decoder import DRAFTERS, facts, make_decoder, prompts

SAMPLED = {"temperature": 1.0, "seed": 7}
WAYS: list[dict[str, Any]] = [
    {},
    SAMPLED,
    {"temperature": 0.6, "seed": 8, "top_k": 8, "top_p": 0.9},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_tokens": 4},
    {"temperature": 1.4, "seed": 9, "logit_bias": {4: 1.5, 1: -2.0}, "max_tokens": 7},
    {"speculative": False},
    SAMPLED | {"speculative": False, "stop_token_ids": [5, 6, 7, 8, 9, 10]},
    {"max_tokens": 1},
    {"top_p": 0.5},  # which changes nothing
]
Finished = dict[int, tuple[Any, ...]]
COUNT, HOPELESS = 18, 99  # requests, and the index of one that nothing can follow


def options_of(number: int) -> dict[str, Any]:
    return {"max_tokens": 13} | WAYS[number % len(WAYS)]


def requests(decoder: SpeculativeDecoder, count: int = COUNT) -> list[Request]:
    return [
        request
        for number, prompt in enumerate(prompts(count))
        for request in decoder.engine.requests(
            [(number, prompt)], GenerationOptions(**options_of(number))
        )
    ]


@cache
def alone(kind: str, drafter: str, delta: float = 0.0) -> Finished:
    """Return what each request gives without neighbours."""
    decoder, found = make_decoder(kind, drafter, delta=delta), {}
    for number, prompt in enumerate(prompts(COUNT)):
        each = decoder.iter_batch([(number, prompt)], batch_size=1, **options_of(number))
        ((_, out),) = each
        found[number] = facts(out.tokens, out.finish_reason, out.stats)
    return found


def finished(done: Round) -> tuple[Any, ...]:
    return facts(done.output, done.finish_reason, done.stats)


ALONE = [("t5", drafter, 0.0) for drafter in DRAFTERS]
ALONE += [("qwen3", "none", 0.0), ("sharing", "both", 0.0), ("t5", "model", 0.4)]


@pytest.mark.parametrize(("kind", "drafter", "delta"), ALONE)
def test_rows_do_not_depend_on_their_neighbours_options(
    kind: str, drafter: str, delta: float
) -> None:
    """Leniency is another rule for greedy rows than for sampled ones."""
    decoder, expected = make_decoder(kind, drafter, delta=delta), alone(kind, drafter, delta)
    assert {reason for _, reason, *_ in expected.values()} == {"eos", "length", "stop"}
    for batch_size in (1, 7) if drafter == "none" else (7,):
        rounds = decode(
            decoder.model, requests(decoder), decoder.engine.plan(), batch_size=batch_size
        )
        assert {done.index: finished(done) for done in rounds if done.finish_reason} == expected


def come_and_go(decoder: SpeculativeDecoder, seed: int) -> tuple[Finished, dict[int, list[int]]]:
    """Let requests join and leave at random.

    Returns:
        The outputs that ended, and the tokens of those that were ended before.
    """
    rng, waiting = random.Random(seed), requests(decoder)
    hopeless = GenerationOptions(suppress_tokens=range(20), temperature=seed)
    waiting += decoder.engine.requests([(HOPELESS, [5, 1])], hopeless)
    rng.shuffle(waiting)
    batch = Batch(decoder.model, decoder.engine.plan())
    ended: Finished = {}
    tokens: dict[int, list[int]] = {}
    while waiting or batch.rows:
        batch.end([row for row in batch.rows if rng.random() < 0.03])
        space = 6 - sum(not row.ended for row in batch.rows)
        count = rng.randint(0, space)
        joining, waiting = waiting[:count], waiting[count:]
        batch.add(joining)
        assert len(batch.rows) <= 6 and not any(row.ended for row in batch.rows)
        for done in batch.round() if batch.rows else []:
            assert (done.error == NOTHING_LEFT) == (done.index == HOPELESS)
            tokens.setdefault(done.index, []).extend(done.tokens)
            if done.finish_reason:
                ended[done.index] = finished(done)
                del tokens[done.index]
    return ended, tokens


@pytest.mark.parametrize(
    ("kind", "drafter"), [("t5", "both"), ("qwen3", "both"), ("sharing", "both")]
)
def test_rows_that_join_and_leave_are_as_they_are_alone(kind: str, drafter: str) -> None:
    decoder, expected = make_decoder(kind, drafter), alone(kind, drafter)
    left: dict[int, list[int]] = {}
    for seed in range(2):
        ended, gone = come_and_go(decoder, seed)
        assert len(ended) + len(gone) >= len(expected) - 5  # some end before their first round
        assert ended == {number: expected[number] for number in ended}
        left |= gone
        assert gone.pop(HOPELESS, []) == [], "it ends alone"
        for number, tokens in gone.items():
            assert tokens == expected[number][0][: len(tokens)]
    assert any(left.values()), "some should leave in the middle of an output"


READERS = ("tolist", "item", "__bool__", "__int__", "__array__")
WAITS = {"none": 1, "model": 1, "lookup": 1, "both": 2}  # the lookup reads the model's draft


@pytest.fixture
def device_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls by which Python has waited for values on the device."""
    seen: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            seen.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    for name in READERS:
        watch(mx.array, name)
    watch(mx, "eval")
    return seen


@pytest.mark.parametrize("drafter", WAITS)
@pytest.mark.parametrize("kind", PAIRS)
def test_a_round_waits_once(kind: str, drafter: str, device_reads: list[str]) -> None:
    """For unlike rows, too, for greedy ones alone, and for some that do not draft."""
    decoder = make_decoder(kind, drafter)
    unlike = requests(decoder, 7)
    for own in (unlike[:1], unlike[:5], unlike[5:]):
        batch = Batch(decoder.model, decoder.engine.plan())
        batch.add(own)
        batch.round()  # which also encodes the draft's sources
        batch.drop()
        assert batch.rows
        while batch.rows:
            before = counters.syncs, len(device_reads)
            # The last rounds have no room for a draft.
            waits = WAITS[drafter] if any(row.limit for row in batch.rows) else 1
            batch.round()
            assert (counters.syncs - before[0], len(device_reads) - before[1]) == (waits, waits)
            batch.drop()
