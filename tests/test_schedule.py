"""Draft lengths: what a schedule expects, learns, chooses and keeps."""

import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from speculative_t5 import SpeculativeDecoder, device
from speculative_t5.decoding import decode, loop
from speculative_t5.decoding.draft_length import (
    FIRST_ROUNDS,
    LENGTHS,
    SHARES,
    AdaptiveSchedule,
    FixedSchedule,
    SplitSchedule,
    cache_folder,
    stored,
)
from speculative_t5.decoding.outcomes import MAX_DRAFT, Costs, Counts, Outcome
from speculative_t5.generation import GenerationOptions

import numpy as np
import pytest
from conftest import tiny_pair
from scripted import Lengths
from simulated_devices import CASES, Case, simulate


def outcome(num_draft: int, accepted: Sequence[int], drafted: Sequence[int] = ()) -> Outcome:
    """Return a round with costs of 1 for a pass over one token, and 0.1 for each token more."""
    drafted = drafted or [num_draft] * len(accepted)
    length = 1 + max(drafted)
    seconds = 1 + 0.1 * (length - 1)
    return Outcome(num_draft, drafted, accepted, 0, seconds, len(accepted), length)


def taught(schedule: AdaptiveSchedule, accepted: int, rounds: int, rows: int = 1) -> list[int]:
    """Run rounds of which up to so many tokens are accepted, and return the lengths."""
    lengths = []
    for _ in range(rounds):
        lengths.append(schedule.next(1000, rows))
        schedule.observe(outcome(lengths[-1], [min(accepted, lengths[-1])] * rows))
    return lengths


@pytest.mark.parametrize(
    ("asked", "drafted", "accepted", "expected"),
    [
        (6, 6, 3, {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (3, 1), 6: (3, 1)}),  # the fourth never is
        (8, 2, 2, {8: (2, 0)}),  # a drafter that finds no more than two
    ],
)
def test_positions_have_rates_of_their_own(
    asked: int, drafted: int, accepted: int, expected: dict[int, tuple[int, int]]
) -> None:
    counts = Counts()
    counts.add([outcome(asked, [accepted] * 10_000, [drafted] * 10_000)])
    accepts, chances = counts.expected()
    for length, found in expected.items():
        assert (accepts[length], chances[length]) == pytest.approx(found, abs=0.05)


def test_what_is_not_found_is_told_from_what_is_rejected() -> None:
    """A lookup finds something in half of the rounds, and then nearly all of it is right."""
    counts = Counts()
    counts.add([outcome(8, [8] * 5000 + [0] * 5000, [8] * 5000 + [0] * 5000)])
    accepts, chances = counts.expected()
    assert accepts[8] == pytest.approx(4, rel=0.01) and chances[8] == pytest.approx(0.5, rel=0.01)
    assert accepts[MAX_DRAFT] > 25, "longer drafts are expected to go on like this"


def test_costs_follow_the_machine_and_keep_their_ratios() -> None:
    costs = Costs()
    for speed in (0.01, 0.02):
        for _ in range(40):
            costs.observe([(n, speed * cost) for n, cost in ((0, 1.0), (5, 2.0), (9, 2.5))])
        expected, _ = costs.curves()
        np.testing.assert_allclose(expected[[5, 9]] / expected[0], [2, 2.5], rtol=0.02)
        assert costs.scale == pytest.approx(speed / expected[0], rel=0.05)
    for _ in range(60):
        costs.observe([(5, 0.08)])  # the machine is busy, and no other length is in use
    expected, _ = costs.curves()
    assert expected[5] / expected[0] == pytest.approx(2, rel=0.05)
    assert expected[5] < expected[7] < expected[9] < expected[13]


def test_the_least_cost_follows_from_the_known_ones() -> None:
    """A longer pass costs no less than a shorter one, and no more than several of them."""
    costs = Costs({5: (2.0, 1e9), 9: (3.0, 1e9)})
    expected, least = costs.curves()
    known = {0: 2 / 5, 1: 2 / 5, 3: 6 / 5, 4: 8 / 5, 6: 2.0, 7: 7 / 3, 20: 3.0}
    for length, cost in known.items():
        assert least[length] == pytest.approx(cost), length
    assert (least <= expected + 1e-9).all()


def test_asking_for_a_draft_takes_time_even_if_none_is_found() -> None:
    schedule = AdaptiveSchedule()
    for _ in range(200):
        num_draft = schedule.next(1000)
        seconds = 1.0 if num_draft == 0 else 1.1
        schedule.observe(Outcome(num_draft, [0], [0], 0, seconds))
    costs = schedule._costs[1]
    assert costs.cost(1) / costs.cost(0) == pytest.approx(1.1, rel=0.01)
    assert LENGTHS[schedule._best[1][0]] == 0


def test_a_length_is_as_well_known_as_it_was_compared() -> None:
    """Rounds of one length alone say nothing about it."""
    costs = Costs()
    costs.observe([(1, 0.01)] * 3 + [(5, 0.02)] + [(1, 0.01)] * 3)
    costs.observe([(5, 0.02)] * 10)
    _, before, _ = costs.known[5]
    costs.observe([(5, 0.02)] * 10)
    assert costs.known[5][1] == before
    costs.observe([(5, 0.02)] * 3 + [(1, 0.01)] + [(5, 0.02)] * 3)
    assert costs.known[5][1] > before, "the usual length is compared with others, too"


def test_a_look_is_repeated_once_if_its_time_says_nothing() -> None:
    schedule, lengths = AdaptiveSchedule(), list[int]()
    assert np.median(taught(schedule, 4, 60)[-9:]) == 4
    for _ in range(300):
        lengths.append(schedule.next(1000))
        found = outcome(lengths[-1], [min(lengths[-1], 4)])
        schedule.observe(replace(found, typical=lengths[-1] == 4))
    assert {len([*run]) for length, run in groupby(lengths) if length != 4} == {2}


def test_a_round_that_took_too_long_by_chance_changes_little() -> None:
    costs = Costs()
    for _ in range(50):
        costs.observe([(0, 0.01), (5, 0.02)])
    costs.observe([(5, 2.0)])
    expected, _ = costs.curves()
    assert expected[5] / expected[0] == pytest.approx(2, rel=0.05)
    assert costs.scale * expected[0] == pytest.approx(0.01, rel=0.05)


def test_a_round_says_nothing_where_those_before_and_after_it_disagree() -> None:
    costs = Costs()
    for _ in range(10):
        costs.observe([(1, 0.01), (5, 0.02)])
    costs.observe([*[(1, 0.01)] * 5, (9, 0.05), *[(1, 0.02)] * 5])
    assert 9 not in costs.known, "another program has begun meanwhile"
    costs.observe([*[(1, 0.02)] * 5, (9, 0.05), *[(1, 0.02)] * 5])
    assert costs.known[9][0] / costs.known[1][0] == pytest.approx(2.5, rel=0.05)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_nearly_as_fast_as_the_best_length_on_simulated_devices(case: Case) -> None:
    results = [simulate(case, 1000, seed) for seed in range(10)]
    assert np.mean([each.efficiency for each in results]) > 0.9, "it has begun with nothing"
    assert np.mean([each.later for each in results]) > (0.9 if case.hiccups else 0.96)
    assert min(each.over_plain for each in results) > 0.94, "it is never much slower than plain"


def test_it_begins_with_a_draft_and_compares_it_with_plain_decoding() -> None:
    lengths = taught(AdaptiveSchedule(), accepted=4, rounds=12)
    first = lengths.index(0)
    assert FIRST_ROUNDS <= first < FIRST_ROUNDS + 3, lengths
    assert min(lengths[:first]) >= 3 and min(lengths[first + 2 :]) >= 2, lengths
    assert AdaptiveSchedule().next(3) == 2 and AdaptiveSchedule().next(1) == 0, "there is no room"


def test_it_learns_from_rounds() -> None:
    schedule = AdaptiveSchedule()
    assert np.median(taught(schedule, 3, 100)[50:]) == 3
    assert np.mean(taught(schedule, MAX_DRAFT, 300)[250:]) > 20
    assert np.mean(taught(schedule, 0, 500)[300:]) < 0.2
    assert np.mean(taught(schedule, 6, 800)[600:]) > 4, "it probes"


def test_plain_decoding_is_chosen_although_it_seemed_slow_at_first() -> None:
    """Another program took the time of the first two looks at it."""
    schedule, lengths = AdaptiveSchedule(), list[int]()
    for _ in range(600):
        num_draft = schedule.next(1000)
        found = outcome(num_draft, [0])
        slow = num_draft == 0 and lengths.count(0) < 2
        schedule.observe(replace(found, verify_seconds=(30 if slow else 1) * found.seconds))
        lengths.append(num_draft)
    assert np.mean([n == 0 for n in lengths[300:]]) > 0.95


def test_a_first_look_that_takes_surprisingly_long_is_followed_by_another() -> None:
    costs = Costs()
    costs.observe([(1, 0.01)] * 8)
    costs.observe([(5, 0.2)] + [(1, 0.01)] * 5)
    assert 5 not in costs.known
    costs.observe([(5, 0.02)] + [(1, 0.01)] * 5)
    assert costs.known[5][0] / costs.known[1][0] == pytest.approx(2)


def test_a_cost_that_was_too_high_or_too_low_is_learned_anew() -> None:
    for seen in (0.01, 0.08):
        costs = Costs()
        costs.observe([(1, 0.01)])
        for first in (seen, 0.02):
            for _ in range(8):
                costs.observe([(1, 0.01)] * 5 + [(5, first)] + [(1, 0.01)] * 5)
        assert costs.known[5][0] / costs.known[1][0] == pytest.approx(2, rel=0.1), seen


def test_the_usual_length_is_compared_with_others_and_not_with_itself() -> None:
    """That its cost is not well known says nothing about it if it is looked at alone."""
    schedule, looks = AdaptiveSchedule(), list[int]()
    for _ in range(300):
        num_draft = schedule.next(1000)
        (plan,) = schedule._plans.values()
        looks += [num_draft] if plan[0].looks else []
        usual = LENGTHS[schedule._best[1][0]]
        assert num_draft != usual or not plan[0].looks
        schedule.observe(outcome(num_draft, [min(num_draft, 4)]))
    assert len({*looks}) > 2


def test_it_probes_later_and_later() -> None:
    """Probes are so rare that they cost little, and rarer after each failure, up to a limit."""
    gaps = np.diff(np.flatnonzero(taught(AdaptiveSchedule(), 0, 4000)))
    waits = gaps[gaps > 1]
    assert 10 < len(waits) < 60 and (np.diff(waits) >= 0).all()
    assert 10 * waits[0] < waits[-1] < 500


def test_each_size_of_batch_has_costs_of_its_own() -> None:
    schedule, lengths = AdaptiveSchedule(), list[int]()
    for _ in range(200):
        for rows in (1, 8):
            num_draft = schedule.next(1000, rows)
            lengths.append(num_draft)
            accepted = [min(1, num_draft)] * rows
            seconds = 1 + (0.1 if rows == 1 else 1.2) * num_draft
            length = 1 + num_draft
            found = Outcome(num_draft, [num_draft] * rows, accepted, 0, seconds, rows, length)
            schedule.observe(found)
    assert schedule.next(1000, 1) > schedule.next(1000, 8) == schedule.next(1000, 7) == 0
    assert len({*lengths[200::2]}) > 1, "it looks at others, although rounds of eight intervene"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what is learned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


def test_what_was_learned_is_kept_by_models_options_and_hardware(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught(stored("this", 1), 0, 300)
    knows, nothing = taught(stored("this", 1), 0, 1), taught(AdaptiveSchedule(), 0, 1)
    assert knows != nothing and taught(stored("that", 1), 0, 1) == nothing
    for name in ("a.home", "a.office"):  # a laptop's name changes with its network
        monkeypatch.setattr("platform.node", lambda name=name: name)
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        assert taught(stored("this", 1), 0, 1) == knows

    def device_info(device: Any) -> dict[str, str | int]:
        return {"device_name": "another GPU" if device == "a GPU" else "another CPU"}

    changes: list[tuple[str, Any]] = [
        ("platform.machine", lambda: "another architecture"),
        ("speculative_t5.libraries.num_threads", lambda: 1000),
        ("mlx.core.device_info", device_info),
        ("mlx.core.default_device", lambda: "a GPU"),
    ]
    for name, value in changes:
        monkeypatch.setattr(name, value)
        assert taught(stored("this", 1), 0, 1) == nothing, name
        taught(stored("this", 1), 0, 300)
        assert taught(stored("this", 1), 0, 1) == knows, name


@pytest.mark.parametrize("seed", range(3))
def test_many_short_processes_learn_as_a_long_one_does(tmp_path: Path, seed: int) -> None:
    """They go on exploring where the one before has ended, and know what it cost."""
    (case,) = (each for each in CASES if each.name == "two cores, a hopeless draft")
    assert simulate(case, 600, seed, tmp_path / "kept.json").later > 0.95


def test_a_process_keeps_what_it_has_learned_when_it_ends(cache: Path) -> None:
    code = """
from speculative_t5.decoding.draft_length import stored
from speculative_t5.decoding.outcomes import Outcome

schedule = stored()
schedule.observe(Outcome(schedule.next(9), [1], [1], 0.0, 1.0))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len([*cache.iterdir()]) == 1


def test_a_damaged_file_is_nothing_learned(cache: Path) -> None:
    taught(stored(), 2, 300)
    (path,) = cache.iterdir()
    whole, learned = path.read_bytes(), taught(stored(), 2, 2)
    nothing = taught(AdaptiveSchedule(), 2, 2)
    assert learned != nothing
    digest, _, kept = whole.partition(b"\n")
    last = max(place for place, byte in enumerate(whole) if chr(byte).isdigit())
    other = whole[:last] + b"%d" % (9 - int(whole[last : last + 1])) + whole[last + 1 :]
    for content in (b"", b"{}", b"\xff", whole[:-1], kept, digest, other, 100_000 * b"["):
        path.write_bytes(content)
        assert taught(stored(), 2, 2) == nothing, content
    path.write_bytes(whole)
    assert taught(stored(), 2, 2) == learned


def test_it_works_without_a_writable_cache(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("in the way")
    assert taught(stored(), 2, 10) and cache.read_text() == "in the way"


PROMPTS = [[10, 1], [5, 6, 7, 1], [3, 1], [12, 13, 1]]


def make_decoder(**options: Any) -> SpeculativeDecoder:
    pair = tiny_pair("t5", vocab_size=20, layers=2, seed=3)
    return SpeculativeDecoder(*pair, **options)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_auto_gives_the_outputs_of_plain_decoding(cache: Path, temperature: float) -> None:
    """Alone, in a batch, in a stream, and in a decoder that finds what another one has learned."""
    one, options = make_decoder(lookup=True), {"max_tokens": 40, "temperature": temperature}
    plain = [one.generate(prompt, speculative=False, **options).tokens for prompt in PROMPTS]
    assert not cache.exists(), "there is nothing to learn"
    found = [one.generate(prompt, **options) for prompt in PROMPTS]
    assert [each.tokens for each in found] == plain
    assert len({n for each in found for n in each.stats.num_draft}) > 1
    for schedule in one.engine._schedules.values():
        schedule.keep()
    assert any(cache.iterdir())
    for other in (one, make_decoder(lookup=True)):
        chunks = other.stream(PROMPTS[0], **options)
        assert [token for chunk in chunks for token in chunk.tokens] == plain[0]
        batch = other.generate_batch(PROMPTS, speculative=False, **options)
        drafted = other.generate_batch(PROMPTS, **options)
        assert [each.tokens for each in drafted] == [each.tokens for each in batch]


@pytest.mark.parametrize(
    "options",
    [{"delta": 0.1}, {"verify": "token"}, {"verify": "block"}, {"steady": True}],
    ids=lambda options: next(iter(options)) + str(next(iter(options.values()))),
)
def test_auto_is_a_fixed_number_where_outputs_depend_on_it(options: dict[str, Any]) -> None:
    halves = "steady" in options
    assert make_decoder(**options).engine.plan().schedule == FixedSchedule(5, halves)
    assert make_decoder(num_draft=3, **options).engine.plan().schedule == FixedSchedule(3, halves)
    assert isinstance(make_decoder().engine.plan().schedule, SplitSchedule)


def typical_rounds(
    decoder: SpeculativeDecoder, *lengths: int, paused: float = 0.0, timed: bool = False
) -> list[bool]:
    """Tell of each round of an output whether its time is to count."""
    plan = replace(decoder.engine.plan(), schedule=Lengths(*lengths), timed=timed)
    requests = decoder.engine.requests([(0, PROMPTS[1])], GenerationOptions(max_tokens=50))
    for _ in decode(decoder.model, requests, plan, batch_size=1):
        time.sleep(paused)
    assert isinstance(plan.schedule, Lengths) and len(plan.schedule.outcomes) > 8
    return [outcome.typical for outcome in plan.schedule.outcomes]


@pytest.mark.cpu
@pytest.mark.parametrize("kind", ["t5", "sharing"])
def test_rounds_with_more_to_do_do_not_count(kind: str) -> None:
    """They encode a prompt, compile a pass, or let the draft read what was emitted without it."""
    target, draft = tiny_pair(kind, vocab_size=20, layers=2, seed=3)
    decoder = SpeculativeDecoder(target, draft, num_draft=3)
    assert not all(typical_rounds(decoder, 3)[1:]), "the cache grows"
    assert (first := typical_rounds(decoder, 3)) == [False] + [True] * (len(first) - 1)
    assert not any(typical_rounds(decoder, 3, timed=True))
    lengths = 0, 0, 0, 0, 2, 2
    typical_rounds(decoder, *lengths)
    assert typical_rounds(decoder, *lengths)[:6] == [False, True, True, True, False, True]


def test_rounds_of_a_batch_count_unless_a_prompt_was_just_encoded() -> None:
    target, draft = tiny_pair("sharing", vocab_size=20, layers=2, seed=3)
    decoder, shares = SpeculativeDecoder(target, draft, num_draft=3), list[float]()
    for _ in range(2):
        schedule = Lengths(3)
        plan = replace(decoder.engine.plan(), schedule=schedule)
        prompts = [(i, [*PROMPTS[i % 4], 1]) for i in range(40)]
        requests = decoder.engine.requests(prompts, GenerationOptions(max_tokens=9))
        for _ in decode(target, requests, plan, batch_size=4):
            pass
        shares.append(fmean(each.typical for each in schedule.outcomes))
    assert shares[1] > 0.7


def test_on_a_gpu_a_plain_round_counts_if_one_preceded_it_just_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It began while that one ran, and so does a next one."""
    target, draft = tiny_pair("sharing", vocab_size=20, layers=2, seed=3)
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    monkeypatch.setattr(loop, "LONGEST_PAUSE", math.inf)
    decoder, lengths = SpeculativeDecoder(target, draft, num_draft=3), (0, 0, 0, 2, 2, 0)
    typical_rounds(decoder, *lengths)
    assert typical_rounds(decoder, *lengths)[:6] == [False, True, True, False, True, False]
    monkeypatch.undo()
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    assert not any(typical_rounds(decoder, 0, paused=0.02)[:-1])


def drafted_by(
    by_model: float, right: int, copied: int, *, rounds: int = 400, store: Any = None
) -> SplitSchedule:
    """Return what a schedule became with a model and a lookup that are right for so many tokens.

    A pass costs the same whatever its length, and `by_model` more for each token of the model.
    """
    schedule = SplitSchedule(AdaptiveSchedule(store, SHARES))
    for _ in range(rounds):
        num_draft = schedule.next(100)
        model, lookup = schedule.split(num_draft)
        accepted = min(model, right) + (min(copied, lookup) if model <= right else 0)
        costs = 0.01 * by_model * model, 0.01
        outcome = Outcome(num_draft, [num_draft], [accepted], *costs, 1, 1 + num_draft)
        schedule.observe(outcome)
    return schedule


def shares(schedule: SplitSchedule) -> list[float]:
    """Return the model's share of what is drafted usually."""
    usual = Counter[float]()
    for _ in range(40):
        num_draft = schedule.next(100)
        usual[schedule.split(num_draft)[0] / max(num_draft, 1)] += 1
        schedule.observe(Outcome(num_draft, [num_draft], [num_draft], 0.0, 0.01, typical=False))
    return [share for share, _ in usual.most_common(1)]


def test_who_drafts_is_chosen_by_what_it_costs_and_gains(tmp_path: Path) -> None:
    assert shares(drafted_by(0.0, right=63, copied=0)) == [1.0]
    assert shares(drafted_by(2.0, right=63, copied=40)) == [0.0], "a lookup costs nothing"
    (share,) = shares(drafted_by(0.1, right=6, copied=4))
    assert 0.2 < share < 0.5, "both, in turn"
    store = tmp_path / "learned.json"
    drafted_by(2.0, right=63, copied=40, store=store)._schedule.keep()
    assert shares(SplitSchedule(AdaptiveSchedule(store, SHARES))) == [0.0]
    assert SplitSchedule(AdaptiveSchedule(store)).next(100) == AdaptiveSchedule().next(100), (
        "others'"
    )


def test_the_lengths_are_few() -> None:
    """As each is a shape of the target's pass to compile for."""
    assert len(LENGTHS) < 25 and LENGTHS[-1] == MAX_DRAFT
    assert set(taught(AdaptiveSchedule(), MAX_DRAFT, 500)) <= {*LENGTHS}
    kept = [AdaptiveSchedule().kept(found) for found in (0, 7, 8, 10, 62, 63, 100)]
    assert kept == [0, 7, 7, 9, 47, 63, 63] and FixedSchedule(9).kept(8) == 8


def test_a_lookup_that_finds_less_is_cut_to_one_of_them() -> None:
    target, _ = tiny_pair("t5", vocab_size=20, layers=2, seed=3)
    decoder, seen = SpeculativeDecoder(target, "lookup"), list[int]()

    class Asking(AdaptiveSchedule):
        def next(self, remaining: int, rows: int = 1) -> int:
            return min(10, remaining - 1)

        def observe(self, outcome: Outcome) -> None:
            seen.extend(outcome.num_drafted)

    source = [*range(3, 13), 1]
    plan = replace(decoder.engine.plan(), schedule=Asking())
    requests = decoder.engine.requests(
        [(0, source)], GenerationOptions(max_tokens=60, forced_tokens=[3])
    )
    for _ in decode(target, requests, plan, batch_size=1):
        pass
    assert set(seen) <= {*LENGTHS, 10} and 7 in seen
