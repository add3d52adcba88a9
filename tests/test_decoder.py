"""The loop on tiny random models: greedy identity, distribution of outputs, cuts, counting."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding import verify
from speculative_t5.decoding.draft import Draft
from speculative_t5.decoding.drafters import ModelDrafter
from speculative_t5.decoding.loop import cut
from speculative_t5.decoding.results import Stats
from speculative_t5.decoding.sampling import Sampler, round_keys
from speculative_t5.decoding.verify import Verdict, verify_tokens
from speculative_t5.generation import GenerationOptions

import mlx.core as mx
import numpy as np
import pytest
from conftest import EOS, KINDS, VARIED, output_law, tiny, tiny_draft, tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


PROMPTS = [[3, 4, 2, 1], [2, 1], [4, 4, 3, 3, 2, 4, 1], [3, 1], [2, 3, 4, 1]]


def models(kind: str, **options: Any) -> tuple[Any, Any]:
    """A target and a draft, which differ enough for all planted bugs to show."""
    seed = {"t5": 1, "qwen3": 12}[kind]
    return tiny(kind, **options), tiny(kind, seed=seed, **options)


# 85 outputs, 8,000 samples: the expected distance is below sqrt(85 / 8,000) / 2 = 0.052.
COUNT, TOLERANCE = 8_000, 0.055


def sampled_distance(
    engine: SpeculativeDecoder,
    prompt: list[int],
    count: int,
    *,
    max_tokens: int = 3,
    batch_size: int = COUNT,
    **options: Any,
) -> float:
    """Total variation between sampled whole outputs and their exact law."""
    law = output_law(engine.model, prompt, max_tokens, Sampler(1.0, **options))  # type: ignore
    assert sum(law.values()) == pytest.approx(1)
    outputs = engine.generate_batch(
        [prompt] * count, batch_size=batch_size, max_tokens=max_tokens, temperature=1, **options
    )
    seen = Counter((*o.tokens, EOS) if o.finish_reason == "eos" else (*o.tokens,) for o in outputs)
    assert seen.keys() <= law.keys()
    return sum(abs(seen[output] / count - mass) for output, mass in law.items()) / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("num_draft", [1, 2])
def test_sampled_outputs_are_distributed_as_the_target(
    num_draft: int, rule: Any, kind: str
) -> None:
    engine = SpeculativeDecoder(*models(kind), num_draft=num_draft, verify=rule)
    assert sampled_distance(engine, PROMPTS[0], COUNT) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize(("num_draft", "batch_size"), [(4, COUNT), ("auto", 100)])
def test_longer_drafts_keep_the_distribution(
    num_draft: Any, batch_size: int, lookup: bool, kind: str
) -> None:
    """Outputs of up to 5 of 3 tokens: 63 of them; "auto" mixes lengths, 0 among them."""
    engine = SpeculativeDecoder(*models(kind, vocab_size=3), num_draft=num_draft, lookup=lookup)
    distance = sampled_distance(engine, [2, 2, 1], COUNT, max_tokens=5, batch_size=batch_size)
    assert distance < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_lookups_keep_the_distribution(with_model: bool, rule: Any, kind: str) -> None:
    """Alone and after a model: drafts whose length hangs on the tokens in them."""
    target, draft = models(kind)
    draft = draft if with_model else None
    engine = SpeculativeDecoder(target, draft, num_draft=2, verify=rule, lookup=True)
    assert sampled_distance(engine, [3, 4, 2, 3, 3, 2, 4, 1], COUNT) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.8}])
def test_filtered_outputs_are_distributed_as_the_filtered_target(
    options: dict[str, Any], kind: str
) -> None:
    engine = SpeculativeDecoder(*models(kind), num_draft=2)
    assert sampled_distance(engine, PROMPTS[0], COUNT, **options) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_regular_decoding_is_distributed_as_the_target(kind: str) -> None:
    assert sampled_distance(SpeculativeDecoder(tiny(kind)), PROMPTS[0], COUNT) < TOLERANCE


def with_argmax_for_residual(rule: Any) -> Any:
    def bug(draft: Draft, p: mx.array, keys: mx.array, **options: Any) -> Verdict:
        verdict = rule(draft, p, keys, **options)
        at = verdict.num_accepted[:, None]
        best = mx.take_along_axis(mx.argmax(p, axis=-1), at, axis=1)[:, 0].astype(mx.int32)
        rejected = verdict.num_accepted < draft.tokens.shape[1]
        return Verdict(verdict.num_accepted, mx.where(rejected, best, verdict.next_token))

    return bug


def with_delta(rule: Any) -> Any:
    return lambda draft, p, keys, **options: verify_tokens(draft, p, keys, delta=0.3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("bug", [with_argmax_for_residual, with_delta])
def test_the_distribution_test_fails_for_planted_bugs(
    bug: Any, rule: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "verify_block" if rule == "block" else "verify_tokens"
    monkeypatch.setattr(verify, name, bug(getattr(verify, name)))
    engine = SpeculativeDecoder(*models(kind), num_draft=2, verify=rule)
    assert sampled_distance(engine, PROMPTS[0], COUNT) > 1.5 * TOLERANCE


# Of Qwen3's draft the first two tokens are most of it, and leaving out the others hardly shows.
@pytest.mark.parametrize(("kind", "top_k"), [("t5", 2), ("qwen3", 1)])
def test_the_distribution_test_fails_if_the_draft_is_not_filtered_as_it_says(
    kind: str,
    top_k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens drawn from the plain q, judged by the filtered one."""
    propose = ModelDrafter.propose

    def bug(self: ModelDrafter, *arguments: Any) -> Draft:
        plain = propose(self, *arguments)
        if plain.probs is None:
            return plain  # nothing is drafted
        return replace(plain, probs=Sampler(1.0, top_k=top_k).filter(plain.probs))

    monkeypatch.setattr(ModelDrafter, "propose", bug)
    engine = SpeculativeDecoder(*models(kind), num_draft=2)
    assert sampled_distance(engine, PROMPTS[0], COUNT) > 1.5 * TOLERANCE


def same_for_all_places(keys: mx.array, num_places: int) -> mx.array:
    return mx.broadcast_to(keys[:, None], (len(keys), num_places, 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["drafters", "verify"])
def test_the_distribution_test_fails_if_places_share_their_key(
    place: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"speculative_t5.decoding.{place}.place_keys", same_for_all_places)
    engine = SpeculativeDecoder(*models(kind), num_draft=2, verify="token")
    assert sampled_distance(engine, PROMPTS[0], COUNT) > 1.5 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("same", ["round", "index", "purpose"])
def test_the_distribution_test_fails_if_keys_are_used_twice(
    same: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(seed: int, index: int, round_: int) -> np.ndarray:
        index, round_ = (index // 40, round_) if same == "index" else (index, 0)
        keys = round_keys(seed, index, round_)
        return keys[[0, 0]] if same == "purpose" else keys

    monkeypatch.setattr("speculative_t5.decoding.loop.round_keys", bug)
    engine = SpeculativeDecoder(*models(kind), num_draft=2, verify="token")
    assert sampled_distance(engine, PROMPTS[0], COUNT) > 1.5 * TOLERANCE


@pytest.fixture(scope="module", params=KINDS)
def target(request: Any) -> Any:
    """Its greedy outputs vary; some end by EOS, some at the limit."""
    return tiny(request.param, vocab_size=20, layers=2, seed=VARIED[request.param])


def random_prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[*rng.integers(2, 20, rng.integers(1, 12)).tolist(), EOS] for _ in range(count)]


@pytest.mark.parametrize("num_draft", [1, 3, 5, 8])
@pytest.mark.parametrize("draft_vocab", [16, 20, 24])
def test_greedy_speculative_is_greedy_regular(
    target: Any, num_draft: int, draft_vocab: int
) -> None:
    """Also with drafts whose vocabulary is padded less or more than the target's."""
    draft = tiny_draft(target, vocab_size=draft_vocab)
    engine = SpeculativeDecoder(target, draft, num_draft=num_draft)
    endings, rates = set(), set()
    for prompt in random_prompts(8):
        regular = engine.generate(prompt, max_tokens=24, speculative=False)
        speculative = engine.generate(prompt, max_tokens=24)
        assert speculative.tokens == regular.tokens
        assert speculative.finish_reason == regular.finish_reason
        endings.add(regular.finish_reason)
        rates.add(speculative.stats.acceptance_rate)
    assert endings == {"eos", "length"}
    assert len(rates) > 2, "the drafts should be accepted now and then"


@pytest.mark.parametrize("with_model", [False, True])
def test_lookups_keep_greedy_outputs(target: Any, with_model: bool) -> None:
    draft = tiny_draft(target) if with_model else None
    engine = SpeculativeDecoder(target, draft, num_draft=3, lookup=True)
    # Sources that hold their own outputs: what is looked up after a model is accepted now and then.
    prompts = random_prompts(9)
    prompts += [[*engine.generate(p, max_tokens=24).tokens, EOS] for p in prompts]
    regular = [engine.generate(p, max_tokens=24, speculative=False) for p in prompts]
    single = [engine.generate(p, max_tokens=24) for p in prompts]
    batch = engine.generate_batch(prompts, max_tokens=24)
    assert [o.tokens for o in single] == [o.tokens for o in batch] == [o.tokens for o in regular]
    assert [o.stats.rounds for o in single] == [o.stats.rounds for o in batch]
    assert sum(o.stats.accepted for o in single) > 0
    assert len({n for o in single for n in o.stats.num_drafted}) > 2, "drafts should be ragged"
    if with_model:
        assert max(n for o in batch for n in o.stats.num_accepted) > 3, "beyond the model's own"


def test_a_draft_named_lookup_needs_no_model(target: Any) -> None:
    out = SpeculativeDecoder(target, "lookup").generate([10, 1], max_tokens=20)
    assert out.stats.drafted > 0


def test_a_perfect_draft_is_always_accepted(target: Any) -> None:
    out = SpeculativeDecoder(target, target, num_draft=4).generate([10, 1], max_tokens=15)
    assert out.stats.acceptance_rate == 1
    assert out.stats.rounds == 3
    assert out.stats.tokens_per_round == 5


def test_stream_gives_the_tokens_of_generate(target: Any) -> None:
    engine = SpeculativeDecoder(target, tiny_draft(target))
    sampled, rounds = {"temperature": 1.0, "seed": 3}, []
    several = ({}, sampled, sampled | {"top_k": 5, "top_p": 0.9})
    for prompt, options in product(([5, 6, 1], [10, 1]), several):
        out = engine.generate(prompt, max_tokens=30, **options)
        chunks = list(engine.stream(prompt, max_tokens=30, **options))
        assert [t for chunk in chunks for t in chunk.tokens] == out.tokens
        assert chunks[-1].finish_reason == out.finish_reason
        assert all(chunk.finish_reason is None for chunk in chunks[:-1])
        assert sum(chunk.num_accepted for chunk in chunks) == out.stats.accepted
        assert len(chunks) == out.stats.rounds
        rounds.append(len(chunks))
    assert max(rounds) > 1


def test_seeds_reproduce_and_differ(target: Any) -> None:
    engine = SpeculativeDecoder(target, tiny_draft(target))
    runs = [engine.generate([10, 1], max_tokens=20, temperature=5.0, seed=s) for s in (1, 1, 2)]
    assert runs[0].tokens == runs[1].tokens != runs[2].tokens


def test_top_k_one_is_greedy(target: Any) -> None:
    engine = SpeculativeDecoder(target, tiny_draft(target))
    greedy = engine.generate([10, 1], max_tokens=20)
    for options in ({"top_k": 1}, {"top_p": 1e-6}):
        out = engine.generate([10, 1], max_tokens=20, temperature=5.0, **options)
        assert out.tokens == greedy.tokens


def test_cut_at_eos_and_at_the_limit() -> None:
    ends = frozenset({EOS, 9})
    assert cut([5, 9, EOS], ends, 4) == ([5, 9], "eos")
    assert cut([5, 6, 7], ends, 9) == ([5, 6, 7], None)
    assert cut([5, EOS, 7], ends, 9) == ([5, EOS], "eos")
    assert cut([5, 6, 7], ends, 2) == ([5, 6], "length")
    assert cut([5, 6, EOS], ends, 3) == ([5, 6, EOS], "eos")
    assert cut([5, 6, EOS], ends, 2) == ([5, 6], "length")


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_max_tokens_is_exact_and_cut_drafts_are_counted(target: Any, max_tokens: int) -> None:
    engine = SpeculativeDecoder(target, target, num_draft=4)
    whole = engine.generate([10, 1], max_tokens=20)
    out = engine.generate([10, 1], max_tokens=max_tokens)
    assert out.tokens == whole.tokens[:max_tokens]
    assert out.finish_reason == "length"
    assert out.stats.emitted == max_tokens
    assert out.stats.accepted <= out.stats.drafted


def test_counting_without_a_draft(target: Any) -> None:
    out = SpeculativeDecoder(target).generate([5, 9, 1], max_tokens=6)
    assert (out.stats.rounds, out.stats.drafted) == (out.stats.emitted, 0)
    assert out.stats.acceptance_rate == 0
    assert out.stats.tokens_per_second > 0
    assert Stats().tokens_per_second == Stats().tokens_per_round == 0


def test_a_generation_tells_its_rounds(target: Any) -> None:
    out = SpeculativeDecoder(target, tiny_draft(target), num_draft=3).generate([10, 1])
    stats = out.stats
    assert stats.num_draft[0] == 3 and len(stats.num_draft) == stats.rounds
    assert sum(stats.num_drafted) == stats.drafted and max(stats.num_drafted) == 3
    assert stats.seconds > 0
    alone = SpeculativeDecoder(target).generate([10, 1]).stats
    assert set(alone.num_draft) == {0}


@pytest.mark.parametrize("kind", KINDS)
def test_delta_one_emits_the_draft(kind: str) -> None:
    target = tiny(kind, vocab_size=20, layers=2, seed=3)
    other = tiny(kind, vocab_size=20, seed=8)
    engine = SpeculativeDecoder(target, other, num_draft=4, delta=1.0)
    alone = SpeculativeDecoder(other).generate([10, 1], max_tokens=15)
    out = engine.generate([10, 1], max_tokens=15)
    assert out.stats.accepted == out.stats.drafted == 12
    assert out.tokens[:4] == alone.tokens[:4]
    out = engine.generate([10, 1], max_tokens=15, temperature=1.0)
    assert out.stats.accepted == out.stats.drafted >= 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_of_the_first_ids_proposes_no_others(target: Any, temperature: float) -> None:
    """The output is the target's own all the same."""
    draft, few = tiny_draft(target), 8
    decoder = SpeculativeDecoder(target, draft, num_draft=3, draft_vocab=few)
    alone = SpeculativeDecoder(target)
    for prompt in ([10, 1], [5, 9, 1], [7, 1]):
        out = decoder.generate(prompt, max_tokens=20, temperature=temperature)
        if temperature == 0:
            assert out.tokens == alone.generate(prompt, max_tokens=20).tokens
        plan = decoder.plan(GenerationOptions(max_tokens=20, temperature=temperature))
        plan.drafter.start([prompt])
        keys = mx.array([[1, 2]], dtype=mx.uint32) if temperature else None
        proposed = plan.drafter.propose([[0]], 3, keys)
        assert max(proposed.tokens.tolist()[0]) < few
        if proposed.probs is not None:
            assert mx.all(proposed.probs[..., few:] == 0) and proposed.probs.shape[-1] == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocab": 1}, "draft_vocab must be above 1, the id that ends outputs, got 1"),
        ({"num_draft": 0}, "num_draft must be an integer of at least 1 or 'auto', got 0"),
        ({"num_draft": "many"}, "num_draft must be an integer of at least 1 or 'auto', got 'many'"),
        ({"draft": "small"}, "draft must be a loaded model, 'lookup' or None, got 'small'"),
        ({"draft": 1}, "draft must be a loaded model, 'lookup' or None, got 1"),
        ({"min_ngram": 0}, "min_ngram must be an integer from 1 to 16, got 0"),
        ({"min_ngram": 3, "max_ngram": 2}, "max_ngram must be an integer from 3 to 16, got 2"),
        ({"max_ngram": 17}, "max_ngram must be .* to 16, got 17"),
        ({"max_ngram": 1.5}, "max_ngram must be an integer .* got 1.5"),
        ({"delta": 1.5}, "delta must be between 0 and 1, got 1.5"),
        ({"delta": float("nan")}, "delta must be between 0 and 1, got nan"),
        ({"verify": "loud"}, "verify must be 'auto', 'token' or 'block', got 'loud'"),
        ({"verify": "block", "delta": 0.1}, "verify 'block' .* takes no delta above 0, got 0.1"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(tiny_model(), **options)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1], {"temperature": -1.0}, "temperature must be 0 or at least 1e-05, got -1.0"),
        ([1], {"temperature": float("inf")}, "temperature must be 0 or at least"),
        ([1], {"temperature": 1e-46}, "temperature must be 0 or at least 1e-05"),
        ([1], {"top_k": -1}, "top_k must be an integer of at least 0"),
        ([1], {"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ([1], {"seed": -1}, "seed must be an integer from 0 to"),
        ([1], {"max_tokens": 1.5}, "max_tokens must be an integer of at least 1, got 1.5"),
        ([1], {"max_tokens": "5"}, "max_tokens must be an integer of at least 1, got '5'"),
        ([1], {"max_tokens": None}, "max_tokens must be an integer of at least 1, got None"),
        ([1], {"seed": 1.5}, "seed must be an integer from 0 to .* got 1.5"),
        ([1], {"temperature": "a"}, "temperature must be a number, got 'a'"),
        ([1], {"top_p": None}, "top_p must be a number, got None"),
        ([1], {"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ([], {}, "the prompt is empty"),
        (" \n", {}, "the prompt is empty"),
        ([3, 5], {}, "prompt ids must be from 0 to 4, got 5"),
        ("text", {}, "needs a tokenizer"),
    ],
)
def test_bad_prompts_and_options_are_refused_at_the_call(
    prompt: Any, options: dict[str, Any], message: str
) -> None:
    engine = SpeculativeDecoder(tiny_model())
    for call in (engine.generate, engine.stream):
        with pytest.raises(ValueError, match=message):
            call(prompt, **options)
