"""Rows with options of their own, which join and leave, each as if alone; and how they wait."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding import read, syncs
from speculative_t5.decoding.drafters import ModelDrafter
from speculative_t5.decoding.logits import NOTHING_LEFT
from speculative_t5.decoding.loop import Batch, Request, decode
from speculative_t5.decoding.results import Round
from speculative_t5.generation import GenerationOptions

import mlx.core as mx
import pytest
from conftest import PAIRS, VARIED, tiny_pair
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


def options_of(number: int) -> dict[str, Any]:
    return {"max_tokens": 13} | WAYS[number % len(WAYS)]


def requests(decoder: SpeculativeDecoder, count: int = 27) -> list[Request]:
    made: list[Request] = []
    for each in enumerate(prompts(count)):
        made += decoder.requests([each], GenerationOptions(**options_of(each[0])))
    return made


@cache
def alone(kind: str, drafter: str, delta: float = 0.0) -> Finished:
    """Return what each request gives without neighbours."""
    decoder, found = make_decoder(kind, drafter, delta=delta), {}
    for number, prompt in enumerate(prompts(27)):
        each = decoder.iter_batch([(number, prompt)], batch_size=1, **options_of(number))
        ((_, out),) = each
        found[number] = facts(out.tokens, out.finish_reason, out.stats)
    return found


def finished(done: Round) -> tuple[Any, ...]:
    return facts(done.output, done.finish_reason, done.stats)


ALL = [("t5", drafter) for drafter in DRAFTERS]
ALL += [("qwen3", "none"), ("qwen3", "both"), ("sharing", "model"), ("sharing", "both")]
ALL += [(kind, "both") for kind in VARIED if kind not in PAIRS]


@pytest.mark.parametrize(("kind", "drafter"), ALL)
def test_rows_do_not_depend_on_their_neighbours_options(kind: str, drafter: str) -> None:
    decoder = make_decoder(kind, drafter)
    expected = alone(kind, drafter)
    assert {reason for _, reason, *_ in expected.values()} == {"eos", "length", "stop"}
    rounds = decode(decoder.model, requests(decoder), decoder.plan(), batch_size=7)
    assert {done.index: finished(done) for done in rounds if done.finish_reason} == expected


@pytest.mark.parametrize("kind", PAIRS)
def test_lenient_rows_do_not_depend_on_their_neighbours_options(kind: str) -> None:
    """Leniency is another rule for greedy rows than for sampled ones."""
    decoder = make_decoder(kind, "model", delta=0.4)
    rounds = decode(decoder.model, requests(decoder), decoder.plan(), batch_size=7)
    assert {d.index: finished(d) for d in rounds if d.finish_reason} == alone(kind, "model", 0.4)


def come_and_go(decoder: SpeculativeDecoder, seed: int) -> tuple[Finished, dict[int, list[int]]]:
    """Let requests join and leave at random.

    Returns:
        The outputs that ended, and the tokens of those that were ended before.
    """
    rng, waiting = random.Random(seed), requests(decoder)
    rng.shuffle(waiting)
    batch = Batch(decoder.model, decoder.plan())
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
            tokens.setdefault(done.index, []).extend(done.tokens)
            if done.finish_reason:
                ended[done.index] = finished(done)
                del tokens[done.index]
    return ended, tokens


@pytest.mark.parametrize(("kind", "drafter"), ALL)
def test_rows_that_join_and_leave_are_as_they_are_alone(kind: str, drafter: str) -> None:
    decoder, expected = make_decoder(kind, drafter), alone(kind, drafter)
    left: dict[int, list[int]] = {}
    for seed in range(2):
        ended, gone = come_and_go(decoder, seed)
        assert len(ended) + len(gone) >= len(expected) - 5  # some end before their first round
        assert ended == {number: expected[number] for number in ended}
        left |= gone
        for number, tokens in gone.items():
            assert tokens == expected[number][0][: len(tokens)]
    assert any(left.values()), "some should leave in the middle of an output"


@pytest.mark.parametrize("kind", PAIRS)
def test_a_row_that_nothing_can_follow_ends_alone(kind: str) -> None:
    decoder = make_decoder(kind, "model")
    expected = {number: alone(kind, "model")[number] for number in range(5)}
    own = requests(decoder, 5)
    for temperature in (0.0, 1.0):
        forbidding = GenerationOptions(suppress_tokens=range(20), temperature=temperature)
        (hopeless,) = decoder.requests([(99, [5, 1])], forbidding)
        batch = Batch(decoder.model, decoder.plan())
        batch.add([own[0], hopeless, *own[1:]])
        errors, ended = {}, {}
        while batch.rows:
            for done in batch.round():
                if done.error:
                    errors[done.index] = done.error
                    assert not done.tokens and done.finish_reason is None
                elif done.finish_reason:
                    ended[done.index] = finished(done)
            batch.drop()
        assert errors == {99: NOTHING_LEFT}
        assert ended == expected
        with pytest.raises(ValueError, match=NOTHING_LEFT):
            list(decode(decoder.model, [hopeless], decoder.plan(), batch_size=1))


@pytest.mark.parametrize(
    ("drafter", "waits"), [("none", 1), ("model", 1), ("lookup", 1), ("both", 2)]
)
@pytest.mark.parametrize("kind", PAIRS)
def test_a_round_of_unlike_rows_waits_once(kind: str, drafter: str, waits: int) -> None:
    decoder = make_decoder(kind, drafter)
    batch = Batch(decoder.model, decoder.plan())
    for request in requests(decoder, 5):
        batch.add([request])
        before = syncs()
        batch.round()
        assert syncs() - before == waits


def recorded(method: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def record(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(method.__name__)
        return method(self, *arguments, **options)

    return record


@pytest.mark.parametrize("kind", PAIRS)
def test_rows_that_do_not_draft_alone_cost_no_draft(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make_decoder(kind, "both")
    calls: list[str] = []
    for name in ("_best", "_chosen"):
        monkeypatch.setattr(ModelDrafter, name, recorded(getattr(ModelDrafter, name), calls))
    own = requests(decoder)
    batch = Batch(decoder.model, decoder.plan())
    batch.add([own[5], own[6]])
    for done in batch.round():
        assert done.stats.last_round == (0, 0, 0)
    assert not calls
    batch.add([own[1]])
    drafted = {done.index: done.stats.last_round[1] for done in batch.round()}
    assert calls == ["_chosen"]
    assert drafted[1] > 0 and not drafted.get(5, 0) and not drafted.get(6, 0)


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


@pytest.mark.parametrize(("kind", "temperature"), [("t5", 0.0), *((kind, 1.0) for kind in PAIRS)])
@pytest.mark.parametrize("drafter", WAITS)
def test_a_round_waits_once(
    kind: str, drafter: str, temperature: float, device_reads: list[str]
) -> None:
    target, small = tiny_pair(kind, vocab_size=20, layers=2, seed=3)
    draft = small if drafter in ("model", "both") else None
    decoder = SpeculativeDecoder(target, draft, num_draft=3, lookup=drafter in ("lookup", "both"))
    each = set()
    for index in range(3):
        options = GenerationOptions(max_tokens=20, temperature=temperature)
        requests = decoder.requests([(index, [5, 9, 7, 5, 1])], options)
        rounds = decode(target, requests, decoder.plan(), batch_size=1)
        totals = [(syncs(), len(device_reads)) for _ in rounds]
        # The first round also encodes the draft's source; the last may have no room for a draft.
        each |= {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(totals[:-1])}
    assert each == {(WAITS[drafter], WAITS[drafter])}


def test_other_reads_are_seen(device_reads: list[str]) -> None:
    before = syncs()
    mx.array([[1]]).item()
    assert (syncs() - before, device_reads) == (0, ["item"])


def test_syncs_are_counted_by_thread() -> None:
    before, ids = syncs(), mx.array([[3, 4]])
    other = threading.Thread(target=read, args=(mx.array([[1]]),))
    other.start()
    other.join()
    assert read(ids) == [[3, 4]] and syncs() - before == 1
