"""Options that change the target's distribution, stops, several outputs and scores."""

from collections import Counter
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.models import T5

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import refused
from conftest import (
    EOS,
    KINDS,
    output_logits,
    tiny_draft,
    tiny_model,
    tiny_sharing,
)
from messages import check_message
from test_decoder import models, prompts

SIZE, LENGTH = 20, 16
OURS: dict[str, Any] = {
    "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_tokens": 8, "suppress_tokens": [3],
    "bad_words": [[5], [4, 6], [8, 9, 8]], "logit_bias": {4: 2.0, 11: -50.0}, "forced_tokens": [9],
}  # fmt: skip
THEIRS: dict[str, Any] = {
    "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 8,
    "suppress_tokens": [3], "bad_words_ids": [[5], [4, 6], [8, 9, 8]],
    "sequence_bias": [[[4], 2.0], [[11], -50.0]], "forced_bos_token_id": 9,
}  # fmt: skip
CASES = [({a: OURS[a]}, {b: THEIRS[b]}, 1) for a, b in zip(OURS, THEIRS, strict=True)]
CASES += [(OURS, THEIRS, 1), (OURS, THEIRS, 4)]


@pytest.mark.cpu
@pytest.mark.parametrize(("own", "theirs", "num_beams"), CASES, ids=[*OURS, "together", "beams"])
def test_outputs_are_those_of_transformers(
    own: dict[str, Any], theirs: dict[str, Any], num_beams: int, pair: tuple[Any, T5]
) -> None:
    """Of two families, with drafts of several kinds; of a search outputs and scores of 3 beams."""
    import torch

    torch.set_num_threads(1)  # tests run side by side
    reference, target = pair
    search = {"num_return_sequences": 3, "length_penalty": 0.7} if num_beams > 1 else {}
    rng = np.random.default_rng(3)
    sources = [[*rng.integers(3, 300, rng.integers(2, 14)).tolist(), 1] for _ in range(4)]
    expected = [
        reference.generate(
            torch.tensor([source]), max_new_tokens=LENGTH, do_sample=False, num_beams=num_beams,
            use_cache=False,  # its cache has as many layers as the encoder
            output_scores=True, return_dict_in_generate=True, **search, **theirs,
        )
        for source in sources
    ]  # fmt: skip
    near, small = tiny_sharing(target, noise=0.05), tiny_draft(target, noise=0.05, vocab_size=160)
    drafting: list[dict[str, Any]] = [
        {"draft": near}, {"draft": near, "steady": True}, {"draft": "lookup"},
        {"draft": small, "draft_vocab": 80, "lookup": True},
    ]  # fmt: skip
    accepted = 0
    for how in drafting if num_beams == 1 else [{}]:
        decoder = SpeculativeDecoder(target, num_draft=4, **how)
        found = decoder.generate_batch(
            sources, max_tokens=LENGTH, num_beams=num_beams, **search, **own
        )
        accepted += sum(out.stats.accepted for out in found)
        for best, all_theirs in zip(found, expected, strict=True):
            outputs = [best, *best.alternatives]
            for out, ids in zip(outputs, all_theirs.sequences.tolist(), strict=True):
                tokens = out.tokens + [1] * (out.finish_reason == "eos")
                assert tokens == ids[1 : len(tokens) + 1] and {*ids[len(tokens) + 1 :]} <= {0, 1}
            if num_beams > 1:
                scores = [out.score for out in outputs]
                assert scores == pytest.approx(all_theirs.sequences_scores.tolist(), abs=1e-4)
    assert num_beams > 1 or accepted > 5, "drafts should be accepted under the option, too"


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
    assert decoder.generate(prompts(6)[0], max_tokens=5).score is None


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
    first = decoder.generate(prompts(6)[0], **options)
    assert found[0].tokens == first.tokens and not first.alternatives


def test_a_processor_that_raises_stop_iteration_is_named() -> None:
    def grammar(tokens: mx.array, logits: mx.array) -> mx.array:
        return next(iter(()))

    decoder = SpeculativeDecoder(tiny_model(vocab_size=SIZE))
    for call in (decoder.generate, lambda *a, **k: list(decoder.stream(*a, **k))):
        with pytest.raises(RuntimeError) as error:
            call([3, EOS], logits_processors=[grammar])
        check_message(str(error.value), f"{grammar.__qualname__} raised StopIteration")
        assert isinstance(error.value.__cause__, StopIteration)


@pytest.mark.parametrize(("delta", "temperature"), [(0.3, 0.0), (1.0, 0.0), (1.0, 1.0)])
def test_leniency_never_accepts_what_is_forbidden(delta: float, temperature: float) -> None:
    target, draft = models("t5")
    options: dict[str, Any] = {"max_tokens": LENGTH, "temperature": temperature}
    whole = SpeculativeDecoder(target, draft, delta=delta).generate_batch(prompts(6), **options)
    common = [token for token, _ in Counter(t for o in whole for t in o.tokens).most_common(4)]
    other = min({*range(2, SIZE)}.difference(common))
    for drafter in (draft, "lookup"):
        decoder = SpeculativeDecoder(target, drafter, delta=delta)
        for out in decoder.generate_batch(
            prompts(6), suppress_tokens=common, min_tokens=9, forced_tokens=[other], **options
        ):
            assert not {*common}.intersection(out.tokens)
            assert len(out.tokens) >= 9 and out.tokens[0] == other


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0}, {"num_beams": 2, "speculative": False}]
)
def test_options_that_leave_no_token_are_an_error(options: dict[str, Any]) -> None:
    decoder = SpeculativeDecoder(*models("t5"))
    with refused("forbid every token"):
        decoder.generate([3, EOS], max_tokens=4, suppress_tokens=range(SIZE), **options)


def test_an_index_that_is_given_twice_is_refused() -> None:
    decoder = SpeculativeDecoder(models("t5")[0])
    pairs = [(4, prompts(6)[0]), (4, prompts(6)[1])]
    for more in ({"scores": True}, {"num_return_sequences": 2}):
        with refused("two prompts have the index 4"):
            list(decoder.iter_batch(pairs, temperature=1.0, max_tokens=5, **more))  # type: ignore[arg-type]
