"""Options that change the target's distribution, stops, several outputs and scores."""

from collections import Counter
from functools import cache
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.generation import GenerationOptions
from speculative_t5.models import T5

import mlx.core as mx
import numpy as np
import pytest
from conftest import (
    EOS,
    KINDS,
    VARIED,
    output_logits,
    tiny_draft,
    tiny_model,
    tiny_pair,
    tiny_sharing,
)
from messages import check_message
from reference import transformed

SIZE, COUNT, LENGTH = 20, 6, 16


def later_is_less(tokens: mx.array, logits: mx.array) -> mx.array:
    """A processor: the last token becomes less probable as the text grows."""
    last = mx.arange(logits.shape[1]) == tokens[-1]
    return logits - 0.2 * tokens.size * last


OPTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_tokens": {"min_tokens": 8},
    "suppress_tokens": {"suppress_tokens": [3, 7]},
    "bad_words": {"bad_words": [[5], [4, 6], [8, 9, 8]]},
    "logit_bias": {"logit_bias": {4: 2.0, 11: -np.inf}},
    "forced_tokens": {"forced_tokens": [9, 2]},
    "logits_processors": {"logits_processors": [later_is_less]},
}
OPTIONS["together"] = {
    name: value for options in OPTIONS.values() for name, value in options.items()
} | {"suppress_tokens": [3]}
OPTIONS["none"] = {}


@cache
def models(kind: str) -> tuple[Any, Any]:
    return tiny_pair(kind, noise=0.2, vocab_size=SIZE, layers=2, seed=VARIED[kind])


def prompts(count: int = COUNT) -> list[list[int]]:
    rngs = map(np.random.default_rng, range(count))
    return [[*rng.integers(2, SIZE, rng.integers(1, 12)).tolist(), EOS] for rng in rngs]


def by_definition(model: Any, decoder: SpeculativeDecoder, prompt: list[int], options: Any) -> Any:
    """Decode greedily by whole passes and the reference in plain Python."""
    transform = decoder.engine.bind(GenerationOptions(**options)).sampler.transform
    before, output = prompt if model.info.is_decoder_only else [0], list[int]()
    while len(output) < LENGTH and EOS not in output:
        found = output_logits(model, prompt, [output])[0, -1].tolist()
        if transform:
            found = transformed(transform, found, [*before, *output], len(before))  # type: ignore[arg-type]
        output.append(int(np.argmax(found)))
    return output


DEFINED = [("t5", name) for name in OPTIONS]
DEFINED += [("qwen3", "together"), ("sharing", "together"), ("sharing", "none")]


@pytest.mark.parametrize(("kind", "name"), DEFINED)
def test_greedy_outputs_are_those_of_the_definition(kind: str, name: str) -> None:
    """With a model, which may have fewer ids, a lookup, both and none; alone and side by side."""
    (target, draft), options = models(kind), OPTIONS[name]
    plain, sources = SpeculativeDecoder(target), prompts(COUNT if kind == "t5" else 3)
    expected = [by_definition(target, plain, prompt, options) for prompt in sources]
    if kind == "t5" and name not in ("forced_tokens", "none"):
        without = [by_definition(target, plain, p, {"min_tokens": 1}) for p in sources]
        assert without != expected, "the option should matter"
    accepted = 0
    ways: list[tuple[Any, dict[str, Any], int]] = [
        (draft, {"draft_vocab": 8}, 5), ("lookup", {}, 1), (draft, {"lookup": True}, 5),
        (None, {}, 5),
    ]  # fmt: skip
    if name == "together":
        ways += [(draft, {"steady": True}, 1), (None, {}, 1)]
    elif kind == "t5" and name == "none":  # vocabularies of the draft are padded differently
        ways += [(tiny_draft(target, vocab_size=size), {}, 1) for size in (16, 24)]
    for drafter, how, size in ways:
        decoder = SpeculativeDecoder(target, drafter, num_draft=4, **how)
        found = decoder.generate_batch(sources, max_tokens=LENGTH, batch_size=size, **options)
        ends = [[EOS] * (out.finish_reason == "eos") for out in found]
        assert [out.tokens + end for out, end in zip(found, ends, strict=True)] == expected
        accepted += sum(out.stats.accepted for out in found)
    assert accepted > 3 * len(sources), "drafts should be accepted under the option, too"


TIED = {"transform": {"logit_bias": {5: 0.5}}, "twin": {"suppress_tokens": [3, 7]}, "none": {}}


@pytest.mark.parametrize("name", TIED)
def test_the_first_of_equal_tokens_is_chosen(name: str) -> None:
    """Each id below 12 has a twin above with the same logits, to the bit."""
    target = tiny_model(vocab_size=24, layers=2, seed=VARIED["t5"])
    head = target.lm_head.weight
    target.lm_head.weight = mx.concatenate([head[:12], head[:12]])
    target.recompile()
    draft, options = tiny_draft(target, noise=0.2), TIED[name]
    plain, sources = SpeculativeDecoder(target), prompts(6)
    expected = [by_definition(target, plain, prompt, options) for prompt in sources]
    assert any(token >= 12 for output in expected for token in output) == (name == "twin")
    for drafter in (draft, "lookup", None):
        decoder = SpeculativeDecoder(target, drafter, num_draft=4)
        found = decoder.generate_batch(sources, max_tokens=LENGTH, batch_size=3, **options)
        ends = [[EOS] * (out.finish_reason == "eos") for out in found]
        assert [out.tokens + end for out, end in zip(found, ends, strict=True)] == expected


HF_NAMES = {
    "repetition_penalty": "repetition_penalty", "no_repeat_ngram_size": "no_repeat_ngram_size",
    "min_tokens": "min_new_tokens", "suppress_tokens": "suppress_tokens",
    "bad_words": "bad_words_ids", "logit_bias": "sequence_bias",
    "forced_tokens": "forced_bos_token_id",
}  # fmt: skip
HF_OPTIONS: dict[str, dict[str, Any]] = {
    name: {name: value} for name, value in OPTIONS["together"].items() if name in HF_NAMES
} | {
    "forced_tokens": {"forced_tokens": [9]},
    "logit_bias": {"logit_bias": {4: 2.0, 11: -50.0}},
}
HF_OPTIONS["together"] = {
    name: value for options in HF_OPTIONS.values() for name, value in options.items()
}


def for_transformers(options: dict[str, Any]) -> dict[str, Any]:
    made = {HF_NAMES[name]: value for name, value in options.items()}
    if "sequence_bias" in made:
        made["sequence_bias"] = [[[i], b] for i, b in made["sequence_bias"].items()]
    if "forced_bos_token_id" in made:
        (made["forced_bos_token_id"],) = made["forced_bos_token_id"]
    return made


@pytest.mark.parametrize(
    ("name", "num_beams"),
    [*((name, 1) for name in HF_OPTIONS), pytest.param("together", 4, marks=pytest.mark.cpu)],
)
def test_outputs_are_those_of_transformers(name: str, num_beams: int, pair: tuple[Any, T5]) -> None:
    """Of two families; of a search outputs and scores of 3 of 4 beams."""
    import torch

    torch.set_num_threads(1)  # tests run side by side
    reference, target = pair
    draft = tiny_sharing(target, noise=0.05) if num_beams == 1 else None
    beams = {"num_return_sequences": 3, "length_penalty": 0.7} if num_beams > 1 else {}
    length = LENGTH if num_beams == 1 else 12
    rng = np.random.default_rng(3)
    sources = [[*rng.integers(3, 300, rng.integers(2, 14)).tolist(), 1] for _ in range(4)]
    options: dict[str, Any] = {"max_tokens": length, "num_beams": num_beams} | beams
    decoder = SpeculativeDecoder(target, draft, num_draft=4)
    found = decoder.generate_batch(sources, **options, **HF_OPTIONS[name])
    assert draft is None or sum(out.stats.accepted for out in found) > 2
    for source, best in zip(sources, found, strict=True):
        expected = reference.generate(
            torch.tensor([source]),
            max_new_tokens=length,
            do_sample=False,
            num_beams=num_beams,
            use_cache=False,  # its cache has as many layers as the encoder
            output_scores=True,
            return_dict_in_generate=True,
            **beams,
            **for_transformers(HF_OPTIONS[name]),
        )
        outputs = [best, *best.alternatives]
        for out, ids in zip(outputs, expected.sequences.tolist(), strict=True):
            tokens = out.tokens + [1] * (out.finish_reason == "eos")
            assert tokens == ids[1 : len(tokens) + 1] and {*ids[len(tokens) + 1 :]} <= {0, 1}
        if num_beams > 1:
            scores = [out.score for out in outputs]
            assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_are_those_of_the_transformed_distribution(kind: str) -> None:
    (target, draft), prompt = models(kind), prompts()[1]
    options: dict[str, Any] = {
        "repetition_penalty": 1.7, "temperature": 0.8, "forced_tokens": [9], "min_tokens": 8,
    }  # fmt: skip
    decoder = SpeculativeDecoder(target, draft)
    done = decoder.generate(prompt, max_tokens=12, probabilities=True, **options)
    assert len(done.tokens) > 4 and done.trace[0].p == done.trace[0].q == 1.0
    transform = decoder.engine.bind(GenerationOptions(**options)).sampler.transform
    before = prompt if target.info.is_decoder_only else [0]
    for model, name in ((target, "p"), (draft, "q")):
        logits = output_logits(model, prompt, [done.tokens[:-1]])[0].tolist()
        for i, token in enumerate(done.trace):
            found = transformed(transform, logits[i], [*before, *done.tokens[:i]], len(before))  # type: ignore[arg-type]
            probs = np.exp((np.array(found) - max(found)) / 0.8)
            assert getattr(token, name) == pytest.approx(probs[token.id] / probs.sum(), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_logarithms_of_the_models_probabilities(kind: str) -> None:
    target, draft = models(kind)
    decoder, found = SpeculativeDecoder(target, draft), []
    for prompt in prompts(6):
        done = decoder.generate(
            prompt, max_tokens=20, temperature=0.7, top_k=5, scores=True, logit_bias={4: 1.0}
        )
        tokens = done.tokens + [EOS] * (done.finish_reason == "eos")
        logits = np.array(output_logits(target, prompt, [tokens[:-1]])[0], np.float64)
        chosen = logits[range(len(tokens)), tokens]
        expected = (chosen - np.log(np.exp(logits).sum(axis=1))).sum()
        assert done.score == pytest.approx(expected, abs=1e-3)
        found.append(done.finish_reason)
    assert set(found) == {"eos", "length"}
    assert decoder.generate(prompts()[0], max_tokens=5).score is None


def test_several_outputs_are_those_of_several_prompts() -> None:
    decoder = SpeculativeDecoder(*models("t5"))
    options: dict[str, Any] = {"max_tokens": 9, "temperature": 1.5, "seed": 3, "scores": True}
    found = decoder.generate_batch(prompts(4), num_return_sequences=3, batch_size=5, **options)
    sources = [(3 * i + j, prompt) for i, prompt in enumerate(prompts(4)) for j in range(3)]
    alone = dict(decoder.iter_batch(sources, batch_size=1, **options))
    for i, out in enumerate(found):
        several = [out, *out.alternatives]
        assert [o.tokens for o in several] == [alone[3 * i + j].tokens for j in range(3)]
        for j, one in enumerate(several):
            assert one.score == pytest.approx(alone[3 * i + j].score, abs=1e-4)
    assert len({tuple(o.tokens) for o in found[0].alternatives}) > 1
    first = decoder.generate(prompts()[0], **options)
    assert found[0].tokens == first.tokens and not first.alternatives


def test_a_processor_that_raises_stop_iteration_ends_in_an_error() -> None:
    def grammar(tokens: mx.array, logits: mx.array) -> mx.array:
        return next(iter(()))

    decoder = SpeculativeDecoder(tiny_model(vocab_size=SIZE))
    for call in (decoder.generate, lambda *a, **k: list(decoder.stream(*a, **k))):
        with pytest.raises(RuntimeError) as error:
            call([3, EOS], logits_processors=[grammar])
        assert isinstance(error.value.__cause__, StopIteration)


@pytest.mark.parametrize(("delta", "temperature"), [(0.3, 0.0), (1.0, 0.0), (1.0, 1.0)])
def test_leniency_never_accepts_what_is_forbidden(delta: float, temperature: float) -> None:
    target, draft = models("t5")
    options: dict[str, Any] = {"max_tokens": LENGTH, "temperature": temperature}
    whole = SpeculativeDecoder(target, draft, delta=delta).generate_batch(prompts(), **options)
    common = [token for token, _ in Counter(t for o in whole for t in o.tokens).most_common(4)]
    other = min({*range(2, SIZE)}.difference(common))
    for drafter in (draft, "lookup"):
        decoder = SpeculativeDecoder(target, drafter, delta=delta)
        for out in decoder.generate_batch(
            prompts(), suppress_tokens=common, min_tokens=9, forced_tokens=[other], **options
        ):
            assert not {*common}.intersection(out.tokens)
            assert len(out.tokens) >= 9 and out.tokens[0] == other


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0}, {"num_beams": 2, "speculative": False}]
)
def test_options_that_leave_no_token_are_an_error(options: dict[str, Any]) -> None:
    decoder = SpeculativeDecoder(*models("t5"))
    with pytest.raises(ValueError, match="forbid every token") as error:
        decoder.generate([3, EOS], max_tokens=4, suppress_tokens=range(SIZE), **options)
    check_message(str(error.value))


def test_an_index_that_is_given_twice_is_refused() -> None:
    decoder = SpeculativeDecoder(models("t5")[0])
    pairs = [(4, prompts()[0]), (4, prompts()[1])]
    with pytest.raises(ValueError, match="two prompts have the index 4") as error:
        list(decoder.iter_batch(pairs, temperature=1.0, max_tokens=5, num_return_sequences=2))
    check_message(str(error.value))
