"""The coupled rule: at a seed, sampled outputs are those of plain decoding, whatever drafts.

That proves it exact, as plain decoding samples each position from the target by itself.
"""

from dataclasses import replace
from functools import partial, partialmethod
from typing import Any

from speculative_t5 import SpeculativeDecoder, device
from speculative_t5.decoding import (
    EmptyDrafter,
    FixedSchedule,
    Plan,
    Request,
    RowOptions,
    Verifier,
    decode,
    loop,
)
from speculative_t5.decoding.sampling import Sampler
from speculative_t5.generation import GenerationOptions

import mlx.core as mx
import pytest
from conftest import KINDS, tiny_pair, unrelated_pair
from reference import ENDINGS, TRANSFORMS
from scripted import PROMPTS, Lengths, loop_outputs
from test_decoder import DRAFTERS, with_drafter

SAMPLERS = [
    Sampler(1.0),
    Sampler(),
    Sampler(0.7, top_k=2),
    Sampler(2.0, top_p=0.8),
    *(Sampler(1.0, transform=each) for each in TRANSFORMS.values()),
    Sampler(transform=TRANSFORMS["penalty"]),
    Sampler(1.0, transform=ENDINGS["dead"]),
]
ENDED = [Sampler(1.0, transform=each) for each in ENDINGS.values()]  # of a T5


@pytest.mark.parametrize("drafter", DRAFTERS[:3])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_sample_the_same_with_any_draft_or_none(kind: str, drafter: str) -> None:
    """Rows of all options are neighbours, and some come to dead ends."""
    pair = unrelated_pair(kind, vocab_size=3)
    samplers = SAMPLERS if kind == "qwen3" else [*SAMPLERS, *ENDED]
    requests = [
        Request(row, PROMPTS[row % 2], RowOptions(sampler, 7, seed=row % 5))
        for row, sampler in enumerate(samplers * 12)
    ]
    found, lengths = with_drafter(pair, drafter).engine.plan().drafter, Lengths(3, 1, 4, 0, 2)
    drafted = loop_outputs(pair[0], requests, Plan(found, lengths, Verifier()))
    plain = loop_outputs(pair[0], requests, Plan(EmptyDrafter(), FixedSchedule(0), Verifier()))
    assert drafted == plain and len(set(plain.values())) > 50
    assert sum(sum(outcome.num_accepted) for outcome in lengths.outcomes) > 50


def test_a_draft_that_is_the_target_is_accepted_whole() -> None:
    target, _ = tiny_pair("t5", vocab_size=40, layers=2, seed=3)
    decoder = with_drafter((target, target), "model", num_draft=4)
    options = {"max_tokens": 50, "temperature": 1.5, "suppress_tokens": [1]}
    for seed in range(5):
        out = decoder.generate([10, 1], seed=seed, **options)
        assert (out.stats.acceptance_rate, out.stats.rounds) == (1, 10)
        assert len(set(out.tokens)) > 20, "each position has noise of its own"


def test_a_draft_that_lacks_ids_is_accepted_nearly_as_often() -> None:
    """The ids that it has come with the same noise in both."""
    target, _ = tiny_pair("t5", vocab_size=40, layers=2, seed=3)
    decoder = with_drafter((target, target), "model", num_draft=4, draft_vocab=36)
    outputs = [decoder.generate([10, 1], seed=seed, temperature=1.0) for seed in range(20)]
    accepted, drafted = (
        sum(getattr(out.stats, name) for out in outputs) for name in ("accepted", "drafted")
    )
    assert accepted > 0.8 * drafted > 80


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["t5", "qwen3", "sharing"])
def test_a_gpu_begins_the_next_plain_pass_before_it_reads_the_last_token(
    kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no drafter, with one that is not asked, and between drafts, of which none suffers."""
    target, draft = tiny_pair(kind, vocab_size=40, layers=2, seed=3)
    decoder = SpeculativeDecoder(target, draft, num_draft=3)
    options = GenerationOptions(max_tokens=24, temperature=temperature)
    requests = [*decoder.engine.requests([(0, [10, 1])], options)]
    events: list[str] = []
    session, read = type(target.start([[10, 1]])[0]), loop.read

    def noted(name: str, call: Any, *args: Any, **keywords: Any) -> Any:
        events.append(name)
        return call(*args, **keywords)

    def noted_step(self: Any, call: Any, *args: Any, **keywords: Any) -> Any:
        return noted("step", call, self, *args, **keywords)

    for name in ("step",) if kind == "qwen3" else ("step", "step_argmax"):
        monkeypatch.setattr(session, name, partialmethod(noted_step, getattr(session, name)))
    monkeypatch.setattr(loop, "read", partial(noted, "read", read))
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    outputs = []
    for plan in (
        decoder.engine.plan(speculative=False),
        replace(decoder.engine.plan(), schedule=Lengths(0)),
        replace(decoder.engine.plan(), schedule=Lengths(0, 0, 3)),
    ):
        events.clear()
        *_, last = decode(target, requests, plan, batch_size=1)
        outputs.append(last.output)
        if not last.stats.drafted:
            assert events[:4] == ["step", "step", "read", "step"], "one pass is always under way"
            assert events[-2:] == ["read", "read"] or last.finish_reason == "eos"
    assert outputs[0] == outputs[1] == outputs[2] and len(outputs[0]) > 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processes_that_share_a_gpu_model_emit_what_the_first_one_chose(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    target, _ = tiny_pair("t5", vocab_size=40, layers=2, seed=3)
    decoder = SpeculativeDecoder(target, None)
    options = GenerationOptions(max_tokens=6, temperature=temperature)
    verifier = Verifier(broadcast=lambda ids: mx.full(ids.shape, 7, mx.int32))
    plan = replace(decoder.engine.plan(speculative=False), verifier=verifier)
    *_, last = decode(target, decoder.engine.requests([(0, [10, 1])], options), plan, batch_size=1)
    assert last.output == [7] * 6
