"""What drives the loop: the methods of an engine, and the names that they had before."""

import copy
from collections.abc import Callable
from typing import Any, cast

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding import decode
from speculative_t5.generation import BatchOptions, GenerationOptions

import pytest
from checkpoints import refused
from conftest import tiny_model

PROMPT, OPTIONS = [3, 4, 1], GenerationOptions(max_tokens=6)


@pytest.fixture
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_model(vocab_size=20), "lookup", num_draft=3)


def test_requests_and_a_plan_are_all_that_the_loop_needs(decoder: SpeculativeDecoder) -> None:
    engine = decoder.engine
    requests = engine.requests([(0, PROMPT)], OPTIONS)
    *_, done = decode(engine.model, requests, engine.plan(), batch_size=1)
    assert done.output == decoder.generate(PROMPT, max_tokens=6).tokens
    assert done.output == next(engine.generations([(0, PROMPT)], OPTIONS, 1))[1].tokens


MOVED: dict[str, Callable[[Any], Any]] = {
    "bind": lambda bind: bind(OPTIONS).max_tokens,
    "plan": lambda plan: plan().schedule,
    "requests": lambda requests: list(requests([(0, PROMPT)], OPTIONS))[0].source,
    "rounds": lambda rounds: [done.tokens for done in rounds([(0, PROMPT)], OPTIONS)],
    "generations": lambda generations: next(generations([(0, PROMPT)], OPTIONS, 1))[1].tokens,
}


@pytest.mark.parametrize("name", MOVED)
def test_a_method_that_has_moved_still_works_and_names_its_new_place(
    decoder: SpeculativeDecoder, name: str
) -> None:
    told = f"SpeculativeDecoder.{name} has moved: write SpeculativeDecoder.engine.{name}"
    with pytest.warns(DeprecationWarning, match=told) as seen:
        method = getattr(decoder, name)
    assert [warning.filename for warning in seen] == [__file__]
    assert MOVED[name](method) == MOVED[name](getattr(decoder.engine, name))
    assert f"engine.{name}" in repr(getattr(SpeculativeDecoder, name))


def test_a_copy_shares_what_was_learned_and_a_deep_one_does_not(
    decoder: SpeculativeDecoder,
) -> None:
    assert copy.copy(decoder).engine is decoder.engine
    assert copy.deepcopy(decoder).engine is not decoder.engine


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"batch_size": 2}, "steady decodes one prompt at a time, got batch_size 2"),
        ({"num_beams": 2}, "a beam search does not go with a draft"),
        ({"stop_token_ids": [20]}, "stop_token_ids has the id 20"),
        ({"stop": "a"}, "stop strings need a tokenizer"),
    ],
)
def test_options_of_a_batch_are_checked_without_a_prompt(
    options: dict[str, Any], fault: str
) -> None:
    decoder = SpeculativeDecoder(tiny_model(vocab_size=20), "lookup", steady=True)
    with refused(fault):
        decoder.check_batch(BatchOptions(**options))
    decoder.check_batch(BatchOptions(speculative=False, max_tokens=3))


def test_a_decoder_shows_its_models_and_how_they_draft() -> None:
    pair = SpeculativeDecoder.from_pretrained("correct-base", num_draft=3)
    for options, shown in (
        ({"draft": None}, "draft=None"),
        ({"draft": "lookup"}, "draft='lookup', num_draft='auto', verify='coupled'"),
        (
            {"draft": pair.draft, "num_draft": 3, "delta": 0.5, "lookup": True},
            "draft='correct-small', lookup=True, num_draft=3, verify='token', delta=0.5",
        ),
        (
            {"draft": pair.draft, "verify": "block", "steady": True},
            "draft='correct-small', num_draft='auto', verify='block', steady=True",
        ),
    ):
        options = cast(dict[str, Any], options)
        made = SpeculativeDecoder(pair.model, tokenizer=pair.tokenizer, **options)
        assert repr(made) == f"SpeculativeDecoder('correct-base', {shown})"
    unnamed = SpeculativeDecoder(tiny_model(), tiny_model(seed=1))
    assert repr(unnamed) == (
        "SpeculativeDecoder(<T5>, draft=<T5>, num_draft='auto', verify='coupled')"
    )
