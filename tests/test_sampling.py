"""From logits to tokens, and the probabilities of tokens."""

from itertools import product

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding import LogitsTransform
from speculative_t5.decoding.keys import final_keys, position_keys, round_keys
from speculative_t5.decoding.ranking import largest
from speculative_t5.decoding.sampling import Sampler, sample, uniform
from speculative_t5.decoding.scoring import TOKENS_PER_PASS, token_probabilities

import mlx.core as mx
import numpy as np
import pytest
from conftest import KINDS, VARIED, output_logits, tiny, tiny_draft, tiny_pair
from reference import TRANSFORMS, transformed_rows


def keys(rows: int) -> mx.array:
    return mx.random.split(mx.random.key(0), rows)


def test_temperature_divides_logits() -> None:
    logits = mx.array([1.0, 3.0, 2.0])
    assert Sampler().probs(logits).tolist() == Sampler(1e-5).probs(logits).tolist() == [0, 1, 0]
    expected = np.exp(np.array([1, 3, 2]) / 0.5)
    found = Sampler(0.5).probs(logits.astype(mx.bfloat16))
    assert found.dtype == mx.float32
    np.testing.assert_allclose(np.array(found), expected / expected.sum(), rtol=1e-5)


def filtered_by_sorting(logits: mx.array, top_k: int, top_p: float) -> mx.array:
    """What `Sampler.filter` is by definition, at temperature 1."""
    logits = logits - mx.max(logits, axis=-1, keepdims=True)
    weights = mx.exp(logits)
    ranked = -mx.sort(-logits, axis=-1)[..., :top_k]
    if top_k < logits.shape[-1]:
        weights = mx.where(logits >= ranked[..., -1:], weights, 0)
    if top_p < 1:
        before = mx.cumsum(mx.exp(ranked), axis=-1, inclusive=False)
        enough = before < top_p * mx.sum(weights, axis=-1, keepdims=True)
        count = mx.maximum(mx.sum(enough, axis=-1, keepdims=True), 1)
        least = mx.take_along_axis(ranked, count - 1, axis=-1)
        weights = mx.where(logits >= least, weights, 0)
    return weights / mx.sum(weights, axis=-1, keepdims=True)


@pytest.mark.parametrize("kind", ["varied", "ties", "few", "ascending"])
@pytest.mark.parametrize("shape", [(1000,), (3, 4097), (2, 3, 20000)])
def test_filters_are_those_of_a_sorted_vocabulary_to_the_bit(
    kind: str, shape: tuple[int, ...]
) -> None:
    """Of blocks or of the whole, which the number of kept tokens decides."""
    mx.random.seed(1)
    size = shape[-1]
    logits = 3 * mx.random.normal(shape)
    if kind == "ties":
        logits = mx.round(logits)
    elif kind == "few":  # fewer than top_k, as constraints leave them
        logits = mx.where(mx.arange(size) % 199 == 7, logits, -mx.inf)
    elif kind == "ascending":  # the best are neighbours, in the last block
        logits = mx.sort(logits, axis=-1)
    limit = (size // 2 - -(-size // 64)) // 64  # the most for which blocks are ranked
    for top_k in {1, 2, 5, 50, limit, limit + 1, size - 1, size}:
        values = mx.sort(largest(logits, top_k), axis=-1)
        assert mx.array_equal(values, mx.sort(logits, axis=-1)[..., -top_k:])
        for top_p in (1.0, 0.9, 1e-9) if top_k < size else (0.9, 1e-9):
            found = Sampler(1.0, top_k, top_p).filter(logits)
            assert mx.array_equal(found, filtered_by_sorting(logits, top_k, top_p)), (top_k, top_p)


def test_samples_follow_unnormalised_weights_and_are_never_a_zero() -> None:
    weights = mx.broadcast_to(mx.array([0.0, 3.0, 0.0, 1.0, 0.0]), (100_000, 5))
    counts = np.bincount(np.array(sample(weights, keys(100_000))), minlength=5) / 100_000
    assert counts[[0, 2, 4]].sum() == 0
    assert counts[1] == pytest.approx(0.75, abs=0.01)


def test_uniforms_are_independent_over_rows_places_and_rounds() -> None:
    """Pairs of neighbours in 16 bins, 40,000 in all: chi-squared with 15 degrees of freedom."""
    rounds = mx.array(np.concatenate([round_keys(5, i, r) for i in range(50) for r in range(20)]))
    samples = np.array(uniform(position_keys(rounds, 20)))
    assert len(np.unique(samples)) > 0.99 * samples.size
    for axis, neighbours in ((0, samples[1:]), (1, samples[:, 1:])):
        before = samples[:-1] if axis == 0 else samples[:, :-1]
        bins = (before * 4).astype(int) * 4 + (neighbours * 4).astype(int)
        counts = np.bincount(bins.ravel(), minlength=16)
        expected = bins.size / 16
        assert ((counts - expected) ** 2 / expected).sum() < 40


def test_no_two_keys_of_a_round_are_the_same() -> None:
    rounds = mx.array(np.concatenate([round_keys(s, i, 0) for s in (0, 2**32) for i in (0, 1)]))
    places = position_keys(rounds, 9).reshape(-1, 2)
    together = mx.concatenate([places, final_keys(rounds)]).tolist()
    assert len({tuple(key) for key in together}) == 8 * 10


def filtered(probs: list[float], **options: float) -> list[float]:
    return Sampler(1.0, **options).filter(mx.log(mx.array(probs))).tolist()


@pytest.mark.parametrize("temperature", [1e5, 1e7, 1e12, 1e30, 1e300])
def test_filters_rank_logits_whose_probabilities_are_equal(temperature: float) -> None:
    """At such temperatures float32 has one probability for all tokens, but for suppressed ones."""
    size = 20_000
    logits = mx.array(np.random.default_rng(0).permutation(size) / 1000, dtype=mx.float32)
    best = np.argsort(-np.array(logits))
    for top_k, top_p, count in ((3, 1.0, 3), (50, 1.0, 50), (8, 0.5, 4), (0, 0.25, size // 4)):
        sampler = Sampler(temperature, top_k, top_p)
        kept = np.flatnonzero(np.array(sampler.probs(logits)))
        assert abs(len(kept) - count) <= (0 if top_k else 10)  # a sum of 5,000 parts is rounded
        assert sorted(kept) == sorted(best[: len(kept)])
        suppressed = np.array(sampler.probs(mx.where(logits == logits[best[0]], -mx.inf, logits)))
        assert suppressed[best[0]] == 0 and suppressed[best[1]] > 0


def test_ties_at_the_border_stay_together() -> None:
    assert filtered([0.25, 0.25, 0.25, 0.25], top_k=2) == [0.25] * 4
    assert filtered([0.1, 0.5, 0.4], top_p=1e-9) == filtered([0.1, 0.5, 0.4], top_p=1e-60)
    assert filtered([0.1, 0.5, 0.4], top_p=1e-60) == [0, 1, 0], "the first always stays"
    assert filtered([0.2, 0.2, 0.4, 0.2], top_p=0.5) == pytest.approx([0.2, 0.2, 0.4, 0.2])
    assert filtered([0.4, 0.2, 0.2, 0.2], top_k=2, top_p=0.7) == pytest.approx([0.4, 0.2, 0.2, 0.2])


@pytest.mark.parametrize(("top_k", "top_p"), [(20, 1.0), (0, 0.9), (0, 0.5), (20, 0.9), (3, 0.3)])
def test_filters_agree_with_the_definition(top_k: int, top_p: float) -> None:
    """Compare with a plain loop over tokens sorted by probability, row by row."""
    logits = np.random.default_rng(0).normal(size=(4, 5, 200)) * 2
    found = np.array(Sampler(0.7, top_k, top_p).probs(mx.array(logits)))
    for row, got in zip(logits.reshape(-1, 200), found.reshape(-1, 200), strict=True):
        probs = np.exp(row / 0.7)
        order = np.argsort(-probs)[: top_k or None]
        share = np.cumsum(probs[order]) / probs[order].sum()
        kept = order[: int(np.searchsorted(share, top_p)) + 1]
        expected = np.zeros(200)
        expected[kept] = probs[kept] / probs[kept].sum()
        np.testing.assert_allclose(got, expected, atol=1e-6)


SOURCE = [4, 5, 6, 1]
SAMPLERS = [Sampler(), Sampler(0.7, top_k=4), Sampler(1.3, top_p=0.8)]
SAMPLERS += [Sampler(0.8, transform=TRANSFORMS[name]) for name in ("together", "forced")]


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_equal_those_of_a_pass_over_the_whole_output(kind: str) -> None:
    model = tiny(kind, vocab_size=12, layers=2)
    start = SOURCE if model.info.is_decoder_only else [0]
    for sampler, count in product(SAMPLERS, (0, 1, TOKENS_PER_PASS, TOKENS_PER_PASS + 1)):
        tokens = np.random.default_rng(0).integers(2, 12, count).tolist()
        # Those of temperature 0 are those of 1.
        temperature = sampler if sampler.temperature else Sampler(1.0)
        logits = output_logits(model, SOURCE, [tokens[:-1]])[0]
        if sampler.transform:
            outputs = [tokens[:i] for i in range(len(logits))]
            logits = transformed_rows(sampler.transform, logits, start, outputs)
        probs = np.array(temperature.probs(logits))
        found = token_probabilities(model, SOURCE, tokens, sampler, 12, 12)
        np.testing.assert_allclose(found, [probs[i, t] for i, t in enumerate(tokens)], atol=1e-5)
    small = tiny_draft(model, vocab_size=8)
    for draft, size in ((small, 12), (model, 8)):
        found = token_probabilities(draft, SOURCE, [3, 11, 5], Sampler(1.0), size, 12)
        assert found[1] == 0 and found[0] > 0 and found[2] > 0, "it cannot propose 11"


def test_generations_have_probabilities_on_request() -> None:
    model, draft = tiny_pair("sharing", vocab_size=20, layers=2, seed=VARIED["sharing"])
    decoder = SpeculativeDecoder(model, draft, num_draft=3, draft_vocab=16)
    done = decoder.generate(SOURCE, max_tokens=20, probabilities=True)
    assert decoder.generate(SOURCE, max_tokens=20).trace[0].p is None
    several = decoder.generate(
        SOURCE, max_tokens=20, temperature=1.0, num_return_sequences=2, probabilities=True
    )
    for out in (done, several, *several.alternatives):
        assert max(out.tokens) >= 16 and out.stats.accepted
        for token in out.trace:
            assert token.p is not None and token.q is not None
            assert token.id < 16 or (token.q == 0 and token.origin != "accepted")
    least = min(p for p, _ in done.probabilities or ())
    assert least > 1 / 20, "a greedy choice is at least as probable as the average"
    alone = SpeculativeDecoder(model, "lookup").generate(SOURCE, max_tokens=20, probabilities=True)
    np.testing.assert_allclose([t.p for t in alone.trace], [t.p for t in done.trace], atol=1e-6)
    assert {t.q for t in alone.trace} == {None}


def test_greedy_rows_that_differ_in_what_greedy_decoding_ignores_are_computed_together() -> None:
    greedy = Sampler(top_k=3)
    assert greedy.agrees(Sampler(top_p=0.5)) and Sampler(top_p=0.5).agrees(greedy)
    assert not greedy.agrees(Sampler(transform=LogitsTransform(min_tokens=1)))
    assert not greedy.agrees(Sampler(1.0, top_k=3)) and not Sampler(1.0).agrees(greedy)
    assert Sampler(1.0).agrees(Sampler(1.0)) and not Sampler(1.0).agrees(Sampler(0.5))
