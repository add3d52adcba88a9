"""Options as values, and the keywords that the decoder takes."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.checkpoints import RENAMED
from speculative_t5.decoding import Sampler, Verifier, calibration
from speculative_t5.generation import BatchOptions, DraftingOptions, GenerationOptions
from speculative_t5.generation.options import OTHERS, SingleOptions
from speculative_t5.tokenizers import PromptEncoder

import pytest
from conftest import tiny_draft, tiny_model


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
    with pytest.raises(TypeError, match="too many positional"):
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


@pytest.mark.parametrize(
    ("method", "name", "hint"),
    [
        ("generate", "do_sample", ": use temperature"),
        ("stream", "max_length", ": use max_tokens"),
        ("stream", "eos_token_id", ": use stop_token_ids"),
        ("iter_batch", "bad_words_ids", ": use bad_words"),
        ("generate_batch", "top_q", ": did you mean top_[kp]\\?"),
        ("generate", "num_draft", ": num_draft is an option of SpeculativeDecoder"),
        ("generate", "by_length", ": by_length is an option of generate_batch"),
        ("generate", "nonsense", ""),
        ("rewrite", "do_sample", ": temperature is an option of generate"),
        ("rewrite", "max_new_tokens", ": use max_tokens"),
        ("from_pretrained", "num_beams", ": num_beams is an option of generate"),
        ("from_pretrained", "torch_dtype", ": use dtype"),
        ("__init__", "dtype", ": dtype is an option of from_pretrained"),
        ("__init__", "verfy", ": did you mean verify\\?"),
    ],
)
def test_a_hint_says_what_to_use_instead(method: str, name: str, hint: str) -> None:
    decoder = SpeculativeDecoder(tiny_model(vocab_size=20))
    with pytest.raises(TypeError, match=f"{method}\\(\\) got .* argument '{name}'{hint}$"):
        getattr(decoder, method)("x", **{name: 1})


def test_transformers_names_stand_for_options_that_exist() -> None:
    own = parameters(GenerationOptions) | parameters(SpeculativeDecoder.from_pretrained)
    assert own.keys() >= {*RENAMED.values(), *OTHERS.values()}
    assert not own.keys() & OTHERS.keys()


def test_options_reach_the_plan() -> None:
    target = tiny_model(vocab_size=20)
    decoder = SpeculativeDecoder(target, "lookup", num_draft=4, delta=0.25, min_ngram=2)
    options = GenerationOptions(max_tokens=9, temperature=0.5, top_k=7, top_p=0.75, seed=11)
    plan = decoder.plan(options)
    assert plan.verifier == Verifier(Sampler(0.5, 7, 0.75), delta=0.25, block=False)
    own = plan.options
    assert own and (own.max_tokens, own.seed, plan.schedule.next(99)) == (9, 11, 4)
    assert own.sampler is plan.verifier.sampler
    # A match of one token is too short, and of two is found.
    plan.drafter.start([[3, 4, 5, 6, 1]])
    assert plan.drafter.propose([[0, 7, 4]], 2, None).lengths == [0]
    assert plan.drafter.propose([[0, 7, 4, 3, 4]], 2, None).tokens.tolist() == [[5, 6]]
    assert decoder.plan(GenerationOptions(speculative=False)).schedule.next(99) == 0
    greedy = decoder.plan(GenerationOptions()).options
    assert greedy and greedy.seed is None, "greedy decoding leaves nothing to it"


def test_calibrations_are_kept_by_options_and_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("BUDGET", "WARMUP"):
        monkeypatch.setattr(calibration, name, 0.0)
    target = tiny_model(vocab_size=20)
    decoder = SpeculativeDecoder(target, tiny_draft(target), num_draft="auto")
    requests = [(0, [5, 6, 1]), (1, [7, 1])]
    changes: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 3}]
    for count in (1, 2):  # batch sizes
        for change in changes:
            plans = [decoder.plan(GenerationOptions(**change), requests[:count]) for _ in range(2)]
            keeps_learning = plans[0].schedule is plans[1].schedule
            assert keeps_learning == ("temperature" not in change), "samples are repeatable"
    assert len(decoder._schedules) == 8
    for copied in (copy.deepcopy(decoder), pickle.loads(pickle.dumps(decoder))):
        assert len(copied._schedules) == 0
