from __future__ import annotations

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding.sampling import Sampler
from speculative_t5.decoding.scoring import PASS, token_probabilities

import numpy as np
import pytest
from conftest import KINDS, PAIRS, output_logits, tiny, tiny_draft, tiny_pair

SOURCE = [4, 5, 6, 1]
SAMPLERS = [Sampler(), Sampler(0.7, top_k=4), Sampler(1.3, top_p=0.8)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("count", [0, 1, PASS, PASS + 1])
def test_probabilities_equal_those_of_a_pass_over_the_whole_output(
    sampler: Sampler, count: int, kind: str
) -> None:
    model = tiny(kind, vocab_size=12, layers=2)
    tokens = np.random.default_rng(0).integers(2, 12, count).tolist()
    # Those of temperature 0 are those of 1.
    temperature = sampler if sampler.temperature else Sampler(1.0)
    probs = np.array(temperature.probs(output_logits(model, SOURCE, [tokens[:-1]])[0]))
    found = token_probabilities(model, SOURCE, tokens, sampler, 12)
    np.testing.assert_allclose(found, [probs[i, t] for i, t in enumerate(tokens)], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_a_draft_cannot_propose_have_probability_0(kind: str) -> None:
    model = tiny(kind, vocab_size=12)
    small = tiny_draft(model, vocab_size=8)
    tokens = [3, 11, 5]
    for draft, size in ((small, 12), (model, 8)):
        found = token_probabilities(draft, SOURCE, tokens, Sampler(1.0), size)
        assert found[1] == 0 and found[0] > 0 and found[2] > 0


@pytest.mark.parametrize("kind", PAIRS)
def test_generations_have_probabilities_on_request(kind: str) -> None:
    model, draft = tiny_pair(kind, vocab_size=12, seed=3)
    decoder = SpeculativeDecoder(model, draft, num_draft=3, draft_vocab=10)
    plain = decoder.generate(SOURCE, max_tokens=20)
    done = decoder.generate(SOURCE, max_tokens=20, probabilities=True)
    assert plain.probabilities is None and plain.trace[0].p is None
    assert done.tokens == plain.tokens
    for token in done.trace:
        assert token.p is not None and token.q is not None
        assert token.p > 1 / 12, "a greedy choice is at least as probable as the average"
        assert token.id < 10 or token.q == 0
    alone = SpeculativeDecoder(model, "lookup").generate(SOURCE, max_tokens=20, probabilities=True)
    np.testing.assert_allclose([t.p for t in alone.trace], [t.p for t in done.trace], atol=1e-6)
    assert {t.q for t in alone.trace} == {None}
