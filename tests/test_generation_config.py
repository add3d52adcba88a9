"""A checkpoint's own ids, which start, begin and end outputs, mean what they do in transformers.

The start token is an option of a call, too, exact with any draft.
"""

import json
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints import convert, read_task
from speculative_t5.decoding import Plan, Request
from speculative_t5.decoding.loop import Batch
from speculative_t5.generation import GenerationOptions
from speculative_t5.serve.requests import Refused, parse_options

import mlx.core as mx
import pytest
import torch
from checkpoints import refused
from commands import Call
from conftest import PAIRS, edit_json, tiny_pair
from families import write_family, write_gemma

SOURCES = [[5, 17, 44, 9, 60, 1], [7, 80, 3, 1], [90, 12, 33, 64, 8, 2, 1]]
pytestmark = pytest.mark.cpu


SEARCHES = (1, 3)  # beams, of which one is greedy decoding


def reference(folder: Path) -> Any:
    """A checkpoint in transformers."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.num_layers = model.config.num_decoder_layers  # by which it sizes its cache
    return model


def theirs(model: Any, source: list[int], **options: Any) -> list[int]:
    """The ids that transformers generates, without the start token and what ends them."""
    ends = model.generation_config.eos_token_id
    given = {"max_new_tokens": 12, "do_sample": False, "num_beams": 1} | options
    found = model.generate(torch.tensor([source]), **given)[0, 1:].tolist()
    ends = ends if isinstance(ends, list) else [ends]
    return next((found[:i] for i, token in enumerate(found) if token in ends), found)


def ours(folder: Path) -> list[list[int]]:
    """The ids generated here, with and without drafts, and from a converted folder."""
    made = convert(str(folder), folder.parent / "made", force=True)
    target, other = (load(each, dtype=mx.float32)[0] for each in (folder, made))
    plain = outputs(SpeculativeDecoder(target), SEARCHES)
    assert outputs(SpeculativeDecoder(other), SEARCHES) == plain
    for draft in ("lookup", other):
        decoder = SpeculativeDecoder(target, draft, num_draft=3)  # type: ignore[arg-type]
        assert outputs(decoder, SEARCHES[:1]) == plain[: len(SOURCES)]
    return plain


def outputs(decoder: SpeculativeDecoder, searches: tuple[int, ...]) -> list[list[int]]:
    return [
        decoder.generate(source, max_tokens=12, num_beams=count).tokens
        for count in searches
        for source in SOURCES
    ]


# Entries of generation_config.json, or of config.json where there is none; a number that stands for
# one of the tokens that are said without them is negative.
ENTRIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "several ends": ("t5", {"eos_token_id": [1, -3]}, {}),
    "ends without the usual one": ("t5", {"eos_token_id": [-4, 33]}, {}),
    "another end": ("codet5", {"eos_token_id": -3}, {}),
    "ends beyond the vocabulary": ("t5", {"eos_token_id": [1, 5000, -2]}, {}),
    "ends in config.json": ("mt5", {}, {"eos_token_id": [1, -3]}),
    "the usual end comes last": ("t5", {}, {"eos_token_id": [-5, 1]}),
    "start": ("t5", {"decoder_start_token_id": 7}, {}),
    "start of a gated model": ("flan_t5", {"decoder_start_token_id": 70}, {}),
    "start beside another": ("mt5", {"decoder_start_token_id": 9}, {"decoder_start_token_id": 3}),
    "start and padding": ("t5", {"decoder_start_token_id": 4, "pad_token_id": 3}, {}),
    "forced first": ("t5", {"forced_bos_token_id": 77}, {}),
    "forced first after a start": (
        "mt5",
        {"forced_bos_token_id": 12, "decoder_start_token_id": 2},
        {},
    ),
    "suppressed": ("t5", {"suppress_tokens": [-1, -2, 40]}, {}),
    "suppressed at the beginning": ("t5", {"begin_suppress_tokens": [-1]}, {}),
    "both, and forced": (
        "flan_t5",
        {"begin_suppress_tokens": [-2, 5], "suppress_tokens": [-4], "forced_bos_token_id": 19},
        {},
    ),
    "no constraint": ("t5", {"suppress_tokens": None, "forced_bos_token_id": None}, {}),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_ids_are_those_that_transformers_heeds(case: str, tmp_path: Path) -> None:
    family, entries, config = ENTRIES[case]
    folder = tmp_path / "model"
    write_family(folder, family)
    before = ours(folder)

    def meant(value: Any) -> Any:
        if isinstance(value, list):
            return [meant(each) for each in value]
        return before[0][-value - 1] if isinstance(value, int) and value < 0 else value

    edit_json(folder / "config.json", **{name: meant(value) for name, value in config.items()})
    if entries:
        found = {name: meant(value) for name, value in entries.items()}
        edit_json(folder / "generation_config.json", **found)
    else:
        (folder / "generation_config.json").unlink()
    after, model = ours(folder), reference(folder)
    assert after == [theirs(model, s, num_beams=count) for count in SEARCHES for s in SOURCES]
    assert (after != before) == (case != "no constraint")
    if start := entries.get("decoder_start_token_id"):
        for each in (folder, tmp_path / "made"):
            assert load(each)[0].config.decoder_start_token_id == start


def test_a_call_may_choose_otherwise(tmp_path: Path) -> None:
    write_family(tmp_path, "t5")
    path = tmp_path / "generation_config.json"
    edit_json(path, forced_bos_token_id=77, suppress_tokens=[40], decoder_start_token_id=3)
    decoder = SpeculativeDecoder.from_pretrained(tmp_path, None, dtype=mx.float32)
    assert decoder.generate(SOURCES[0], max_tokens=3).tokens[0] == 77
    assert decoder.generate(SOURCES[0], max_tokens=3, forced_tokens=[8, 9]).tokens[:2] == [8, 9]
    found = decoder.generate(SOURCES[0], max_tokens=9, decoder_start_token_id=5).tokens
    model = reference(tmp_path)
    assert found == theirs(model, SOURCES[0], max_new_tokens=9, decoder_start_token_id=5)


@pytest.mark.parametrize("family", ["t5", "mt5", "umt5"])
def test_the_start_token_is_transformers(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    (model, _), (small, _) = load(tmp_path, dtype=mx.float32), load(tmp_path, dtype=mx.float32)
    decoders = [SpeculativeDecoder(model, draft, num_draft=4) for draft in (None, small, "lookup")]  # type: ignore[arg-type]
    torch_model = reference(tmp_path)
    for start in (0, 3, 44, 111, 319):
        options = {"decoder_start_token_id": start}
        for source in SOURCES:
            expected = theirs(torch_model, source, max_new_tokens=10, **options)
            for decoder in decoders:
                assert decoder.generate(source, max_tokens=10, **options).tokens == expected
        found = decoders[0].generate(SOURCES[0], max_tokens=10, num_beams=3, **options)
        expected = theirs(torch_model, SOURCES[0], max_new_tokens=10, num_beams=3, **options)
        assert found.tokens == expected


WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"num_draft": 3}),
    ({}, {"num_draft": 4, "lookup": True}),
    ({}, {"steady": True, "num_draft": 3}),
    ({"temperature": 0.8}, {"num_draft": 3}),
    ({"temperature": 1.0, "repetition_penalty": 1.4}, {"num_draft": 3}),
    ({"min_tokens": 6, "no_repeat_ngram_size": 2}, {"num_draft": 2}),
]


@pytest.mark.parametrize("kind", [kind for kind in PAIRS if kind != "qwen3"])
def test_a_start_token_is_exact_with_any_draft(kind: str) -> None:
    """Target and draft share it, also a draft that shares its target's encoder."""
    model, draft = tiny_pair(kind, vocab_size=12, layers=2)
    different = 0
    sources = [[3, 4, 1], [7, 10, 3, 1]]
    for options, made in WAYS:
        decoder = SpeculativeDecoder(model, draft, **made)
        outputs = set()
        for start in (2, 5, 9):
            given = options | {"decoder_start_token_id": start, "max_tokens": 9}
            for source in sources:
                found = decoder.generate(source, **given, scores=True)
                plain = decoder.generate(source, **given, scores=True, speculative=False)
                assert found.tokens == plain.tokens and found.score == plain.score
                outputs.add(tuple(found.tokens))
        different += len(outputs) > len(sources)
    assert different > 1


def test_probabilities_and_scores_follow_the_start_token() -> None:
    model, draft = tiny_pair("t5")
    decoder = SpeculativeDecoder(model, draft, num_draft=3)
    source = [3, 4, 1]
    for start in (None, 2, 4):
        options: dict[str, Any] = {"decoder_start_token_id": start, "max_tokens": 6}
        found = decoder.generate(source, **options, scores=True, probabilities=True)
        tokens = [*found.tokens, *([1] if found.finish_reason == "eos" else [])]
        first = model.config.decoder_start_token_id if start is None else start
        logits = model(mx.array([source]), mx.array([[first, *tokens[:-1]]]))[0].astype(mx.float32)
        logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        expected = [logs[i, token].item() for i, token in enumerate(tokens)]
        assert found.score == pytest.approx(sum(expected), abs=1e-3)
        scored = decoder.log_probabilities(source, tokens, decoder_start_token_id=start)
        assert [value for value, _ in scored] == pytest.approx(expected, abs=1e-4)
        assert found.probabilities is not None
        for (p, _), log in zip(found.probabilities, expected, strict=False):
            assert p == pytest.approx(mx.exp(mx.array(log)).item(), abs=1e-4)


def test_rows_of_a_batch_may_have_different_ones() -> None:
    """Whichever joins and leaves, as on a server."""
    model, draft = tiny_pair("t5")
    decoder = SpeculativeDecoder(model, draft, num_draft=3)
    starts, source = [None, 2, 3, 4, 0, 2], [3, 4, 1]
    expected = [
        decoder.generate(source, max_tokens=9, decoder_start_token_id=start).tokens
        for start in starts
    ]
    assert len({tuple(tokens) for tokens in expected}) > 2
    plan: Plan = decoder.engine.plan()
    batch = Batch(model, plan)
    waiting = [
        Request(
            i,
            source,
            decoder.engine.bind(GenerationOptions(max_tokens=9, decoder_start_token_id=s)),
        )
        for i, s in enumerate(starts)
    ]
    found: dict[int, list[int]] = {}
    while waiting or batch.rows:
        batch.add([waiting.pop(0) for _ in range(min(2, len(waiting)))])
        for done in batch.round():
            if done.finish_reason:
                found[done.index] = done.output
        batch.drop()
    assert [found[i] for i in range(len(starts))] == expected


def test_a_logits_processor_sees_the_start_token_first(tmp_path: Path) -> None:
    """As in transformers, whose input_ids begin with it; so its length is one more."""
    from transformers import LogitsProcessorList

    write_family(tmp_path, "t5")
    model = reference(tmp_path)
    seen_there: list[list[int]] = []
    seen_here: list[list[int]] = []

    def there(ids: Any, scores: Any) -> Any:
        seen_there.append(ids[0].tolist())
        return scores

    def here(tokens: mx.array, logits: mx.array) -> mx.array:
        seen_here.append(tokens.tolist())  # type: ignore[arg-type]
        return logits

    decoder = SpeculativeDecoder.from_pretrained(tmp_path, None, dtype=mx.float32)
    for start in (0, 9):
        model.generate(
            torch.tensor([SOURCES[0]]),
            max_new_tokens=4,
            do_sample=False,
            min_new_tokens=4,
            decoder_start_token_id=start,
            logits_processor=LogitsProcessorList([there]),
        )
        decoder.generate(
            SOURCES[0],
            max_tokens=4,
            min_tokens=4,
            decoder_start_token_id=start,
            logits_processors=[here],
        )
    assert seen_here == seen_there and [each[0] for each in seen_here[::4]] == [0, 9]
    assert list(map(len, seen_here)) == [1, 2, 3, 4] * 2


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"eos_token_id": "</s>"},
        "eos_token_id in .*generation_config.json is '</s>', expected an id",
    ),
    ({"eos_token_id": [1, -1]}, r"eos_token_id in .* is \[1, -1\], expected an id or several"),
    (
        {"decoder_start_token_id": 99999},
        "decoder_start_token_id in .* is 99999, expected an id fro",
    ),
    ({"pad_token_id": [0.5]}, r"pad_token_id in .* is \[0.5\], expected an id or several"),
    ({"forced_bos_token_id": {"a": 1}}, "forced_bos_token_id in .* is {'a': 1}, expected an id"),
    ({"suppress_tokens": ["x"]}, r"suppress_tokens in .* is \['x'\], expected an id or several"),
    ({"begin_suppress_tokens": True}, "begin_suppress_tokens in .* is True, expected an id"),
]


@pytest.mark.parametrize(("entries", "message"), WRONG)
def test_what_are_no_ids_is_refused(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_family(tmp_path, "t5")
    edit_json(tmp_path / "generation_config.json", **entries)
    with refused(message, tmp_path):
        load(tmp_path)


def test_a_call_refuses_ids_that_the_model_lacks(tmp_path: Path) -> None:
    write_family(tmp_path, "t5")
    decoder = SpeculativeDecoder.from_pretrained(tmp_path, None)
    for start, message in (
        (320, "decoder_start_token_id has the id 320, and the model has ids below 320: give"),
        (-1, "decoder_start_token_id must be an integer of at least 0, got -1"),
        ("x", "decoder_start_token_id must be an integer of at least 0, got 'x'"),
    ):
        with refused(message):
            decoder.generate(SOURCES[0], decoder_start_token_id=start)  # type: ignore[arg-type]
    with refused("the id 7 is in forced_tokens and in suppress_tokens: leave out one"):
        decoder.generate(SOURCES[0], forced_tokens=[7], suppress_tokens=[7])


def test_commands_say_what_a_checkpoint_asks_for(tmp_path: Path, call: Call) -> None:
    write_family(tmp_path / "m", "t5")
    path = tmp_path / "m" / "generation_config.json"
    path.write_text(
        json.dumps(
            {
                "eos_token_id": [1, 5],
                "pad_token_id": 0,
                "decoder_start_token_id": 7,
                "forced_bos_token_id": 9,
                "suppress_tokens": [4],
                "begin_suppress_tokens": [6],
                "max_new_tokens": 8,
            }
        )
    )
    typed = ("--model", str(tmp_path / "m"), "--prompt", "A dog.", "--dtype", "float32")
    done = call(*typed, "--task", "default", "--json")
    assert next(line for line in done.err if line.startswith("task")) == (
        "task default: suppress_tokens [4], begin_suppress_tokens [6], decoder_start_token_id 7, "
        "max_tokens 8, forced_tokens (9,), eos_token_id [1, 5]"
    )
    record = done.records[0]
    without = call(*typed, "--max-tokens", "8", "--json").records[0]
    assert record["text"] == without["text"], "those that hold for all outputs hold without a task"
    other = call(*typed, "--max-tokens", "8", "--json", "--decoder-start-token-id", "3").records[0]
    model, tokenizer = load(tmp_path / "m", dtype=mx.float32)
    decoder = SpeculativeDecoder(model, None, tokenizer)
    wanted = decoder.generate("A dog.", max_tokens=8, decoder_start_token_id=3)
    assert other["text"] == wanted.text
    call(*typed, "--decoder-start-token-id", "999").check_error("has the id 999")
    assert read_task(tmp_path / "m").ids == {"eos_token_id": [1, 5]}


def test_a_server_takes_a_start_token_for_each_request() -> None:
    given = {"prompt": "A dog.", "decoder_start_token_id": 7, "begin_suppress_tokens": [3, 4]}
    options = parse_options(given, GenerationOptions())
    assert options.decoder_start_token_id == 7 and options.begin_suppress_tokens == (3, 4)
    for wrong in (-1, "7", 1.5, [7]):
        with pytest.raises(Refused) as error:
            parse_options(given | {"decoder_start_token_id": wrong}, GenerationOptions())
        assert error.value.status == 400
        assert str(error.value).startswith("decoder_start_token_id must be an integer of at least")


def test_a_t5gemma_has_them_too(tmp_path: Path) -> None:
    write_gemma(tmp_path, 1)
    edit_json(tmp_path / "generation_config.json", suppress_tokens=[4, 5], eos_token_id=[1, 8])
    model, _ = load(tmp_path)
    assert model.info.constraints.suppress_tokens == (4, 5)
    assert model.info.eos_token_ids == {1, 8}
