from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.models.causal import CausalModel

import compare_acceptance
import mlx.core as mx
import numpy as np
import pytest
import train_causal
from compare_acceptance import (
    Counts,
    chi_square_tail,
    count_flags,
    count_stats,
    fit,
    predicted,
    second_token_counts,
    second_token_law,
    theirs,
)
from conftest import REPOSITORY, tiny_causal, tiny_draft

T, F = True, False
SIGNIFICANT = 1e-6  # of a wrong rule; exact ones are held to 1e-3


@pytest.fixture(scope="module")
def models() -> tuple[CausalModel, CausalModel]:
    target = tiny_causal("llama", vocab_size=8, seed=6, layers=2)
    return target, tiny_draft(target, noise=0.3)


@pytest.mark.parametrize(
    ("flags", "max_tokens", "rounds", "drafted", "accepted", "rejected", "opened"),
    [
        ([T, T, F, T, F, T], 6, 3, 5, 4, 1, 1),  # the last round had room for one
        ([F, F, F], 3, 3, 2 + 2 + 1, 0, 3, 0),
        ([T, T, F, T, T], 9, 2, 4, 4, 0, 1),  # EOS was drafted
        ([T], 9, 1, 2, 1, 0, 1),  # it came first: what follows in the draft is not judged
        ([F], 9, 1, 2, 0, 1, 0),
        ([T, F, T, T, F], 5, 2, 4, 3, 1, 1),
    ],
)
def test_rounds_are_told_from_flags(
    flags: list[bool], max_tokens: int, rounds: int, drafted: int, accepted: int, rejected: int,
    opened: int,
) -> None:  # fmt: skip
    expected = Counts(rounds, drafted, accepted, rejected, len(flags), opened, outputs=1)
    assert count_flags(flags, 2, max_tokens) == expected


def test_rates_are_those_of_the_sums() -> None:
    total = count_flags([T, T, F], 2, 9) + count_flags([F, T], 2, 9)
    assert total == Counts(3, 6, 3, 1, 5, 1, 2)
    assert (total.acceptance, total.judged, total.tokens_per_round) == (3 / 6, 3 / 4, 5 / 3)
    assert Counts().acceptance == Counts().judged == Counts().tokens_per_round == 0


class Counted:
    """Takes down the width of every pass."""

    def __init__(self, model: Any) -> None:
        self.model, self.layers, self.widths = model, model.layers, []

    def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
        self.widths.append(tokens.shape[1])
        return self.model(tokens, **options)


@pytest.mark.parametrize("max_tokens", [1, 4, 9, 40])
def test_rounds_of_mlx_lm_are_passes_of_its_target(
    models: tuple[CausalModel, CausalModel], max_tokens: int
) -> None:
    target, draft = tiny_causal("llama", vocab_size=8, seed=6, layers=2), models[1]
    target.model = counted = Counted(target.model)
    mx.random.seed(0)
    for token in (2, 3, 4, 5, 6) * 2:
        counted.widths = []  # a prompt of one token is not read ahead
        flags = [flag for _, flag in theirs(target, draft, [token], 3, max_tokens)]
        counts = count_flags(flags, 3, max_tokens)
        assert counts.rounds == len(counted.widths)
        assert counts.drafted == sum(counted.widths) - len(counted.widths)
        assert counts.emitted == len(flags) <= max_tokens


def test_a_greedy_target_accepts_all_of_its_own(models: tuple[CausalModel, CausalModel]) -> None:
    target, _ = models
    emitted = list(theirs(target, target, [3, 4, 5], 3, 20, temperature=0))
    counts = count_flags([flag for _, flag in emitted], 3, 20)
    assert counts.judged == 1
    assert counts.rounds == -(-len(emitted) // 4)
    regular = SpeculativeDecoder(target).generate([3, 4, 5], max_tokens=20)
    assert [token for token, _ in emitted][: len(regular.tokens)] == regular.tokens


@pytest.mark.parametrize("rule", compare_acceptance.RULES)
def test_ours_are_counted_as_theirs(models: tuple[CausalModel, CausalModel], rule: Any) -> None:
    decoder = SpeculativeDecoder(*models, num_draft=3, verify=rule)
    outputs = decoder.generate_batch([[2, 6, 5], [3, 4]] * 20, max_tokens=60, temperature=1.0)
    ended = [output for output in outputs if output.finish_reason == "eos"]
    assert len(ended) > 10
    seen = set()
    for output in ended:  # away from max_tokens, before which fewer are drafted
        flags = [origin == "accepted" for _, origin in output.stats.origins()]
        if len(flags) > 50:
            continue
        counts = count_stats(output)
        assert counts == count_flags(flags, 3, 60)
        seen.add(flags[-1])
    assert seen == {T, F}  # EOS was drafted, and was the target's own


def softmax(model: CausalModel, tokens: list[int]) -> list[float]:
    weights = [float(np.exp(x)) for x in model(mx.array([tokens]))[0, -1].tolist()]
    return [weight / sum(weights) for weight in weights]


def test_predictions_are_the_sums_over_tokens(models: tuple[CausalModel, CausalModel]) -> None:
    prompts = [[2, 3], [4, 5], [6, 6]]
    products, overlaps = 0.0, 0.0
    for prompt in prompts:
        for p, q in zip(*(softmax(model, prompt) for model in models), strict=True):
            products += p * q / 3
            overlaps += min(p, q) / 3
    np.testing.assert_allclose(predicted(*models, prompts), (products, overlaps), rtol=1e-5)
    assert predicted(models[0], models[0], prompts)[1] == pytest.approx(1)


@pytest.mark.parametrize("extra_eos_ids", [[], [6]])
def test_the_law_of_the_second_token_is_the_sum_over_first_ones(
    models: tuple[CausalModel, CausalModel], extra_eos_ids: list[int]
) -> None:
    model, prompt = models[0].model, [3, 4, 5]
    target = CausalModel(model, eos_token_id=1, max_context=64, extra_eos_ids=extra_eos_ids)
    ends = [1, *extra_eos_ids]
    first = softmax(target, prompt)
    expected = [0.0] * 8 + [sum(first[end] for end in ends)]
    for x, p in enumerate(first):
        for y, then in enumerate(softmax(target, [*prompt, x])):
            expected[1 if y in ends else y] += p * then * (x not in ends)
    law = second_token_law(target, prompt)
    np.testing.assert_allclose(law, expected, rtol=1e-5)
    assert law.sum() == pytest.approx(1)


def test_second_tokens_are_counted() -> None:
    outputs = [[3, 2], [3, 1], [1], [0, 2, 3]]
    assert second_token_counts(outputs, 4, eos=1).tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("statistic", "freedom", "expected"),
    [(3.8415, 1, 0.05), (5.9915, 2, 0.05), (18.307, 10, 0.05), (24.996, 15, 0.05),
     (135.807, 100, 0.01), (0.0, 3, 1.0), (0.0, 4, 1.0), (1.0, 0, 1.0), (4000.0, 20, 0.0)],
)  # fmt: skip
def test_tails_are_those_of_tables(statistic: float, freedom: int, expected: float) -> None:
    assert chi_square_tail(statistic, freedom) == pytest.approx(expected, rel=1e-3)


def test_rare_cells_are_pooled() -> None:
    law = np.array([0.01, 0.5, 0.03, 0.43, 0.03])
    found = fit(np.array([2, 45, 3, 45, 5]), law)
    assert found.freedom == 2
    assert found.statistic == pytest.approx(9 / 7 + 25 / 50 + 4 / 43)
    needs_another = fit(np.array([1, 9, 90]), np.array([0.01, 0.09, 0.9]))
    assert (needs_another.statistic, needs_another.freedom) == (0, 1)
    assert fit(np.array([0, 10]), np.array([0.0, 1.0])).p_value == 1


def test_exact_counts_pass_and_p_values_are_uniform() -> None:
    rng, law = np.random.default_rng(0), np.random.default_rng(1).dirichlet([0.5] * 30)
    found = np.array([fit(rng.multinomial(2000, law), law).p_value for _ in range(400)])
    assert abs(found.mean() - 0.5) < 0.06  # four standard errors
    assert abs((found < 0.1).mean() - 0.1) < 0.06


def test_exact_arms_pass_and_planted_bugs_do_not() -> None:
    target = tiny_causal("llama", vocab_size=5, seed=6, layers=2)
    draft, prompt, runs = tiny_draft(target, noise=0.5), [3, 4], 400
    found = compare_acceptance.compare_exactness(
        target, draft, prompt, num_draft=2, runs=runs, seed=0
    )
    assert list(found) == ["mlx-lm", "ours, token", "ours, block", "delta 1, not exact"]
    *exact, accepts_all = found.values()
    assert all(test.p_value > 1e-3 for test, _ in exact), found
    assert accepts_all[0].p_value < SIGNIFICANT
    product, overlap = predicted(target, draft, [prompt])
    opened = [share for _, share in found.values()]
    assert opened[:2] == pytest.approx([product, overlap], abs=0.1)  # four standard errors
    assert opened[1] > opened[0] + 0.1
    assert opened[3] == 1

    # Draws from the draft, in either of them.
    law = second_token_law(target, prompt)
    mx.random.seed(0)
    theirs_swapped = [
        [token for token, _ in islice(theirs(draft, target, prompt, 2, 3), 2)] for _ in range(runs)
    ]
    outputs = SpeculativeDecoder(draft, target, num_draft=2).generate_batch(
        [prompt] * runs, batch_size=64, max_tokens=3, temperature=1.0
    )
    for drawn in (theirs_swapped, [[*output.tokens, 1] for output in outputs]):
        assert fit(second_token_counts(drawn, 5, 1), law).p_value < SIGNIFICANT


def test_windows_lie_side_by_side_or_apart() -> None:
    assert compare_acceptance.take_windows(range(7), 2, 3) == [[0, 1, 2], [3, 4, 5]]
    assert compare_acceptance.take_windows(range(9), 2, 3) == [[0, 1, 2], [4, 5, 6]]
    with pytest.raises(ValueError, match="3 prompts of 3 tokens are more than the text's 8"):
        compare_acceptance.take_windows(range(8), 3, 3)


def test_a_pair_that_is_missing_is_told_how_to_make(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="run python scripts/training/train_causal.py"):
        compare_acceptance.main(target=tmp_path / "target", draft=tmp_path / "draft")


def test_a_trained_pair_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = train_causal.read_documents([REPOSITORY / "docs" / "design.md"])
    train_causal.train_pair(documents * 3, tmp_path / "pair", train_causal.Length(2), seed=0)
    capsys.readouterr()
    compare_acceptance.main(
        target=tmp_path / "pair" / "target", draft=tmp_path / "pair" / "draft",
        text=None, num_draft=2, count=2, prompt_tokens=4, max_tokens=6, runs=5, seed=0,
    )  # fmt: skip
    out = capsys.readouterr().out
    for variant in ("mlx-lm", "ours, token", "ours, block"):
        assert sum(line.startswith(variant) for line in out.splitlines()) == 2
    assert "delta 1, not exact" in out
