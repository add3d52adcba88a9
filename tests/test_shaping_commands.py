"""Penalties, stops, several outputs and scores on the command line, with the shipped pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder

import pytest
from commands import Call
from conftest import REPOSITORY
from messages import check_message

# Outputs of commands are compared with those of others.
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
TEXT = "He go home. She are happy, and they has a dog."
OPTIONS: list[tuple[list[str], dict[str, Any]]] = [
    (["--repetition-penalty", "3"], {"repetition_penalty": 3.0}),
    (["--no-repeat-ngram-size", "1"], {"no_repeat_ngram_size": 1}),
    (["--min-tokens", "30"], {"min_tokens": 30}),
    (["--suppress-tokens", "3,5"], {"suppress_tokens": [3, 5]}),
    (["--bad-words", "dog", "--bad-words", "home"], {"bad_words": ["dog", "home"]}),
    (["--logit-bias", "31=-50.5", "--logit-bias", "7=-inf"],
     {"logit_bias": {31: -50.5, 7: float("-inf")}}),
    (["--forced-tokens", "83,65"], {"forced_tokens": [83, 65]}),
    (["--stop", "and", "--stop", "is"], {"stop": ["and", "is"]}),
    (["--stop-token-ids", "3"], {"stop_token_ids": [3]}),
    (["-n", "3", "--temperature", "1.8", "--seed", "2", "--scores"],
     {"num_return_sequences": 3, "temperature": 1.8, "seed": 2, "scores": True}),
]  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shipped pair."""
    here = tmp_path_factory.mktemp("shaping")
    (here / "weights").symlink_to(REPOSITORY / "weights")
    return here


@pytest.fixture(scope="module")
def decoder(loaded_once: None) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained("correct-base", "correct-small")


@pytest.mark.parametrize(("given", "options"), OPTIONS, ids=[given[0] for given, _ in OPTIONS])
def test_options_reach_the_decoder(
    given: list[str], options: dict[str, Any], call: Call, decoder: SpeculativeDecoder
) -> None:
    expected = decoder.generate(TEXT, **options)
    (found,) = call("--prompt", TEXT, "--json", *given).records
    assert (found["text"], found["finish_reason"]) == (expected.text, expected.finish_reason)
    assert expected.text != decoder.generate(TEXT).text
    assert found.get("score") == expected.score
    others = [each["text"] for each in found.get("alternatives", [])]
    assert others == [each.text for each in expected.alternatives]
    if others:
        first, second = call("batch", "-", *given, stdin=f"{TEXT}\nHe go home.\n").records
        assert first["text"] == expected.text
        assert first["score"] == pytest.approx(expected.score, abs=1e-4)
        assert len(second["alternatives"]) == len(others)


def test_outputs_are_printed_a_line_each(call: Call) -> None:
    done = call("--prompt", "He go home.", "-n", "2", "--temperature", "1.0", "--scores")
    scores = [float(line.split("\t")[0]) for line in done.out.splitlines()]
    assert len(scores) == len(done.err) == 2 and max(scores) < 0
    greedy = call("--prompt", "He go home.", "--scores").out
    assert greedy.split("\t")[1] == "He goes home.\n"


def test_the_repl_keeps_them(call: Call) -> None:
    done = call("repl", "--stop", "home", stdin="He go home.\n/compare\n")
    assert "cut" not in done.err[-1]
    assert done.out.startswith("He goes \n") and "outputs are the same" in done.out


def test_texts_are_ids_at_a_beginning_and_after_a_space(
    decoder: SpeculativeDecoder, lacking: Path
) -> None:
    other = SpeculativeDecoder.from_pretrained(lacking)
    for option in ({"bad_words": ["日本"]}, {"bad_words": ["~"]}, {"forced_tokens": "日"}):
        with pytest.raises(ValueError, match="the vocabulary lacks") as error:
            other.generate(TEXT, **option)  # type: ignore[arg-type]
        check_message(str(error.value))
    assert decoder.generate(TEXT, forced_tokens="She").text.startswith("She")
    with pytest.raises(ValueError, match="has no ids") as error:
        other.generate(TEXT, bad_words=["\n"])
    check_message(str(error.value))
