"""How probable tokens are: what comes with a round is what whole passes of the target say.

The reference is float64 over the logits of whole sequences, see `output_logits`.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from speculative_t5 import device
from speculative_t5.decoding import (
    Batch,
    EmptyDrafter,
    FixedSchedule,
    Logprob,
    Plan,
    Request,
    RowOptions,
    Rule,
    Verifier,
    best_logprobs,
    decode,
)
from speculative_t5.decoding.logprobs import judged, sum_of
from speculative_t5.decoding.results import as_logprobs
from speculative_t5.decoding.sampling import Sampler
from speculative_t5.kernels import layers

import mlx.core as mx
import numpy as np
import pytest
from conftest import PAIRS, needs_layers, output_logits
from reference import TRANSFORMS
from scripted import Lengths
from test_decoder import DRAFTERS, make_decoder, models, prompts, with_drafter

CLOSE = 1e-5
SAMPLERS = [
    Sampler(),
    Sampler(1.0),
    Sampler(0.7, top_k=2),
    Sampler(2.0, top_p=0.8),
    Sampler(1.0, transform=TRANSFORMS["penalty"]),
    Sampler(transform=TRANSFORMS["penalty"]),
]
ASKED = (2, 0, None, 5)


def log_softmax(logits: Any) -> np.ndarray:
    """Logits (..., V) -> logarithms of probabilities (..., V) float64."""
    rows = np.array(logits.astype(mx.float32), np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    found: np.ndarray = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return found


def check(model: Any, prompt: list[int], ids: Sequence[int], found: Any, top: int) -> None:
    """Compare with a whole pass over the output, the ids of which include what ended it."""
    assert len(found) == len(ids) > 0
    whole = log_softmax(output_logits(model, prompt, [ids])[0])
    for place, (token, one) in enumerate(zip(ids, found, strict=True)):
        assert one.value == pytest.approx(whole[place, token], abs=CLOSE)
        best = np.sort(whole[place])[::-1][:top]
        assert [*one.top.values()] == pytest.approx([*best], abs=CLOSE)
        assert [whole[place, each] for each in one.top] == pytest.approx([*best], abs=CLOSE)


def requests(samplers: Sequence[Sampler], asked: Sequence[int | None] = ASKED) -> list[Request]:
    sources = prompts(len(samplers) * 3)
    return [
        Request(
            i,
            source,
            RowOptions(samplers[i % len(samplers)], 9, seed=i, logprobs=asked[i % len(asked)]),
        )
        for i, source in enumerate(sources)
    ]


def rounds_of(
    model: Any, plan: Plan, wanted: Sequence[Request], rows: int = 7
) -> dict[int, tuple[list[int], list[Logprob] | None]]:
    """Decode; return by index the ids, with what ended them, and what rounds say of them."""
    ids: dict[int, list[int]] = defaultdict(list)
    said: dict[int, list[Logprob]] = defaultdict(list)
    found: dict[int, tuple[list[int], list[Logprob] | None]] = {}
    for done in decode(model, wanted, plan, batch_size=rows):
        end = [] if done.end_id is None else [done.end_id]
        ids[done.index] += [*done.tokens, *end]
        is_asked = wanted[done.index].options.logprobs is not None
        assert (done.logprobs is not None) == is_asked
        said[done.index] += done.logprobs or []
        if done.finish_reason:
            assert (done.output_logprobs or []) == said[done.index]
            found[done.index] = ids[done.index], done.output_logprobs
        else:
            assert done.output_logprobs is None
    return found


RULES: tuple[Rule, ...] = ("coupled", "token", "block")
JUDGED = [*(("t5", *each) for each in product(DRAFTERS[:3], RULES)), ("t5", "both", "lenient")]
JUDGED += [
    *zip(PAIRS[1:], ("model", "both", "model", "both", "model"), (*RULES, *RULES[:2]), strict=True)
]


@pytest.mark.parametrize(("kind", "drafter", "rule"), JUDGED)
def test_rows_are_judged_as_by_whole_passes(kind: str, drafter: str, rule: Any) -> None:
    """Neighbours have other samplers, drafts of other lengths and other wishes; some join later."""
    decoder = make_decoder(kind, drafter)
    verifier = Verifier(0.5, "token") if rule == "lenient" else Verifier(rule=rule)
    plan = Plan(decoder.engine.plan().drafter, Lengths(4, 2, 0, 3), verifier)
    wanted = requests(SAMPLERS)
    found = rounds_of(decoder.model, plan, wanted)
    assert len(found) == len(wanted)
    for request in wanted:
        ids, said = found[request.index]
        if request.options.logprobs is None:
            assert said is None
        else:
            check(decoder.model, [*request.source], ids, said, request.options.logprobs)


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("drafter", DRAFTERS[:3])
def test_greedy_rows_are_judged_the_same_with_any_draft_or_none(drafter: str, top: int) -> None:
    decoder = make_decoder("t5", drafter)
    wanted = requests([Sampler()] * 5, [top])
    drafted = rounds_of(decoder.model, decoder.engine.plan(), wanted)
    plain = rounds_of(
        decoder.model, Plan(EmptyDrafter(), FixedSchedule(0), Verifier()), wanted, rows=1
    )
    for index, (ids, said) in drafted.items():
        assert ids == plain[index][0] and said is not None
        check(decoder.model, [*wanted[index].source], ids, said, top)
        for one, other in zip(said, plain[index][1] or [], strict=True):
            assert one.value == pytest.approx(other.value, abs=CLOSE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_leniency_accepts_are_judged_as_they_are(temperature: float) -> None:
    decoder = make_decoder("t5", "model", delta=0.9, verify="token")
    plain = make_decoder("t5", "none")
    differ = 0
    for seed, prompt in enumerate(prompts()):
        options: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_tokens": 20}
        out = decoder.generate(prompt, logprobs=1, **options)
        check(decoder.model, prompt, ids_of(out), out.logprobs, 1)
        differ += out.tokens != plain.generate(prompt, **options).tokens
    assert differ > 3


def ids_of(out: Any) -> list[int]:
    """Return the ids of an output with what ended it; all tiny models end by EOS."""
    return [*out.tokens, 1] if out.finish_reason == "eos" else [*out.tokens]


@pytest.mark.parametrize(("temperature", "top"), [(0.0, 0), (0.0, 2), (1.0, 0), (1.0, 2)])
def test_passes_that_begin_early_are_judged_as_well(
    temperature: float, top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    decoder = make_decoder("t5", "model")
    for seed, prompt in enumerate(prompts(6)):
        options: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_tokens": 12}
        for speculative in (False, True):
            out = decoder.generate(prompt, speculative=speculative, logprobs=top, **options)
            check(decoder.model, prompt, ids_of(out), out.logprobs, top)


def test_a_batch_begins_to_judge_when_a_row_joins_that_asks_for_it() -> None:
    decoder = make_decoder("t5", "model")
    first, second, third = prompts(3)
    batch = Batch(decoder.model, decoder.engine.plan())
    batch.add([Request(0, first, RowOptions(max_tokens=30))])
    assert all(done.logprobs is None for done in batch.round())
    batch.add([Request(1, second, RowOptions(max_tokens=2, logprobs=1))])
    assert [done.logprobs is not None for done in batch.round()] == [False, True]
    batch.add([Request(2, third, RowOptions(max_tokens=2))])
    while batch.rows:
        assert all(done.logprobs is None for done in batch.round() if done.index != 1)
        batch.drop()


def test_equal_ids_are_in_order_and_there_are_no_more_than_the_vocabulary_has() -> None:
    logits = mx.array([[[1.0, 3.0, 2.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]]])
    for asked, wanted in ((2, [[1, 3], [0, 1]]), (9, [[1, 3, 4, 2, 0], [0, 1, 2, 3, 4]])):
        numbers: Any = judged(logits, mx.array([[2, 4]]), asked).tolist()
        found = as_logprobs(numbers[0], asked)
        assert [[*one.top] for one in found] == wanted
        assert found[1].value == pytest.approx(math.log(1 / 5))
        assert [len(one.top) for one in as_logprobs(numbers[0], 1)] == [1, 1]


@pytest.mark.parametrize("size", [1, 127, 128, 3520, 32_128])
@pytest.mark.parametrize("scale", [0.1, 4.0, 30.0])
def test_logarithms_are_right_over_large_vocabularies(size: int, scale: float) -> None:
    logits = 100 + scale * mx.random.normal((1, 40, size), key=mx.random.key(size))
    ids = mx.arange(40)[None] % size
    numbers: Any = judged(logits, ids).tolist()
    wanted = np.take_along_axis(log_softmax(logits), np.array(ids)[..., None], axis=-1)[0, :, 0]
    values = [one.value for one in as_logprobs(numbers[0])]
    assert np.abs(values - wanted).max() < 2e-6 * max(1, np.abs(wanted).max())
    assert sum_of(mx.ones((2, 3, size))).tolist() == [[[size]] * 3] * 2


@needs_layers
@pytest.mark.parametrize("size", [1, 7, 16, 300, 3521])
def test_the_c_parts_judge_as_mlx_does(size: int) -> None:
    x = mx.random.normal((3, 2, 24), key=mx.random.key(1))
    weight, norm = mx.random.normal((size, 24), key=mx.random.key(2)), mx.ones(24)
    x[1, 1] = math.nan
    library: Any = layers.library
    with mx.stream(mx.cpu):
        found = library.judged(x, norm, weight, 2.0, 1e-6, size)
        wanted = best_logprobs(library.logits(x, norm, weight, 2.0, 1e-6, size))
        ids, values = (np.array(each) for each in (found[..., 0], mx.view(found, mx.float32)))
    assert (ids == np.array(wanted[..., 0])).all() and ids[1, 1] < 0
    wanted_values = np.array(mx.view(wanted, mx.float32))[..., 1]
    np.testing.assert_allclose(values[..., 1], wanted_values, atol=3e-6)


def outputs_with(**options: Any) -> Iterator[tuple[list[int], Any]]:
    decoder = make_decoder("t5", "model")
    yield from zip(prompts(), decoder.generate_batch(prompts(), **options), strict=True)


def test_scores_are_the_sums_of_logprobs_and_take_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **keywords: Any) -> None:
        raise AssertionError("a pass of its own")

    monkeypatch.setattr("speculative_t5.decoding.log_probabilities", refuse)
    monkeypatch.setattr("speculative_t5.decoding.scoring._passes", refuse)
    model, reasons = models("t5")[0], set()
    for prompt, out in outputs_with(scores=True, max_tokens=8):
        check(model, prompt, ids_of(out), out.logprobs, 0)
        assert out.score == pytest.approx(sum(one.value for one in out.logprobs))
        reasons.add(out.finish_reason)
    assert reasons == {"eos", "length"}
    for prompt, out in outputs_with(
        scores=True, temperature=1.0, num_return_sequences=3, max_tokens=8
    ):
        for each in (out, *out.alternatives):
            check(model, prompt, ids_of(each), each.logprobs, 0)
            assert each.score == pytest.approx(sum(one.value for one in each.logprobs))
    assert all(out.score is None and out.logprobs for _, out in outputs_with(logprobs=0))
    assert all(out.score is None and out.logprobs is None for _, out in outputs_with())


def test_streams_bring_the_same_chunk_by_chunk() -> None:
    decoder = make_decoder("t5", "model")
    for prompt in prompts(6):
        whole = decoder.generate(prompt, logprobs=2, max_tokens=20)
        chunks = [*decoder.stream(prompt, logprobs=2, max_tokens=20)]
        assert tuple(one for chunk in chunks for one in chunk.logprobs or ()) == whole.logprobs
        ends = [len(chunk.tokens) + (chunk.end_id is not None) for chunk in chunks]
        assert [len(chunk.logprobs or ()) for chunk in chunks] == ends
        assert all(chunk.logprobs is None for chunk in decoder.stream(prompt, max_tokens=20))


def test_outputs_that_are_cut_have_no_more_logprobs_than_tokens() -> None:
    """A draft that is the target has all its tokens accepted, those after the cut among them."""
    decoder = with_drafter((models("t5")[0],) * 2, "model", num_draft=6)
    whole = [decoder.generate(prompt, logprobs=0, max_tokens=20) for prompt in prompts()]
    prompt, long = max(zip(prompts(), whole, strict=True), key=lambda pair: len(pair[1].tokens))
    stop = long.tokens[2]
    first = long.tokens.index(stop)
    options: dict[str, Any]
    for options in ({"stop_token_ids": [stop]}, {"max_tokens": first + 1}):
        out = decoder.generate(prompt, logprobs=0, **{"max_tokens": 20} | options)
        assert out.logprobs is not None
        wanted = [one.value for one in (long.logprobs or ())[: first + 1]]
        assert [one.value for one in out.logprobs] == pytest.approx(wanted, abs=CLOSE)


def test_logprobs_that_cannot_be_given_are_refused() -> None:
    decoder = make_decoder("t5", "none")
    wrong: Any
    for wrong in (-1, 101, 1.5, True):
        with pytest.raises(ValueError, match="logprobs must be an integer from 0 to 100"):
            decoder.generate([5, 1], logprobs=wrong)
    with pytest.raises(ValueError, match="a beam search has no logprobs: leave out one of them"):
        decoder.generate([5, 1], logprobs=0, num_beams=2)
