"""The comparisons with mlx-lm: what is accepted of drafts, and speed."""

from pathlib import Path
from typing import Any

from speculative_t5.causal import DecoderOnlyModel

import compare_acceptance
import compare_mlx_lm
import documents
import mlx.core as mx
import numpy as np
import pytest
import train_causal
from acceptance_counts import Counts, count_flags
from compare_acceptance import predicted, second_token_counts, second_token_distribution, theirs
from conftest import REPOSITORY, VARIED, tiny_causal, tiny_draft

T, F = True, False
Pair = tuple[DecoderOnlyModel, DecoderOnlyModel]


@pytest.fixture(scope="module")
def models() -> Pair:
    target = tiny_causal("llama", vocab_size=8, seed=6, layers=2)
    return target, tiny_draft(target, noise=0.3)


def test_rounds_are_counted_from_flags() -> None:
    for flags, max_tokens, expected in (  # rounds, drafted, accepted, rejected, emitted, opened
        ([T, T, F, T, F, T], 6, (3, 5, 4, 1, 6, 1)),  # the last round had room for one
        ([F, F, F], 3, (3, 2 + 2 + 1, 0, 3, 3, 0)),
        ([T, T, F, T, T], 9, (2, 4, 4, 0, 5, 1)),  # EOS was drafted
        ([T], 9, (1, 2, 1, 0, 1, 1)),  # it came first: the rest of the draft is not judged
        ([F], 9, (1, 2, 0, 1, 1, 0)),
        ([T, F, T, T, F], 5, (2, 4, 3, 1, 5, 1)),
    ):
        counts = Counts(*expected, outputs=1)
        assert count_flags(flags, 2, max_tokens) == counts
        total = counts + Counts(1, 2, 1, 1, 2, 1, 1)
        rounds, drafted, accepted, rejected, emitted, _ = expected
        assert (total.outputs, total.acceptance) == (2, (accepted + 1) / (drafted + 2))
        assert total.judged == (accepted + 1) / (accepted + rejected + 2)
        assert total.tokens_per_round == (emitted + 2) / (rounds + 1)
    assert Counts().acceptance == Counts().judged == Counts().tokens_per_round == 0


class Counted:
    """Records the width of every pass."""

    def __init__(self, model: Any) -> None:
        self.model, self.layers, self.widths = model, model.layers, []

    def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
        self.widths.append(tokens.shape[1])
        return self.model(tokens, **options)


@pytest.mark.parametrize("max_tokens", [1, 20])
def test_rounds_of_mlx_lm_are_passes_of_its_target(models: Pair, max_tokens: int) -> None:
    target, draft = tiny_causal("llama", vocab_size=8, seed=6, layers=2), models[1]
    target.model = counted = Counted(target.model)
    mx.random.seed(0)
    for token in (2, 3, 4, 5, 6):
        counted.widths = []  # a prompt of one token is not read ahead
        flags = [flag for _, flag in theirs(target, draft, [token], 3, max_tokens)]
        counts = count_flags(flags, 3, max_tokens)
        rounds = len(counted.widths)
        assert (counts.rounds, counts.drafted) == (rounds, sum(counted.widths) - rounds)
        assert counts.emitted == len(flags) <= max_tokens


def softmax(model: DecoderOnlyModel, tokens: list[int]) -> np.ndarray:
    weights = np.exp(np.array(model(mx.array([tokens]))[0, -1], dtype=np.float64))
    return weights / weights.sum()


@pytest.mark.parametrize("extra_eos_ids", [[], [6]])
def test_second_token_is_distributed_as_the_sum_over_first_ones(
    models: Pair, extra_eos_ids: list[int]
) -> None:
    model, prompt = models[0].model, [3, 4, 5]
    target = DecoderOnlyModel(model, eos_token_id=1, max_context=64, extra_eos_ids=extra_eos_ids)
    ends = [1, *extra_eos_ids]
    first = softmax(target, prompt)
    expected = [0.0] * 8 + [sum(first[end] for end in ends)]
    for x, p in enumerate(first):
        for y, then in enumerate(softmax(target, [*prompt, x])):
            expected[1 if y in ends else y] += p * then * (x not in ends)
    np.testing.assert_allclose(second_token_distribution(target, prompt), expected, rtol=1e-5)
    assert sum(expected) == pytest.approx(1)
    outputs = [[3, 2], [3, 1], [1], [0, 2, 3]]
    assert second_token_counts(outputs, 4, eos=1).tolist() == [0, 1, 2, 0, 1]


def test_exact_variants_pass_and_delta_one_does_not() -> None:
    target = tiny_causal("llama", vocab_size=5, seed=6, layers=2)
    draft, prompt, runs = tiny_draft(target, noise=0.5), [3, 4], 400
    found = compare_acceptance.compare_exactness(
        target, draft, prompt, num_draft=2, runs=runs, seed=0
    )
    *exact, (accepts_all, _) = found.values()
    assert all(test.p_value > 1e-3 for test, _ in exact), found
    assert accepts_all.p_value < 1e-6
    opened = [share for _, share in found.values()]
    assert opened[:2] == pytest.approx(predicted(target, draft, [prompt]), abs=0.1)  # 4 std. errors
    assert opened[1] > opened[0] + 0.1
    assert opened[3] == 1


def test_a_trained_pair_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {name: tmp_path / "pair" / name for name in ("target", "draft")}
    with pytest.raises(
        SystemExit, match=r"no model in .*: run python weights/training/train_causal.py"
    ):
        compare_acceptance.main(**folders)
    texts = documents.read_documents([REPOSITORY / "docs" / "design.md"])
    train_causal.train_pair(texts * 3, tmp_path / "pair", 2, seed=0)
    capsys.readouterr()
    compare_acceptance.main(
        **folders, num_draft=2, count=2, prompt_tokens=4, max_tokens=6, runs=5, seed=0
    )
    out = capsys.readouterr().out
    for variant in ("mlx-lm", "ours, token", "ours, block"):
        assert sum(line.startswith(variant) for line in out.splitlines()) == 2
    assert "delta 1, not exact" in out


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_all_variants_give_the_same_outputs(kind: str) -> None:
    target = tiny_causal(kind, vocab_size=20, layers=2, seed=VARIED[kind])
    variants = compare_mlx_lm.variants_of(target, tiny_draft(target), 3)
    assert len(variants) == 4
    for prompt in ([2, 3, 4], [5] * 9, [7, 9]):
        first, *others = (variant(prompt, 25) for variant in variants.values())
        assert others == [first] * 3
        assert len(first) == 25 or (1 <= len(first) < 25 and first[-1] == target.info.eos_token_id)
