"""Beam search gives the outputs and scores of transformers, and the best of all by enumeration."""

import dataclasses
import itertools
import math
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding import BeamOptions, LogitsTransform, counters
from speculative_t5.decoding.history import NO_TOKEN
from speculative_t5.decoding.sampling import Sampler

import mlx.core as mx
import numpy as np
import pytest
from beams import assert_same, load_both, random_prompts, reference_search, search
from checkpoints import refused
from conftest import (
    EOS,
    output_distribution,
    output_logits,
    tiny,
    tiny_draft,
    tiny_model,
)
from reference import ENDINGS

FAMILIES = ("t5", "t5_v1_1", "umt5", "byt5", "gpt2")
OPTIONS = [
    BeamOptions(num_beams, length_penalty, early_stopping, num_beams)
    for num_beams, early_stopping, length_penalty in itertools.product(
        (2, 4, 8), (False, True, "never"), (0.0, 1.0, 2.0, -0.5)
    )
]
MAX_TOKENS = 12


@pytest.fixture(scope="module", params=FAMILIES)
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A family's random model, in transformers and here."""
    return load_both(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.cpu
def test_hypotheses_are_those_of_transformers(both: tuple[Any, Any], request: Any) -> None:
    reference, model = both
    prompts = random_prompts(model, 3)
    first = FAMILIES.index(request.node.callspec.params["both"])
    reasons = set()
    for case, options in enumerate(OPTIONS[first :: len(FAMILIES)]):
        found = search(model, prompts, options, MAX_TOKENS, batch_size=1 + case % 3)
        expected = reference_search(reference, prompts, options, MAX_TOKENS)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours.hypotheses, theirs)
            reasons |= {hypothesis.finish_reason for hypothesis in theirs}
    assert "eos" in reasons


def ruled(contexts: list[list[int]], scores: np.ndarray) -> np.ndarray:
    """Rule out the last two tokens of an output, and favor ids that its length divides."""
    scores = scores.copy()
    for row, context in zip(scores, contexts, strict=True):
        row[:: len(context)] += 2
        row[context[-2:]] = -math.inf
    return scores


@pytest.mark.cpu
def test_a_transform_sees_what_a_logits_processor_sees(both: tuple[Any, Any]) -> None:
    import torch

    def ours(tokens: mx.array, scores: mx.array) -> mx.array:
        assert scores.dtype == mx.float32 and scores.shape[0] == 1
        return mx.array(ruled([tokens.tolist()], np.array(scores)))  # type: ignore[list-item]

    def theirs(ids: Any, scores: Any) -> Any:
        return torch.from_numpy(ruled(ids.tolist(), scores.numpy()))

    reference, model = both
    # Of the same length: transformers would show padding to the processor.
    prompts = [prompt[:3] for prompt in random_prompts(model, 2)]
    options = BeamOptions(3, num_return_sequences=2)
    transform = LogitsTransform(processors=(ours,))
    found = search(model, prompts, options, MAX_TOKENS, transform=transform)
    expected = reference_search(reference, prompts, options, MAX_TOKENS, [theirs])
    for each, hypotheses in zip(found, expected, strict=True):
        assert_same(each.hypotheses, hypotheses)


DEAD_ENDS = ("once each", "nothing after the end", "dead", "dead or ended")
SEARCHED = [(1.0, "t5", None), (-0.5, "t5", None), (1.0, "qwen3", None)]
SEARCHED += [(0.0, "t5", name) for name in DEAD_ENDS]


@pytest.mark.parametrize(("length_penalty", "kind", "name"), SEARCHED)
def test_beams_for_all_outputs_find_the_best_of_all(
    length_penalty: float, kind: str, name: str | None
) -> None:
    """With a transform all but those that come to a dead end, by the scores without it."""
    model, prompt, transform = tiny(kind, vocab_size=3, seed=2), [2, 1], ENDINGS.get(name or "")
    masses = output_distribution(model, prompt, 3, Sampler(1.0))
    allowed = output_distribution(model, prompt, 3, Sampler(1.0, transform=transform))
    options = BeamOptions(27, length_penalty, "never", 27)
    (found,) = search(model, [prompt], options, 3, transform=transform)
    ends = [(EOS,) * (each.finish_reason == "eos") for each in found.hypotheses]
    outputs = [(*h.tokens, *end) for h, end in zip(found.hypotheses, ends, strict=True)]
    assert sorted(outputs) == sorted(o for o, p in allowed.items() if p and NO_TOKEN not in o)
    scores = [hypothesis.score for hypothesis in found.hypotheses]
    assert scores == sorted(scores, reverse=True)
    expected = [math.log(masses[output]) / len(output) ** length_penalty for output in outputs]
    np.testing.assert_allclose(scores, expected, rtol=1e-4)


@pytest.mark.parametrize("kind", ["t5", "qwen3"])
def test_rows_are_repeated_and_reordered_with_their_caches(kind: str) -> None:
    model = tiny(kind, vocab_size=20, layers=2, seed=3)
    prompts, rng = [[5, 9, 7, 5, 1], [4, 4, 1]], np.random.default_rng(0)
    session, contexts = model.start(prompts)
    rows = [(prompt, context[-1:]) for prompt, context in zip(prompts, contexts, strict=True)]
    tokens = [context[-1] for context in contexts]
    for order in ([0, 0, 0, 1, 1, 1], [0, 2, 0, 5, 4, 3], [0, 1, 2], [2, 0, 2, 1]):
        logits = session.step(mx.array(tokens)[:, None])
        for (prompt, fed), found in zip(rows, logits[:, -1], strict=True):
            expected = output_logits(model, prompt, [fed[1:]])[0, -1]
            assert mx.allclose(found, expected, atol=1e-3)
        session.select(order)
        tokens = rng.integers(2, 20, len(order)).tolist()
        rows = [(rows[i][0], [*rows[i][1], token]) for i, token in zip(order, tokens, strict=True)]
    # Rows that shared a source get others.
    session.select([0, 0, 3, 3])
    session.truncate([0] * 4)
    contexts = session.replace([1], session.encode([[8, 8, 2]]))
    assert session.lengths[1] == len(contexts[0]) - 1
    if kind == "t5":
        logits = session.step(mx.zeros((4, 1), mx.int32))[:, -1]
        for prompt, found in zip((rows[0][0], [8, 8, 2]), logits, strict=False):
            assert mx.allclose(found, output_logits(model, prompt, [()])[0, -1], atol=1e-3)


def test_a_step_waits_once() -> None:
    model = tiny("t5", vocab_size=20, layers=2, seed=3)
    before = counters.syncs
    (found,) = search(model, [[5, 9, 1]], BeamOptions(3), 9)
    assert counters.syncs - before == found.stats.rounds > 1


def test_outputs_end_where_the_model_reads_no_further() -> None:
    model = tiny("gpt2", vocab_size=20, layers=2, seed=26)
    model.info = dataclasses.replace(model.info, max_context=12)
    prompts = [[5, 9, 7, 5, 4], [5, 9]]
    found = search(model, prompts, BeamOptions(3, 5.0, "never"), 20)
    assert [len(result.hypotheses[0].tokens) for result in found] == [8, 11]
    assert {result.hypotheses[0].finish_reason for result in found} == {"length"}


# Through `SpeculativeDecoder`; test_ends.py has the command line.

PROMPTS = [[6, 2, 3, EOS], [4, 4, 8, 9, EOS], [2, EOS], [9, 13, 5, EOS], [7, 3, 3, 11, 2, EOS]]


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_model(vocab_size=20, layers=2, seed=3))


@pytest.mark.cpu
def test_outputs_are_in_the_order_of_prompts_and_scores(decoder: SpeculativeDecoder) -> None:
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_tokens": 15}
    found = decoder.generate_batch(PROMPTS, **options)
    for out in found:
        (other,) = out.alternatives
        assert out.score is not None and other.score is not None and out.score >= other.score
        assert out.stats.rounds >= out.stats.emitted and not out.stats.drafted
    indices = dict(decoder.iter_batch(enumerate(PROMPTS), batch_size=7, **options))
    assert [indices[i].tokens for i in range(5)] == [out.tokens for out in found]


@pytest.mark.cpu
def test_stop_ids_end_beams_as_eos_does(decoder: SpeculativeDecoder) -> None:
    reasons = set()
    for prompt in PROMPTS:
        whole = decoder.generate(prompt, num_beams=3, max_tokens=15)
        ids = whole.tokens[2:5:2]
        best = decoder.generate(
            prompt, num_beams=3, num_return_sequences=3, max_tokens=15, stop_token_ids=ids
        )
        for out in (best, *best.alternatives):
            assert not {*ids}.intersection(out.tokens)
            assert out.stats.emitted == len(out.tokens) + (out.finish_reason != "length")
            reasons.add(out.finish_reason)
    assert "stop" in reasons


@pytest.mark.cpu
def test_beams_do_not_go_with_drafts_and_steady_passes(decoder: SpeculativeDecoder) -> None:
    target: Any = decoder.model
    for other in (
        SpeculativeDecoder(target, tiny_draft(target)),
        SpeculativeDecoder(target, "lookup"),
        SpeculativeDecoder(target, steady=True),
    ):
        with refused("does not go with"):
            other.generate(PROMPTS[0], num_beams=2)
    lookup = SpeculativeDecoder(target, "lookup")
    plain = lookup.generate(PROMPTS[0], num_beams=2, speculative=False)
    assert plain.tokens == decoder.generate(PROMPTS[0], num_beams=2).tokens
