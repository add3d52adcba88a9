"""NaN in a model's logits ends an output in an error, and changes no other output."""

import json
import pickle
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.cli import job
from speculative_t5.decoding import RowError, best, counters
from speculative_t5.decoding.faults import BROKEN, not_a_number
from speculative_t5.decoding.keys import position_keys
from speculative_t5.decoding.sampling import Groups, Sampler, drawn
from speculative_t5.decoding.verify import num_agreed
from speculative_t5.generation import GenerationOptions
from speculative_t5.libraries import NATIVE_SWITCH
from speculative_t5.models.t5 import T5
from speculative_t5.tokenizers import Line

import mlx.core as mx
import pytest
from checkpoints import edit_tensors, refused
from commands import Call
from conftest import V1_0, tiny_model, write_checkpoint
from messages import check_message
from test_service import check_failure, collect, serving

pytestmark = pytest.mark.cpu
SIZE, HOT = 12, 9  # ids, and the one whose embedding is NaN
SOUND = [[5, 3, 1], [4, 4, 7, 1], [2, 6, 1], [8, 1]]
SAID = "the logits are NaN in float32: check the weights, which may be damaged"
OF_DRAFT = "the draft's logits are NaN in float32: check the weights, which may be damaged"


def a_model(*, seed: int = 4, hot: bool = True, layers: int = 2) -> T5:
    """A random model; one id makes NaN of all that follows it."""
    model = tiny_model(vocab_size=SIZE, seed=seed, layers=layers)
    if hot:
        weight = model.shared.weight
        weight[HOT] = mx.nan
        model.shared.weight = weight
        mx.eval(model.parameters())
        model.recompile()
    return model


def constant(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits


# How to decode, and how to make the decoder.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"speculative": False}, {}),
    "greedy": ({}, {"num_draft": 3}),
    "auto": ({}, {"num_draft": "auto", "lookup": True}),
    "lookup": ({}, {"draft": "lookup", "num_draft": 4}),
    "lenient": ({}, {"delta": 0.3, "num_draft": 3}),
    "coupled": ({"temperature": 0.8}, {"num_draft": 3}),
    "token": ({"temperature": 1.0}, {"verify": "token", "num_draft": 3}),
    "block": ({"temperature": 1.0}, {"verify": "block", "num_draft": 3}),
    "top-k": ({"temperature": 1.0, "top_k": 3}, {"num_draft": 3}),
    "top-p": ({"temperature": 1.0, "top_p": 0.8}, {"verify": "block", "num_draft": 3}),
    "constraints": ({"min_tokens": 6, "repetition_penalty": 1.3}, {"num_draft": 3}),
    "sampled constraints": (
        {"temperature": 1.0, "suppress_tokens": [3]},
        {"verify": "token", "num_draft": 3},
    ),
    "processors": ({"logits_processors": [constant]}, {"num_draft": 3}),
    "beams": ({"num_beams": 3, "speculative": False}, {}),
    "scores": ({"scores": True}, {"num_draft": 3}),
    "several": ({"temperature": 1.0, "num_return_sequences": 3}, {"num_draft": 2}),
    "steady": ({}, {"steady": True, "num_draft": 3}),
}


def decoder_for(name: str, model: T5, draft_vocab: int | None = None) -> SpeculativeDecoder:
    made = WAYS[name][1]
    if made and "draft" not in made:
        made = made | {"draft": a_model(hot=False, layers=1), "draft_vocab": draft_vocab}
    return SpeculativeDecoder(model, **made)


@pytest.mark.parametrize("name", WAYS)
def test_every_way_of_decoding_refuses_it(name: str) -> None:
    """Also in a batch, whose error names the prompt; other outputs are as they are alone."""
    options, said = WAYS[name][0] | {"max_tokens": 6}, SAID
    if "temperature" in options or name in ("constraints", "lenient"):
        options["bad_words"] = [[HOT]]  # greedy outputs do not have it
    if name == "processors":
        said = said.replace("logits are", "logits, or what a logits processor made of them, are")
    decoder = decoder_for(name, a_model(), draft_vocab=HOT)  # below the id
    with refused(f"^{said}$"):
        decoder.generate([5, HOT, 1], **options)
    if name not in ("beams", "scores", "several"):
        with refused(f"^{said}$"):
            list(decoder.stream([5, HOT, 1], **options))
    expected = decoder.generate_batch(SOUND, **options)
    with refused(f"^at index 2, {said}$"):
        decoder.generate_batch([*SOUND[:2], [5, HOT, 1], *SOUND[2:]], **options)
    found = {}
    with refused(f"^at index 3, {said}$"):
        prompts = enumerate([*SOUND[:3], [5, HOT, 1]])
        for index, done in decoder.iter_batch(prompts, batch_size=1, **options):
            found[index] = done.tokens
    assert found == {i: done.tokens for i, done in enumerate(expected[:3])}


@pytest.mark.parametrize("name", [name for name in WAYS if name not in ("beams", "several")])
def test_what_comes_before_it_is_plain_decodings(name: str) -> None:
    """An output that arrives at the id ends there; at the latest, since a draft may have it before.

    Its numbers in the cache are hidden from what comes before by a weight of 0, and 0 * NaN is NaN.
    """
    options, made = WAYS[name]
    if "verify" in made:  # whose outputs depend on the draft
        options = {"temperature": 0.0} | {k: v for k, v in options.items() if k != "temperature"}
    options = options | {"max_tokens": 12, "logit_bias": {HOT: 1.0, 1: -9.0}}
    options.pop("scores", None)
    arrived = 0
    for seed in range(9):
        model = a_model(seed=seed)
        plain = SpeculativeDecoder(model)
        decoder = decoder_for(name, model)
        for source in SOUND:
            expected, fails = until_it_fails(plain, source, options | {"speculative": False})
            found, failed = until_it_fails(decoder, source, options)
            assert found == expected[: len(found)]
            assert failed or (found == expected and not fails)
            arrived += found == expected and fails
    assert arrived > 3


def breaking(tokens: mx.array, logits: mx.array) -> mx.array:
    """A logits processor that makes NaN of what follows an id."""
    return logits * mx.where(tokens[-1] == HOT, mx.nan, 1.0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_only_logits_hold_ends_an_output_where_it_is(temperature: float) -> None:
    """Exactly where plain decoding ends, with any draft: nothing of it is in the caches."""
    model = a_model(hot=False)
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": 20, "min_tokens": 20}
    options |= {"logits_processors": [breaking], "logit_bias": {HOT: 2.0}}
    decoders = [
        SpeculativeDecoder(model, draft, num_draft=4)
        for draft in (model, a_model(hot=False, layers=1), "lookup")
    ]
    accepted = 0
    for seed in range(8):
        given = options | {"seed": seed}
        expected, fails = until_it_fails(
            decoders[0], SOUND[seed % 4], given | {"speculative": False}
        )
        assert fails == (HOT in expected) == (expected[-1] == HOT)
        for decoder in decoders:
            assert until_it_fails(decoder, SOUND[seed % 4], given) == (expected, fails)
        accepted += fails and len(expected) > 1
    assert accepted > 1


def until_it_fails(
    decoder: SpeculativeDecoder, source: list[int], options: dict[str, Any]
) -> tuple[list[int], bool]:
    """Return the tokens of an output, and whether NaN ended it."""
    tokens: list[int] = []
    try:
        for chunk in decoder.stream(source, **options):
            tokens += chunk.tokens
    except RowError:
        return tokens, True
    return tokens, False


def test_a_broken_draft_agrees_with_nothing() -> None:
    """Nor with a target that is broken, too: no mark is a token of an output."""
    assert num_agreed([3, BROKEN, 4], [3, BROKEN, 4, 5]) == 1
    for target in (a_model(hot=False), a_model(hot=False, layers=1)):
        draft = a_model(seed=4, layers=1)
        for model in (target, draft):
            model.lm_head.weight = mx.full(model.lm_head.weight.shape, mx.nan)
            mx.eval(model.parameters())
        for delta in (0.0, 0.4, 1.0):
            with refused(f"^{SAID}$"):
                list(SpeculativeDecoder(target, draft, num_draft=3, delta=delta).stream(SOUND[0]))


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_broken_draft_changes_no_output(temperature: float, lookup: bool) -> None:
    """By the default rule; by those that need its probabilities, an error names it."""
    model, draft = a_model(hot=False), a_model(seed=4, layers=1)
    draft.lm_head.weight = mx.full(draft.lm_head.weight.shape, mx.nan)
    mx.eval(draft.parameters())
    options: dict[str, Any] = {"max_tokens": 9, "temperature": temperature}
    if not temperature:
        lenient = SpeculativeDecoder(model, draft, num_draft=3, delta=1e-6)
        found = lenient.generate(SOUND[0], max_tokens=9)
        assert found.tokens == SpeculativeDecoder(model).generate(SOUND[0], max_tokens=9).tokens
    decoder = SpeculativeDecoder(model, draft, num_draft=3, lookup=lookup)
    for source in SOUND:
        found = decoder.generate(source, **options)
        assert found.tokens == decoder.generate(source, **options, speculative=False).tokens
        assert found.stats.drafted
    with refused("the probabilities are NaN in float32"):
        decoder.generate(SOUND[0], **options, probabilities=True)
    for verify in ("token", "block") if temperature else ():
        decoder = SpeculativeDecoder(model, draft, num_draft=3, verify=verify)  # type: ignore[arg-type]
        with refused(f"^{OF_DRAFT}$"):
            decoder.generate(SOUND[0], **options)


def test_a_draft_that_breaks_late_is_exact_until_then() -> None:
    """A rule that judges a whole draft does not judge one whose end is NaN."""
    draft = a_model(seed=4, layers=1)
    for verify in ("token", "block"):
        decoder = SpeculativeDecoder(a_model(hot=False), draft, num_draft=4, verify=verify)  # type: ignore[arg-type]
        failed = 0
        for seed in range(12):
            try:
                decoder.generate(SOUND[0], max_tokens=12, temperature=1.0, seed=seed)
            except RowError as error:
                assert str(error) == OF_DRAFT
                failed += 1
        assert failed > 0


def test_a_round_waits_once_all_the_same() -> None:
    """And a compiled pass has as many operations as without the mark."""
    decoder = SpeculativeDecoder(a_model(), a_model(seed=4, hot=False), num_draft=3)
    for options in ({}, {"temperature": 0.7}):
        before = counters.syncs
        done = decoder.generate(SOUND[0], max_tokens=12, min_tokens=12, **options)
        assert counters.syncs - before == done.stats.rounds


def test_the_mark_is_found_wherever_numbers_are_none() -> None:
    for bad in (mx.nan, mx.inf):
        logits = mx.zeros((2, 3, 70)).at[1, 2].add(mx.array([bad] + [0.0] * 69))
        keys = position_keys(mx.array([[1, 2], [3, 4]], dtype=mx.uint32), 3)
        for sampler in (Sampler(1.0), Sampler(1.0, top_k=3), Sampler(0.5, top_p=0.4)):
            chosen = drawn(sampler.probs(logits), keys)
            assert (chosen == BROKEN).tolist() == [[False] * 3, [False, False, True]], sampler
            groups = Groups([sampler, Sampler()])
            assert groups.choose(mx.where(logits == mx.inf, mx.nan, logits), keys)[1, 2] == BROKEN
    assert best(mx.array([[mx.nan] * 5, [-mx.inf] * 5])).tolist() == [BROKEN, 0]


def test_the_error_names_the_type_and_what_to_choose() -> None:
    assert not_a_number("the logits", mx.float16) == (
        "the logits are NaN in float16, which ends at 65504: use dtype bfloat16 or float32"
    )
    assert not_a_number("the logits", mx.bfloat16) == (
        "the logits are NaN in bfloat16: use dtype float32, or check the weights, which may be "
        "damaged"
    )
    for dtype in (None, mx.float16, mx.bfloat16, mx.float32):
        check_message(not_a_number("the draft's logits", dtype))
    error = pickle.loads(pickle.dumps(RowError(3, SAID)))
    assert (error.index, str(error)) == (3, SAID)


@pytest.fixture
def overflowing(tmp_path: Path, spiece: bytes) -> Path:
    """A T5 v1.0 that float16 is too small for."""
    write_checkpoint(tmp_path / "hot", V1_0, spiece)
    edit_tensors(
        tmp_path / "hot",
        lambda t: t.update({n: w * 3e4 for n, w in t.items() if "DenseReluDense.wo" in n}),
    )
    return tmp_path / "hot"


def test_float16_that_overflows_is_an_error_of_one_line(
    overflowing: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NATIVE_SWITCH, "0")  # the C parts compute in float32
    typed = ("--model", str(overflowing), "--max-tokens", "4")
    for command in (("--prompt", "A dog."), ("--prompt", "A dog.", "--json", "--num-beams", "2")):
        done = call(*command, *typed, "--dtype", "float16")
        done.check_error("the logits are NaN in float16, which ends at 65504")
        assert done.err[0].endswith(": use dtype bfloat16 or float32")
        assert call(*command, *typed, "--dtype", "bfloat16").code == 0
    (overflowing.parent / "in.txt").write_text("A dog.\nA cat.\n")
    done = call("batch", str(overflowing.parent / "in.txt"), *typed, "--dtype", "float16")
    records = [json.loads(line) for line in done.out.splitlines()]
    assert done.code == 3 and [each["prompt"] for each in records] == ["A dog.", "A cat."]
    assert all("the logits are NaN in float16" in each["error"] for each in records)


@pytest.mark.parametrize("options", [[], ["--num-return-sequences", "2", "--temperature", "0.8"]])
@pytest.mark.parametrize("by_length", [True, False])
def test_a_line_that_cannot_go_on_ends_no_other(options: list[str], by_length: bool) -> None:
    """Its record has the error, and those decoded beside it are what they are alone."""
    decoder = SpeculativeDecoder(a_model(), None)
    prompts = [p for pair in zip(SOUND, [[5, HOT, 1]] * len(SOUND), strict=True) for p in pair]
    keywords: dict[str, Any] = {"max_tokens": 9}
    if options:
        keywords |= {"num_return_sequences": 2, "temperature": 0.8}
    lines = [Line(i, i, f"line {i}", str(i)) for i in range(1, len(prompts) + 1)]
    records: list[job.Record] = []
    job.process(
        lines,
        lambda requests: decoder.iter_batch(
            requests, batch_size=3, by_length=by_length, **keywords
        ),
        lambda text: decoder.fit(prompts[int(text) - 1]),
        records.append,
    )
    assert [record.line.number for record in records] == [line.number for line in lines]
    for number, (record, prompt) in enumerate(zip(records, prompts, strict=True)):
        try:  # a sampled output may come upon the token by itself
            alone = dict(decoder.iter_batch([(number, prompt)], batch_size=1, **keywords))
        except RowError:
            assert record.error == SAID and record.done is None
        else:
            assert HOT not in prompt and not record.error and record.done
            assert record.done.tokens == alone[number].tokens
    assert any(not record.error for record in records)


@pytest.mark.anyio
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "bad_words": [[HOT]]}])
@pytest.mark.parametrize("draft", ["model", "lookup", None])
async def test_in_a_server_only_that_request_fails(options: Any, draft: str | None) -> None:
    """And leaves nothing behind for those that get its place in the batch."""
    small = a_model(hot=False, layers=1) if draft == "model" else draft
    made: dict[str, Any] = {"draft": small, "draft_vocab": HOT if draft == "model" else None}
    decoder = SpeculativeDecoder(a_model(), **made, num_draft=3)
    options = options | {"max_tokens": 9}
    broken = [[5, HOT, 1], [HOT, 1], [3, 5, 2, HOT, 7, 1]]
    prompts = [
        prompt for pair in zip(SOUND, broken + [[HOT, HOT, 1]], strict=True) for prompt in pair
    ]
    async with serving(decoder, batch_size=3) as served:
        given = prompts + prompts[::-1]
        calls = [served.submit([prompt], GenerationOptions(**options)) for prompt in given]
        for prompt, call in zip(given, calls, strict=True):
            if HOT in prompt:
                await check_failure(call, 500, SAID)
            else:
                ((tokens, *_),) = await collect(call)
                assert tokens == decoder.generate(prompt, **options).tokens
        assert served.figures()["failures"] == 2 * len(broken) + 2
