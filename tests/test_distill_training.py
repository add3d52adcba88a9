"""Losses against formulas, agreement against real decoding, and what is said of a draft."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

from speculative_t5 import SpeculativeDecoder, measure
from speculative_t5.distill import LOSSES, Agreement, DistillTask, Judgement, Speed, judge, training
from speculative_t5.distill import judgement as judging
from speculative_t5.distill.judgement import MAX_DRAFTED, speed_of
from speculative_t5.measure import Comparison, Run, comparison
from speculative_t5.models.t5 import T5, Head

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_draft, tiny_model

SIZE, WIDTH, PLACES = 12, 4, 11
MODEL = tiny_model(vocab_size=20, seed=18, layers=2, eos_token_id=19)
RNG = random.Random(5)
PROMPTS = [[*RNG.choices(range(2, 19), k=RNG.randrange(1, 7)), 19] for _ in range(30)]
DRAFTS = [tiny_draft(MODEL, noise=noise) for noise in (0.0, 0.1, 0.3, 3.0)]


@cache
def outputs_of(number: int) -> list[tuple[list[int], int, list[bool]]]:
    """Return prompts, a token of each output to end it at, and where a draft is right till there.

    The draft is given the true tokens before each.
    """
    draft = DRAFTS[number]
    rng, found = random.Random(0), []
    for prompt in PROMPTS:
        tokens = SpeculativeDecoder(MODEL).generate(prompt, max_tokens=20).tokens
        logits = draft(mx.array([prompt]), mx.array([[0, *tokens[:-1]]]))[0]
        end = rng.choice(tokens)
        right = mx.argmax(logits, axis=-1) == mx.array(tokens)
        found.append((prompt, end, right[: tokens.index(end) + 1].tolist()))
    return found


@pytest.mark.parametrize("num_draft", [1, 8])
def test_decoding_takes_as_many_passes_and_accepts_as_often(num_draft: int) -> None:
    for number, draft in enumerate(DRAFTS):
        rows = []
        decoder = SpeculativeDecoder(MODEL, draft, num_draft=num_draft)
        reached, passed = np.zeros(num_draft), np.zeros(num_draft)
        for prompt, end, row in outputs_of(number):
            stats = decoder.generate(prompt, stop_token_ids=[end]).stats
            assert Agreement([[row]]).tokens_per_pass(num_draft) == len(row) / stats.rounds
            rows.append(row)
            left, places = len(row), np.arange(num_draft)
            for accepted in stats.num_accepted:
                reached += (places <= accepted) & (places < left)
                passed += places < accepted
                left -= accepted + 1
        expected = passed[reached > 0] / reached[reached > 0]
        np.testing.assert_array_equal(
            Agreement([[row] for row in rows]).by_place(num_draft), expected
        )
    assert len(set(map(tuple, rows))) > 5


def test_figures_worked_by_hand() -> None:
    found = Agreement([[[True, True, False, True, False, False]]])
    assert found.rate == 3 / 6 and found.num_tokens == 6
    assert [found.tokens_per_pass(k) for k in (1, 2, 8)] == [6 / 4, 6 / 3, 6 / 3]
    # Rounds of 3, 2 and 1 tokens: right right wrong, right wrong, wrong.
    assert found.by_place(3) == [2 / 3, 1 / 2, 0.0]
    # Blocks of two: the second begins at the third token.
    blocks = Agreement([[[True, True, False, True], [True, False, True]]])
    assert (blocks.rate, blocks.num_tokens) == (3 / 4, 4)
    assert [blocks.tokens_per_pass(k) for k in (1, 2, 4)] == [4 / 3, 4 / 2, 4 / 2]
    assert blocks.by_place(4) == [1.0, 1.0, 0.0]
    # Places that no draft came to are left out.
    assert Agreement([[[False, False]]]).by_place(4) == [0.0]
    assert Agreement([[[True, True]]]).by_place(4) == [1.0, 1.0]


def formula(loss: str, logits: mx.array, labels: mx.array, target: mx.array) -> mx.array:
    """The sum of a loss over all places, as `loss_sum` describes it."""
    size = logits.shape[-1]
    log_q = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    log_p = (target - mx.logsumexp(target, axis=-1, keepdims=True))[:, :size]
    known = labels < size
    chosen = mx.take_along_axis(log_q, mx.minimum(labels, size - 1)[:, None], axis=-1)[:, 0]
    return -(chosen * known).sum() if loss == "ce" else (mx.exp(log_p) * (log_p - log_q)).sum()


@pytest.mark.parametrize("size", [SIZE, 7])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_those_of_the_formulas(
    loss: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "MAX_LOGITS", 2 * SIZE)  # two places at a time
    mx.random.seed(1)
    hidden, target = mx.random.normal((PLACES, WIDTH)), 2 * mx.random.normal((PLACES, SIZE))
    weight, labels = mx.random.normal((size, WIDTH)), mx.arange(PLACES) % SIZE
    asked: list[int] = []

    def target_logits(first: int, last: int) -> mx.array:
        asked.append((last - first) * SIZE)
        return target[first:last]

    widest, logits = (size, None) if loss == "ce" else (SIZE, target_logits)
    found = training.head_loss(loss, hidden, weight, labels, logits, widest, Head(cap=2.0).capped)
    expected = mx.value_and_grad(
        lambda x: formula(loss, 2.0 * mx.tanh(x @ weight.T / 2.0), labels, target)
    )(hidden)
    assert found[0] == pytest.approx(expected[0].item(), rel=1e-4)
    assert mx.allclose(found[1], expected[1], rtol=1e-4, atol=1e-5)
    assert max(asked, default=0) <= training.MAX_LOGITS, "no more of them exist at a time"


JUDGED = [[5, 9, 1], [7, 3, 3, 8, 1], [4, 1]]
KNOWN = Agreement([[[True, True, True, False, True]]] * 10)


@pytest.fixture(scope="module")
def target() -> T5:
    return tiny_model(vocab_size=20, layers=2, eos_token_id=19)


def run(seconds: float, *emitted: int, tokens: tuple[int, ...] = (7, 8)) -> Run:
    return Run(seconds=seconds, emitted=list(emitted), tokens=list(tokens))


def speeds(*ratios: float, same: int = 8) -> list[Speed]:
    """Return speeds for K = 1, 2, ... and, by the last ratio, for "auto"."""
    numbers: list[Any] = [*range(1, len(ratios)), "auto"]
    return [Speed(k, 100 * r, r, 2.0, same) for k, r in zip(numbers, ratios, strict=True)]


def judgement(*ratios: float, **changes: Any) -> Judgement:
    made: Any = {
        "target": "big", "draft": "small", "held_out": 10, "held_out_tokens": 1200,
        "agreement": 0.9, "by_place": [0.9, 0.8], "tokens_per_pass": [1.9, 2.6, 2.6],
        "unmeasured": None, "prompts": 8, "turns": 3, "max_tokens": 64, "plain": 100.0,
        "speeds": speeds(*ratios), "machine": "CPU", "dtype": "float32", "made_by": {"steps": 2000},
    }  # fmt: skip
    return Judgement(**made | changes)


def test_a_speed_is_a_median_of_ratios_within_turns() -> None:
    """The second turn is half as fast in everything, the third only without a draft."""
    plain = [run(2.0, 1, 1, 1, 1), run(2.0, 1, 1)]  # 1.5 tokens a second
    drafted = [run(0.5, 3, 1), run(1.0, 2)]  # 4 a second

    def slower(runs: list[Run], factor: int) -> list[Run]:
        return [replace(run, seconds=factor * run.seconds) for run in runs]

    turns = [
        {"plain": slower(plain, by), "3": slower(drafted, of_drafts)}
        for by, of_drafts in ((1, 1), (2, 2), (4, 1))
    ]
    found = speed_of(Comparison(turns), 3)
    assert (found.num_draft, found.tokens_per_second) == (3, 4.0)
    assert found.speedup == pytest.approx(4 / 1.5)
    assert found.tokens_per_pass == 6 / 3 and found.same == 2


@pytest.mark.parametrize(("most", "count"), [(0.5, 1), (3.0, 2), (3.5, 2), (6.0, 3), (9.0, 3)])
def test_prompts_are_as_many_as_there_is_time_for(
    target: T5, most: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep(variants: Any, prompts: Any, order: Any, **_: Any) -> Any:
        """The first prompt takes one second, the second two and the third three."""
        runs = [run(1.0 + JUDGED.index(prompt), 1, 1) for prompt in prompts]
        return {variant.name: runs for variant in variants}

    monkeypatch.setattr(measure, "sweep", sweep)
    monkeypatch.setattr(comparison, "sweep", sweep)
    task, passes = DistillTask(target, None, "big"), 31
    found = judge(
        task,
        tiny_draft(target),
        "small",
        JUDGED,
        KNOWN,
        max_tokens=10,
        max_seconds=passes * most,
        made_by={},
    )
    assert found.prompts == count


@pytest.mark.parametrize("block", [0, 1])
def test_everything_is_measured(target: T5, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small: Any = tiny_draft(target, block=block)
    for name, value in {"MEASURED_TURNS": 2, "MAX_PROMPTS": 2}.items():
        monkeypatch.setattr(judging, name, value)
    seen: list[tuple[int, int]] = []
    found = judge(
        DistillTask(target, None, "big"),
        small,
        "small",
        JUDGED,
        KNOWN,
        max_tokens=10,
        max_seconds=900.0,
        made_by={"layers": 1},
        progress=lambda done, total: seen.append((done, total)),
    )
    total = 10 + 2 * (1 + 2 * 10)
    assert seen == [(done, total) for done in range(1, total + 1)]
    assert [speed.num_draft for speed in found.speeds] == [*range(1, MAX_DRAFTED + 1), "auto"]
    assert found.prompts == 2 and {speed.same for speed in found.speeds} == {2}
    decoder = SpeculativeDecoder(target, small, num_draft=3)
    stats = [decoder.generate(prompt, max_tokens=10).stats for prompt in JUDGED[:2]]
    passes = sum(each.emitted for each in stats) / sum(each.rounds for each in stats)
    assert found.speeds[2].tokens_per_pass == passes
    assert found.plain > 0 and found.best and found.auto


def test_outputs_of_one_token_leave_nothing_to_measure(target: T5) -> None:
    task, draft = DistillTask(target, None, "big"), tiny_draft(target)
    found = judge(task, draft, "small", JUDGED, KNOWN, max_tokens=1, max_seconds=900.0, made_by={})
    assert (found.held_out, found.held_out_tokens, found.agreement) == (10, 50, 0.8)
    assert found.tokens_per_pass == [KNOWN.tokens_per_pass(k) for k in range(1, 9)]
    assert found.by_place == [1.0, 1.0, 1.0, 0.0]  # no draft comes further
    assert not found.pays and (found.prompts, found.speeds) == (0, [])
    assert "ends with its first token" in found.verdict


def test_the_verdict_is_by_the_best_number_or_auto() -> None:
    assert judgement(1.2, 1.6, 1.4, 1.5).verdict == (
        "It pays: decoding is 1.60 times as fast as without a draft with --num-draft 2, "
        "and 1.50 times with --num-draft auto."
    )
    assert judgement(0.8, 0.7, 1.06).verdict.startswith("It pays: decoding is 1.06")
    assert judgement(1.06, 0.7, 0.9).pays
    found = judgement(1.05, 0.9, 1.0)
    assert not found.pays
    assert found.verdict == (
        "It does not pay: decoding is 1.05 times as fast as without a draft with --num-draft 1, "
        "the best fixed number, and 1.00 times with --num-draft auto; distill from more prompts or "
        "for more steps, or try --draft-model lookup."
    )


def test_notes_say_what_limits_the_figures() -> None:
    assert judgement(1.5, 1.5).notes == []
    for changes, same, said in (
        ({}, 6, "Up to 2 of 8 outputs differ"),
        ({"prompts": 1}, 1, "come from 1 prompt."),
        ({"held_out": 7}, 8, "come from 7 held-out outputs"),
    ):
        (note,) = judgement(1.5, 1.5, **changes, speeds=speeds(1.5, 1.5, same=same)).notes
        assert said in note


def test_the_readme_has_a_row_for_each_number() -> None:
    found = judgement(1.5, 1.6, 1.4, 1.55)
    text, summary = found.as_markdown(), "\n".join(found.summary())
    for row in (
        ["2", "2.60", "80.0 %", "160", "1.60", "8/8"],
        ["3", "2.60", "", "140", "1.40", "8/8"],
        ["auto", "2.00", "", "155", "1.55", "8/8"],
    ):
        assert row in cells(text) and row in cells(summary)
    assert ["`steps`", "2000"] in cells(text) and "other machines give others" in text
    assert "90.0 % of 1,200 tokens in 10 held-out outputs" in text


def cells(text: str) -> list[list[str]]:
    """The rows of tables."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]
