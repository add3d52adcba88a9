"""Options that checkpoints come with for their tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.checkpoints import read_task

import pytest
from commands import caller
from conftest import REPOSITORY
from messages import check_message

# Those of t5-small, and one of our own.
TASKS: dict[str, Any] = {
    "summarization": {
        "early_stopping": True, "length_penalty": 2.0, "max_length": 200, "min_length": 30,
        "no_repeat_ngram_size": 3, "num_beams": 4, "prefix": "summarize: ",
    },
    "translation_en_to_de": {
        "early_stopping": True, "max_length": 300, "num_beams": 4,
        "prefix": "translate English to German: ",
    },
    "stories": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "forced_bos_token_id": 7},
    "groups": {"num_beam_groups": 2, "num_beams": 4},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"model_type": "t5", "is_encoder_decoder": True, "task_specific_params": TASKS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    defaults = {"eos_token_id": 1, "pad_token_id": 0, "max_new_tokens": 40, "top_k": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    return tmp_path


def test_lengths_are_counted_without_the_start_token(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    found = read_task(folder, "summarization")
    assert found.prefix == "summarize: "
    assert found.options == {
        "num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 3,
        "max_tokens": 199, "min_tokens": 29,
    }  # fmt: skip


def test_a_tasks_options_come_over_those_for_all_prompts(folder: Path) -> None:
    assert read_task(folder).options == {"max_tokens": 40}
    found = read_task(folder, "stories")
    assert found.prefix is None
    assert found.options == {
        "temperature": 0.7, "top_k": 9, "top_p": 0.9, "forced_tokens": (7,), "max_tokens": 40,
    }  # fmt: skip


def test_neutral_values_and_stops_are_taken(folder: Path) -> None:
    raw = {"min_p": 0.0, "sequence_bias": [], "top_h": None, "stop_strings": ["\n"]}
    (folder / "generation_config.json").write_text(json.dumps(raw))
    assert read_task(folder).options == {"stop": ["\n"]}


@pytest.mark.cpu
def test_a_command_takes_a_tasks_options_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (REPOSITORY / "weights" / "correct-base").iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((tmp_path / "config.json").read_text())
    tasks = {"beams": {"num_beams": 3, "max_length": 8, "prefix": "correct: "}}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"task_specific_params": tasks}))
    call = caller(tmp_path, monkeypatch, capfd)
    text, model = "He go home, and she are at school.", str(tmp_path)
    done = call("--model", model, "--task", "beams", "--prompt", text)
    assert done.err[0] == "task beams: num_beams 3, max_tokens 7, prefix 'correct: '"
    assert done.err[1].endswith("cut at --max-tokens 7")
    expected = SpeculativeDecoder.from_pretrained(tmp_path).generate(
        text, num_beams=3, max_tokens=7
    )
    assert done.out == f"{expected.text}\n"
    done = call("--model", model, "--task", "beams", "--prompt", text, "--max-tokens", "256")
    assert done.err[0] == "task beams: num_beams 3, prefix 'correct: '" and "cut" not in done.err[1]
    done = call("--model", model, "--task", "beam", "--prompt", text)
    check_message(done.err[0].removeprefix("error: "))


@pytest.mark.parametrize(
    ("task", "found"), [("summarisation", "summarization"), ("groups", "num_beam_groups 2")]
)
def test_what_is_not_known_or_offered_is_refused(folder: Path, task: str, found: str) -> None:
    with pytest.raises(ValueError) as error:
        read_task(folder, task)
    check_message(str(error.value))
    assert found in str(error.value)
