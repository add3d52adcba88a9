"""Draft lengths: what a schedule expects, learns, chooses and keeps."""

import math
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from speculative_t5 import SpeculativeDecoder, device
from speculative_t5.decoding import adaptive, decode, loop
from speculative_t5.decoding.adaptive import (
    EXTRA_WORK,
    FIRST_ROUNDS,
    SHARES,
    AdaptiveSchedule,
    Look,
    PlannedRound,
    SplitSchedule,
)
from speculative_t5.decoding.draft_length import FixedSchedule
from speculative_t5.decoding.outcomes import (
    LENGTHS,
    MAX_DRAFT,
    Outcome,
)
from speculative_t5.files import cache_folder
from speculative_t5.generation import GenerationOptions
from speculative_t5.generation.schedule_store import ScheduleFile, stored

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_pair
from scripted import Lengths, outcome
from simulated_devices import CASES, FIRST, WARM_UP, Case, Simulation, drawn


def taught(schedule: AdaptiveSchedule, accepted: int, rounds: int, rows: int = 1) -> list[int]:
    """Run rounds of which up to so many tokens are accepted, and return the lengths."""
    lengths, num_right = list[int](), 0
    for round_ in range(rounds):
        lengths.append(schedule.next(1000, rows))
        found = outcome(lengths[-1], [min(accepted, lengths[-1])] * rows)
        schedule.observe(replace(found, num_right=[num_right] * rows))
        goes_on = 0 < lengths[-1] <= accepted and round_ % 20  # else an output has ended
        num_right = num_right + lengths[-1] + 1 if goes_on else 0
    return lengths


def test_asking_for_a_draft_takes_time_even_if_none_is_found() -> None:
    schedule = AdaptiveSchedule()
    for _ in range(200):
        num_draft = schedule.next(1000)
        seconds = 1.0 if num_draft == 0 else 1.1
        schedule.observe(Outcome(num_draft, [0], [0], 0, seconds))
    assert schedule._costs[1].costs(0)[0] == pytest.approx(1.1, rel=0.05)
    assert schedule._usual[1] == 0


def test_it_chooses_while_the_last_round_of_a_plan_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that rounds wait for it after looks alone, once plans have more rounds than one."""
    schedule, waited, lengths = AdaptiveSchedule(), list[bool](), list[int]()
    learn = schedule._learn
    monkeypatch.setattr(schedule, "_learn", lambda: (waited.append(not thinks), learn()))
    for _ in range(300):
        num_draft = schedule.next(1000)
        (plan,) = schedule._plans.values()
        lengths.append(num_draft)
        looks, count, thinks = plan[0].looks, len(waited), True
        schedule.think(1)
        thinks = False
        schedule.observe(outcome(num_draft, [min(num_draft, 4)]))
        assert looks or len(lengths) < 9 or not any(waited[count:])
    assert waited.count(False) > 20
    assert np.median(lengths[-9:]) == 4


def test_a_look_is_repeated_once_if_its_time_says_nothing() -> None:
    schedule, looks = AdaptiveSchedule(), list[bool]()
    assert np.median(taught(schedule, 4, 60)[-9:]) == 4
    for _ in range(300):
        num_draft = schedule.next(1000)
        (plan,) = schedule._plans.values()
        looks.append(plan[0].looks)
        found = outcome(num_draft, [min(num_draft, 4)])
        schedule.observe(replace(found, typical=not looks[-1]))
    assert {len([*run]) for is_look, run in groupby(looks) if is_look} == {2}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_nearly_as_fast_as_the_best_length_on_simulated_devices(case: Case) -> None:
    done = [Simulation(case, seed).run(1000) for seed in range(10)]
    assert np.mean([each.efficiency() for each in done]) > 0.95, "it has begun with nothing"
    assert np.mean([each.efficiency(500) for each in done]) > 0.96
    over_plain = case.speed(case.best) / case.speed(0)
    worst = min(each.efficiency() for each in done) * over_plain
    assert worst > 0.94, "it is never much slower than plain"


def test_it_is_nearly_as_fast_from_the_first_prompts_on_drawn_devices() -> None:
    """Costs and rates are drawn anew in each run; single ones reach 0.8 to 1.05."""
    seed = random.SystemRandom().randrange(10**6)
    print("drawn by", seed)
    reached = []
    for each in range(seed, seed + 40):
        done = Simulation(drawn(each), each).run(outputs=WARM_UP + FIRST)
        reached.append(done.efficiency(done.ended[WARM_UP - 1]))
    assert fmean(reached) > 0.955, f"drawn by {seed}: {reached}"


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


def test_the_usual_length_is_compared_with_others_and_not_with_itself() -> None:
    """That its cost is not well known says nothing about it if it is looked at alone."""
    schedule, looks = AdaptiveSchedule(), list[int]()
    for _ in range(300):
        num_draft = schedule.next(1000)
        (plan,) = schedule._plans.values()
        looks += [num_draft] if plan[0].looks else []
        usual = LENGTHS[schedule._usual[1]]
        assert num_draft != usual or not plan[0].looks
        schedule.observe(outcome(num_draft, [min(num_draft, 4)]))
    assert len({*looks}) > 2


def test_what_is_looked_at_does_not_depend_on_how_long_compiling_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = next(each for each in CASES if each.name == "two cores")
    quick = Simulation(case, seed=0).run(100).chosen
    monkeypatch.setattr("simulated_devices.COMPILED", 20.0)
    assert Simulation(case, seed=0).run(100).chosen == quick


@pytest.mark.parametrize(
    ("accepted", "length", "tried", "charged"),
    [
        (4, 2, True, 0),
        (4, 2, False, EXTRA_WORK),  # its pass is compiled
        (4, 9, False, 0),  # longer than the usual one
        (0, 2, True, EXTRA_WORK),  # the usual choice asks no model, so none has read the prompt
    ],
)
def test_a_look_pays_for_compiling_and_for_reading_a_prompt_that_nobody_else_reads(
    accepted: int, length: int, *, tried: bool, charged: float
) -> None:
    schedule = AdaptiveSchedule()
    taught(schedule, accepted, 100)
    schedule._tried[1] = {length} if tried else set()
    before = schedule._budget
    schedule._plans[1].appendleft(PlannedRound(0, length, looks=True))
    schedule.observe(replace(outcome(length, [min(accepted, length)]), typical=False))
    assert before - schedule._budget == charged


def test_fewer_lengths_are_compiled_where_looks_pay_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(each for each in CASES if each.name == "two cores, a draft and a lookup")

    def compiled() -> float:
        done = [Simulation(case, seed).run(100) for seed in range(10)]
        return fmean(each.num_compiled for each in done)

    paid = compiled()
    monkeypatch.setattr(adaptive, "EXTRA_WORK", 0.0)
    assert paid < compiled() - 2


def test_a_look_at_what_becomes_usual_has_lost_nothing() -> None:
    schedule = AdaptiveSchedule()
    taught(schedule, 4, 100)
    schedule._plans[1].clear()
    schedule._rounds = 0  # so that no look is planned
    usual = schedule._usual[1]
    budgets = []
    for other in (usual, usual - 1):
        schedule._budget = 1.0
        schedule._looked[1] = Look(other, 1, 0.5, seems_better=False)
        schedule._plan(1)
        budgets.append(schedule._budget)
    assert budgets[0] - budgets[1] == pytest.approx(0.5)


def test_a_hopeless_draft_is_tried_so_rarely_that_it_costs_little() -> None:
    lengths = np.array(taught(AdaptiveSchedule(), 0, 4000))
    assert 4 < np.count_nonzero(lengths[1000:]) < 100, "but it is"
    spent = 1 + 0.1 * lengths[1000:]
    assert len(spent) / spent.sum() > 0.98


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


def test_a_batch_is_guessed_to_pay_for_each_row() -> None:
    """Until it has been measured: plain decoding of many rows has no room for drafts."""
    first = {rows: AdaptiveSchedule().next(1000, rows) for rows in (1, 4, 16, 64)}
    assert first[1] >= first[4] >= first[16] >= first[64] == 0 < first[1]
    free = AdaptiveSchedule(rows_are_free=True)
    assert {free.next(1000, rows) for rows in (1, 64)} == {first[1]}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what is learned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder() / "draft-lengths"


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

    gpu = mx.Device(mx.gpu)

    def device_info(device: Any) -> dict[str, str | int]:
        return {"device_name": "another GPU" if device == gpu else "another CPU"}

    changes: list[tuple[str, Any]] = [
        ("platform.machine", lambda: "another architecture"),
        ("speculative_t5.libraries.num_threads", lambda: 1000),
        ("mlx.core.device_info", device_info),
        ("mlx.core.default_device", lambda: gpu),
    ]
    for name, value in changes:
        monkeypatch.setattr(name, value)
        assert taught(stored("this", 1), 0, 1) == nothing, name
        taught(stored("this", 1), 0, 300)
        assert taught(stored("this", 1), 0, 1) == knows, name


def test_many_short_processes_learn_as_a_long_one_does(tmp_path: Path) -> None:
    """They go on where the one before has ended, and know what looks have cost."""
    kept, lengths = ScheduleFile(tmp_path / "kept.json"), list[int]()
    for _ in range(60):
        schedule = kept.schedule()
        lengths += taught(schedule, 0, 10)
        schedule.keep()
    assert 0.1 * np.mean(lengths[300:]) < 0.02, "part of the time that is lost"


def test_a_process_keeps_what_it_has_learned_when_it_ends(cache: Path) -> None:
    code = """
from speculative_t5.decoding.outcomes import Outcome
from speculative_t5.generation.schedule_store import stored

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
    by_model: float,
    right: int,
    copied: int,
    *,
    rounds: int = 400,
    store: ScheduleFile | None = None,
) -> SplitSchedule:
    """Return what a schedule became with a model and a lookup that are right for so many tokens.

    A pass costs the same whatever its length, and `by_model` more for each token of the model.
    """
    schedule = SplitSchedule(store.schedule() if store else AdaptiveSchedule(SHARES))
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
    path = tmp_path / "learned.json"
    store = ScheduleFile(path, SHARES)
    drafted_by(2.0, right=63, copied=40, store=store)._schedule.keep()
    assert shares(SplitSchedule(store.schedule())) == [0.0]
    assert ScheduleFile(path).schedule().next(100) == AdaptiveSchedule().next(100), "others'"


def test_another_share_becomes_usual_only_where_it_would_be_better_even_at_worst() -> None:
    """A lookup that was lucky three times is looked at again, but not yet relied upon."""

    def usual_share(lucky: int) -> int:
        schedule = AdaptiveSchedule(shares=SHARES)
        for _ in range(20):
            length = schedule.next(1000)
            seconds = 1 + length / 20
            found = Outcome(length, [length], [min(length, 4)], 0, seconds, 1, 1 + length)
            schedule.observe(found)
        lookup = len(SHARES) - 1
        drafts = [Outcome(4, [4], [4], 0, 1.4, 1, 5, share=lookup)] * lucky
        schedule._rates[lookup].add(drafts, lucky)
        schedule._plan(1)
        return int(schedule._drafted_by[schedule._usual[1]])

    assert usual_share(lucky=3) == 0
    assert usual_share(lucky=60) == len(SHARES) - 1


def test_a_share_that_was_not_asked_yet_is_no_choice() -> None:
    """However bad the first rounds are, what is expected of others is a mere guess."""
    schedule = AdaptiveSchedule(shares=SHARES)
    for _ in range(FIRST_ROUNDS - 1):
        share, length = schedule.choice(1000)
        assert share == 0
        schedule.observe(outcome(length, [0]))


def test_what_another_share_drafts_in_the_same_way_is_no_choice() -> None:
    """Of one token the model drafts the whole."""
    schedule = AdaptiveSchedule(shares=SHARES)
    both = SHARES.index(0.25)
    near = {
        (share, length)
        for (share, length, _), near in zip(schedule._choices, schedule._near(1), strict=True)
        if near
    }
    assert {(0, 1), (both, 2), (SHARES.index(0.0), 1)} < near and (both, 1) not in near


def test_rows_count_the_tokens_in_a_row_that_drafts_were_right_about() -> None:
    target, draft = tiny_pair("t5", vocab_size=8, layers=2, seed=3)
    decoder, schedule = SpeculativeDecoder(target, draft, num_draft=2), Lengths(2, 1, 3)
    requests = decoder.engine.requests([(0, [3, 4, 1])], GenerationOptions(max_tokens=60))
    for _ in decode(
        target, requests, replace(decoder.engine.plan(), schedule=schedule), batch_size=1
    ):
        pass
    num_right, whole = 0, 0
    for each in schedule.outcomes:
        assert list(each.num_right) == [num_right] * len(each.num_drafted)
        (accepted,) = each.num_accepted or [0]
        goes_on = 0 < accepted == each.num_draft
        num_right = num_right + accepted + 1 if goes_on else 0
        whole += goes_on
    assert 3 < whole < len(schedule.outcomes) - 3


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
