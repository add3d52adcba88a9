"""Whole outputs of tiny random models: greedy identity, sampled distributions, cuts, counts.

test_exact.py and test_exact_loop.py prove the rules by enumeration. Sampling is for what
enumeration does not see: keys, lookups, and draft lengths that change.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding.draft_length import Outcome, Schedule
from speculative_t5.decoding.loop import decode
from speculative_t5.decoding.sampling import Groups, Sampler
from speculative_t5.generation import GenerationOptions
from speculative_t5.models import SharingDraft

import mlx.core as mx
import numpy as np
import pytest
from conftest import (
    EOS,
    PAIRS,
    VARIED,
    output_distribution,
    tiny_draft,
    tiny_pair,
    unrelated_pair,
)

# 85 outputs, 8,000 samples: the expected distance is below sqrt(85 / 8,000) / 2 = 0.052. With 63
# outputs it is below 0.044.
COUNT, TOLERANCE = 8_000, 0.055


COPYING, OTHER = (3, 4, 2, 3, 3, 2, 4, 1), (3, 4, 2, 1)
PROMPTS = {"lookup": COPYING, "both": COPYING, "model": OTHER, "none": OTHER, "small": (2, 2, 1)}


@cache
def models(kind: str, vocab_size: int) -> tuple[Any, Any]:
    """Return a target and a draft that differ enough for all planted bugs to show."""
    seed = {"t5": 1, "qwen3": 12, "sharing": 1}[kind]
    return unrelated_pair(kind, vocab_size=vocab_size, seeds=(0, seed))


def sampler_of(options: GenerationOptions) -> Sampler:
    return Sampler(options.temperature, options.top_k, options.top_p)


@cache
def exact_distribution(kind: str, size: int, prompt: Any, options: GenerationOptions) -> Any:
    target, _ = models(kind, size)
    return output_distribution(target, list(prompt), options.max_tokens, sampler_of(options))


class FollowingCounts:
    """Lengths from 0 to 4 that depend on how many tokens the last round accepted."""

    def __init__(self) -> None:
        self._num_draft = 3

    def next(self, remaining: int) -> int:
        return min(self._num_draft, remaining - 1)

    def observe(self, outcome: Outcome) -> None:
        self._num_draft = sum(outcome.num_accepted) % 5


def sampled_distance(
    kind: str,
    drafter: str,
    *,
    vocab_size: int = 5,
    max_tokens: int = 3,
    filters: dict[str, Any] | None = None,
    schedule: Schedule | None = None,
    **options: Any,
) -> float:
    """Return the total variation between sampled outputs and their exact distribution."""
    target, draft = models(kind, vocab_size)
    decoder = SpeculativeDecoder(
        target,
        draft if drafter in ("model", "both") else None,
        lookup=drafter in ("lookup", "both"),
        **options,
    )
    generation = GenerationOptions(max_tokens=max_tokens, temperature=1.0, **filters or {})
    plan = decoder.plan()
    if schedule:
        plan = replace(plan, schedule=schedule)
    prompt = PROMPTS["small" if vocab_size == 3 else drafter]
    requests = decoder.requests(enumerate([prompt] * COUNT), generation)
    rounds = decode(target, requests, plan, batch_size=500 if schedule else COUNT)
    outputs = [(*r.output, *[EOS] * (r.finish_reason == "eos")) for r in rounds if r.finish_reason]
    exact = exact_distribution(kind, vocab_size, prompt, generation)
    assert len(outputs) == COUNT and set(outputs) <= exact.keys()
    seen = Counter(outputs)
    return sum(abs(seen[output] / COUNT - mass) for output, mass in exact.items()) / 2


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("none", {}),
        ("model", {"num_draft": 2, "verify": "token"}),
        ("lookup", {"num_draft": 2, "verify": "block"}),
        ("both", {"num_draft": 2, "filters": {"top_k": 3, "top_p": 0.8}}),
        ("both", {"schedule": FollowingCounts(), "vocab_size": 3, "max_tokens": 5}),
    ],
)
def test_sampled_outputs_follow_the_targets_distribution(
    kind: str, drafter: str, options: dict[str, Any]
) -> None:
    assert sampled_distance(kind, drafter, **options) < TOLERANCE


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: Any) -> Any:
    """A model whose greedy outputs vary, some end with EOS, some at the limit; and a draft."""
    kind = request.param
    return tiny_pair(kind, vocab_size=20, layers=2, seed=VARIED[kind])


@pytest.fixture(scope="module")
def target(pair: Any) -> Any:
    return pair[0]


@pytest.fixture(scope="module")
def draft(pair: Any) -> Any:
    return pair[1]


def random_prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[*rng.integers(2, 20, rng.integers(1, 12)).tolist(), EOS] for _ in range(count)]


@pytest.fixture(scope="module")
def plain(target: Any) -> list[Any]:
    """Greedy outputs of the target alone."""
    decoder = SpeculativeDecoder(target)
    return [decoder.generate(prompt, max_tokens=24) for prompt in random_prompts(9)]


# Draft vocabularies are padded less than the target's 20, as much, and more.
@pytest.mark.parametrize(("num_draft", "draft_vocab"), [(1, 20), (3, 16), (8, 24)])
def test_greedy_outputs_are_those_of_plain_decoding(
    target: Any, draft: Any, plain: list[Any], num_draft: int, draft_vocab: int
) -> None:
    limit = None
    if isinstance(draft, SharingDraft):
        limit = draft_vocab  # its embedding is the target's, but it may propose fewer
    else:
        draft = tiny_draft(target, vocab_size=draft_vocab)
    decoder = SpeculativeDecoder(target, draft, num_draft=num_draft, draft_vocab=limit)
    outputs = [decoder.generate(prompt, max_tokens=24) for prompt in random_prompts(9)]
    for output, expected in zip(outputs, plain, strict=True):
        assert (output.tokens, output.finish_reason) == (expected.tokens, expected.finish_reason)
    assert {o.finish_reason for o in plain} == {"eos", "length"}
    assert all((o.stats.rounds, o.stats.drafted) == (o.stats.emitted, 0) for o in plain)
    assert len({o.stats.acceptance_rate for o in outputs}) > 2, "drafts should sometimes stand"


@pytest.mark.parametrize("with_model", [False, True])
def test_lookups_keep_greedy_outputs(
    target: Any, draft: Any, plain: list[Any], with_model: bool
) -> None:
    decoder = SpeculativeDecoder(target, draft if with_model else None, num_draft=3, lookup=True)
    # Sources that contain their own outputs, so that lookups after a model are accepted, too.
    prompts = random_prompts(9) + [[*o.tokens, EOS] for o in plain]
    expected = [decoder.generate(p, max_tokens=24, speculative=False).tokens for p in prompts]
    single = [decoder.generate(p, max_tokens=24) for p in prompts]
    batch = decoder.generate_batch(prompts, max_tokens=24)
    assert [o.tokens for o in single] == [o.tokens for o in batch] == expected
    assert [o.stats.rounds for o in single] == [o.stats.rounds for o in batch]
    assert sum(o.stats.accepted for o in single) > 0
    assert len({n for o in single for n in o.stats.num_drafted}) > 2, "drafts should be ragged"
    if with_model:
        assert max(n for o in batch for n in o.stats.num_accepted) > 3, "beyond the model's own"


def test_a_seed_reproduces_an_output_and_another_does_not(target: Any, draft: Any) -> None:
    decoder = SpeculativeDecoder(target, draft)
    runs = [decoder.generate([10, 1], max_tokens=20, temperature=5.0, seed=s) for s in (1, 1, 2)]
    assert runs[0].tokens == runs[1].tokens != runs[2].tokens


@pytest.mark.parametrize("max_tokens", [1, 7])
def test_max_tokens_is_exact_and_cut_drafts_are_counted(target: Any, max_tokens: int) -> None:
    decoder = SpeculativeDecoder(target, target, num_draft=4)
    whole = decoder.generate([10, 1], max_tokens=15)
    assert (whole.stats.acceptance_rate, whole.stats.rounds) == (1, 3), "the target is the draft"
    out = decoder.generate([10, 1], max_tokens=max_tokens)
    assert (out.tokens, out.finish_reason) == (whole.tokens[:max_tokens], "length")
    assert out.stats.emitted == max_tokens and out.stats.accepted <= out.stats.drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_limited_to_the_first_ids_proposes_no_others(
    target: Any, draft: Any, temperature: float
) -> None:
    few, prompt = 8, [5, 9, 1]
    decoder = SpeculativeDecoder(target, draft, num_draft=3, draft_vocab=few)
    drafter = decoder.plan().drafter
    drafter.start([prompt])
    keys = mx.array([[1, 2]], dtype=mx.uint32) if temperature else None
    proposed = drafter.propose([[0]], 3, Groups([Sampler(temperature)]), keys)
    assert max(proposed.tokens.tolist()[0]) < few
    if proposed.probs is not None:
        assert mx.all(proposed.probs[..., few:] == 0) and proposed.probs.shape[-1] == 20
