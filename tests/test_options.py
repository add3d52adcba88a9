"""Options as values, and the keywords that the decoder takes."""

import copy
import inspect
import pickle
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding import Sampler, Verifier
from speculative_t5.generation import BatchOptions, DraftingOptions, GenerationOptions
from speculative_t5.generation.decoder_options import LoadingOptions
from speculative_t5.generation.options import TRANSFORMERS_NAMES, SingleOptions
from speculative_t5.tokenizers import PromptEncoder

import pytest
from checkpoints import refused
from conftest import GREEDY, REPOSITORY, tiny_model
from messages import check_message


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    return {p.name: p.default for p in inspect.signature(function).parameters.values()}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("generate", SingleOptions),
        ("stream", GenerationOptions),
        ("generate_batch", BatchOptions),
        ("iter_batch", BatchOptions),
    ],
)
def test_methods_show_the_options_that_they_take(method: str, options: Any) -> None:
    shown = parameters(getattr(SpeculativeDecoder, method))
    assert [*shown.items()][2:] == [*parameters(options).items()]
    decoder = SpeculativeDecoder(tiny_model(vocab_size=20))
    with pytest.raises(TypeError, match=f"{method}.* unexpected keyword argument 'zeal'"):
        getattr(decoder, method)([], max_tokens=3, zeal=1, ardour=2)
    with pytest.raises(TypeError, match=rf"{method}\(\): too many positional"):
        getattr(decoder, method)([], 3)


@pytest.mark.parametrize("function", [SpeculativeDecoder, SpeculativeDecoder.from_pretrained])
def test_keywords_of_the_decoder_are_all_options(function: Callable[..., Any]) -> None:
    options = parameters(DraftingOptions) | parameters(PromptEncoder)
    del options["model"], options["tokenizer"]
    assert parameters(function).items() >= options.items()


def test_an_unknown_keyword_is_a_type_error(tmp_path: Path) -> None:
    for make in (SpeculativeDecoder, SpeculativeDecoder.from_pretrained):
        with pytest.raises(TypeError, match="unexpected keyword argument 'num_drafts'"):
            make(tmp_path / "absent", num_drafts=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("method", ["generate", "stream", "iter_batch", "rewrite", "__init__"])
def test_an_unknown_keyword_is_refused_with_what_lists_the_known(method: str) -> None:
    decoder = SpeculativeDecoder(tiny_model(vocab_size=20))
    said = f"{method}() got an unexpected keyword argument 'zeal': help() of it lists all"
    with pytest.raises(TypeError, match=f"{re.escape(said)} options$"):
        getattr(decoder, method)("x", zeal=True)


ELSEWHERE = [
    ("generate", "num_draft", ", which is an option of the constructor: give it there"),
    ("rewrite", "delta", ", which is an option of the constructor: give it there"),
    ("__init__", "temperature", ", which is an option of generate: give it there"),
    ("from_pretrained", "stop", ", which is an option of generate: give it there"),
    ("generate", "batch_size", ", which is an option of generate_batch: give it there"),
    ("stream", "probabilities", ", which is an option of generate: give it there"),
    ("generate", "max_length", ": write max_tokens"),
    ("rewrite", "max_length", ": write max_tokens"),
    ("generate_batch", "min_new_tokens", ": write min_tokens"),
    ("__init__", "num_assistant_tokens", ": write num_draft"),
    (
        "generate",
        "assistant_model",
        ", which is draft here, an option of the constructor: give it there",
    ),
    ("generate", "temprature", ": write temperature if you meant that"),
    ("__init__", "num_drafts", ": write num_draft if you meant that"),
]


@pytest.mark.parametrize(("method", "keyword", "advice"), ELSEWHERE)
def test_a_keyword_from_elsewhere_is_refused_with_what_to_write_here(
    method: str, keyword: str, advice: str
) -> None:
    decoder = SpeculativeDecoder(tiny_model(vocab_size=20))
    with pytest.raises(TypeError) as refusal:
        getattr(decoder, method)("x", **{keyword: 3})
    text = str(refusal.value)
    assert text.endswith(f"{method}() got an unexpected keyword argument {keyword!r}{advice}")
    check_message(text)


def test_names_of_other_programs_stand_for_options_that_there_are() -> None:
    known = {name for each in (GenerationOptions, LoadingOptions) for name in parameters(each)}
    assert {*TRANSFORMERS_NAMES.values()} <= known and not known & {*TRANSFORMERS_NAMES} - {
        "max_new_tokens"
    }


EMPTY = inspect.Parameter.empty
TAKING = ["generate", "generate_batch", "iter_batch", "stream", "from_pretrained", "rewrite"]


@pytest.mark.parametrize("method", ["__init__", *TAKING])
def test_help_says_what_each_option_does(method: str) -> None:
    function = getattr(SpeculativeDecoder, method)
    shown = pydoc.render_doc(function, renderer=pydoc.plaintext)
    assert "--" not in shown, "options of a command line"
    section = shown.partition("    Options:\n")[2]
    told = re.findall(r"^ {8}(\w+): \S.+$", section, re.MULTILINE)
    assert told == [name for name, default in parameters(function).items() if default is not EMPTY]
    whole = pydoc.render_doc(SpeculativeDecoder, renderer=pydoc.plaintext)
    assert section.rstrip() in re.sub(r"^ \|  ", "", whole, flags=re.MULTILINE)


def test_an_interpreter_without_docstrings_has_the_same_methods() -> None:
    code = "from speculative_t5 import SpeculativeDecoder as S; print(S.generate.__doc__)"
    command = [sys.executable, "-OO", "-c", code]
    assert subprocess.check_output(command, text=True, cwd=REPOSITORY) == "None\n"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"draft_vocab": 1}, "draft_vocab must be above 1, the id that ends outputs, got 1"),
        ({"num_draft": "many"}, "num_draft must be an integer of at least 1 or 'auto', got 'many'"),
        ({"draft": "small"}, "draft must be a loaded model, 'lookup' or None, got 'small'"),
        ({"min_ngram": 3, "max_ngram": 2}, "max_ngram must be an integer from 3 to 16, got 2"),
        ({"delta": float("nan")}, "delta must be between 0 and 1, got nan"),
        ({"verify": "loud"}, "verify must be 'auto', 'coupled', 'token' or 'block', got 'loud'"),
        ({"verify": "block", "delta": 0.1}, "takes no delta above 0, got 0.1"),
        ({"steady": True, "delta": 0.1}, "delta 0.1 lets them depend on it"),
    ],
)
def test_bad_options_of_a_decoder_are_refused(options: dict[str, Any], found: str) -> None:
    with refused(re.escape(found), found):
        SpeculativeDecoder(tiny_model(), **options)


def test_a_name_in_place_of_the_target_is_refused() -> None:
    with refused("give from_pretrained its name", "got 'correct-base'"):
        SpeculativeDecoder("correct-base")  # type: ignore[arg-type]


BEAMS = {"num_beams": 2}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": [3, 25]}, "prompt ids must be from 0 to 19, got 25"),
    ({"prompt": "text"}, "needs a tokenizer"),
    ({"temperature": -1.0}, "temperature must be 0 or at least 1e-05, got -1.0"),
    ({"temperature": float("inf")}, "temperature must be 0 or at least 1e-05, got inf"),
    ({"temperature": "a"}, "temperature must be a number, got 'a'"),
    ({"top_k": 2.5}, "top_k must be an integer of at least 0, got 2.5"),
    ({"top_p": 0.0}, "top_p must be above 0 and at most 1 (1 is off), got 0.0"),
    ({"seed": -1}, "seed must be an integer from 0 to"),
    ({"max_tokens": "5"}, "max_tokens must be an integer of at least 1, got '5'"),
    ({"max_tokens": 5, "max_new_tokens": 6}, "max_new_tokens, another name for it, is 6"),
    ({"max_new_tokens": 0}, "got 0"),
    ({"num_return_sequences": 2}, "greedy decoding has only one output"),
    ({"num_return_sequences": 0}, "got 0"),
    ({"stop": ""}, "got ''"),
    ({"stop": ["a", 3]}, "got 3"),
    ({"stop": "a"}, "stop strings need a tokenizer"),
    ({"stop": 3}, "got 3"),
    ({"stop_token_ids": [20]}, "the id 20"),
    ({"stop_token_ids": 3}, "got 3"),
    ({"bad_words": ["a"]}, "'a'"),
    ({"bad_words": ["\ud800"]}, "not UTF-8"),
    ({"bad_words": [3]}, "got 3"),
    ({"forced_tokens": "a"}, "'a'"),
    ({"forced_tokens": 3}, "got 3"),
    ({"bad_words": [[]]}, "bad_words has a sequence without tokens"),
    ({"bad_words": [[2, -1]]}, "an id of bad_words must be an integer of at least 0, got -1"),
    ({"suppress_tokens": [3], "forced_tokens": [2, 3]}, "the id 3 is in forced_tokens and in"),
    ({"suppress_tokens": [-1]}, "got -1"),
    ({"suppress_tokens": [25]}, "the id 25"),
    ({"suppress_tokens": 3}, "got 3"),
    ({"logit_bias": {-1: 2.0}}, "got -1"),
    ({"logit_bias": {5: 1e39}}, "got 1e+39"),
    ({"logit_bias": {5: float("nan")}}, "got nan"),
    ({"logit_bias": {5: float("inf")}}, "got inf"),
    ({"logit_bias": [3]}, "got [3]"),
    ({"logits_processors": len}, "got <built-in function len>"),
    ({"logits_processors": ["penalty"]}, "got 'penalty'"),
    ({"no_repeat_ngram_size": -1}, "got -1"),
    ({"min_tokens": -1}, "got -1"),
    ({"repetition_penalty": 0.0}, "got 0.0"),
    ({"repetition_penalty": float("inf")}, "got inf"),
    ({"repetition_penalty": 1e-50}, "got 1e-50"),
    ({"num_beams": 0}, "got 0"),
    (BEAMS | {"num_return_sequences": 3}, "num_return_sequences 3"),
    (BEAMS | {"temperature": 0.5}, "temperature is 0.5"),
    (BEAMS | {"stop": "a"}, "stop strings"),
    (BEAMS | {"length_penalty": float("nan")}, "got nan"),
    (BEAMS | {"length_penalty": 2000.0}, "got 2000.0"),
    (BEAMS | {"early_stopping": "soon"}, "got 'soon'"),
    (BEAMS | {"early_stopping": 1}, "got 1"),
]
ONLY_GENERATE: list[tuple[dict[str, Any], str]] = [
    (BEAMS, "num_beams is"),
    ({"scores": True}, "scores is True, which needs"),
    ({"temperature": 1.0, "num_return_sequences": 2}, "num_return_sequences is 2, which needs"),
]


@pytest.mark.parametrize(
    ("method", "options", "found"),
    [
        *(("generate", *refused) for refused in REFUSED),
        ("stream", {"prompt": []}, "the prompt is empty"),
        ("stream", {"stop_token_ids": [20]}, "the id 20"),
        *(("stream", *refused) for refused in ONLY_GENERATE),
    ],
)
def test_bad_options_of_a_call_are_refused_before_anything_is_decoded(
    method: str, options: dict[str, Any], found: str
) -> None:
    decoder = SpeculativeDecoder(tiny_model(vocab_size=20))
    with refused(re.escape(found)):
        getattr(decoder, method)(**{"prompt": [3, 1]} | options)


def test_options_reach_the_plan() -> None:
    target = tiny_model(vocab_size=20)
    decoder = SpeculativeDecoder(target, "lookup", num_draft=4, delta=0.25, min_ngram=2)
    options = GenerationOptions(max_tokens=9, temperature=0.5, top_k=7, top_p=0.75, seed=11)
    plan = decoder.engine.plan()
    assert plan.verifier == Verifier(0.25, "token", target.broadcast)
    (request,) = decoder.engine.requests([(3, [5, 1])], options)
    assert (request.index, request.source, plan.schedule.next(99)) == (3, [5, 1], 4)
    own = request.options
    assert (own.max_tokens, own.seed, own.sampler) == (9, 11, Sampler(0.5, 7, 0.75))
    # A match of one token is too short, and of two is found.
    plan.drafter.start([[3, 4, 5, 6, 1]])
    assert plan.drafter.propose([[0, 7, 4]], 2, GREEDY, None).lengths == [0]
    assert plan.drafter.propose([[0, 7, 4, 3, 4]], 2, GREEDY, None).tokens.tolist() == [[5, 6]]
    assert decoder.engine.plan(speculative=False).schedule.next(99) == 0


def test_max_new_tokens_is_another_name() -> None:
    options = GenerationOptions(max_new_tokens=3)
    assert options == GenerationOptions(max_tokens=3) and options.max_tokens == 3


def test_lists_may_come_from_iterators() -> None:
    given: dict[str, Any] = {"suppress_tokens": [3, 7], "bad_words": [[5], [4, 6]], "stop": ["a"]}
    iterators: dict[str, Any] = {name: iter(values) for name, values in given.items()}
    assert GenerationOptions(**iterators) == GenerationOptions(**given)


def test_draft_lengths_are_learned_by_options_and_not_copied() -> None:
    target = tiny_model(vocab_size=20)
    decoder = SpeculativeDecoder(target, "lookup")
    changes: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 3}]
    samplers = [decoder.engine.bind(GenerationOptions(**change)).sampler for change in changes]
    schedules = [decoder.engine.plan(sampler).schedule for sampler in (*samplers, None)]
    assert len({*map(id, schedules)}) == 5
    assert all(
        decoder.engine.plan(s).schedule is old for s, old in zip(samplers, schedules, strict=False)
    )
    for copied in (copy.deepcopy(decoder), pickle.loads(pickle.dumps(decoder))):
        assert copied.engine.plan(samplers[0]).schedule is not schedules[0]
