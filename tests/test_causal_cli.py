"""The command line with decoder-only models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder

import mlx.core as mx
import pytest
from checkpoints import write_causal
from commands import Call

# Outputs of commands are compared with those of others.
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
TEXT = ("--prompt", "x")
PAIR = ("--model", "target", "--draft-model", "draft")
T5 = ("--model", "correct-small")
LONG = "He go " * 60


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("causal")
    write_causal(here / "weights" / "target", vocab_size=304)
    write_causal(here / "weights" / "draft", vocab_size=320, num_hidden_layers=1)
    return here


def decoder(here: Path, **options: Any) -> SpeculativeDecoder:
    models = (here / "weights" / name for name in ("target", "draft"))
    return SpeculativeDecoder.from_pretrained(*models, dtype=mx.float32, **options)


def test_a_prompt_is_continued_or_is_a_chat(call: Call, here: Path) -> None:
    for chat in ((), ("--chat",)):
        done = call(*PAIR, *chat, "--prompt", "He go", "--max-tokens", "12", "--json")
        assert done.code == 0 and not done.err
        expected = decoder(here, chat=bool(chat)).generate("He go", max_tokens=12)
        (found,) = done.records
        assert found["tokens"] == expected.tokens and found["text"] == expected.text
        assert found["stats"]["drafted"]
    done = call("repl", *PAIR, "--chat", "--max-tokens", "12", stdin="He go\n")
    assert done.code == 0 and done.out.strip() == expected.text.strip()


def test_a_batch_may_use_nucleus_sampling(call: Call, here: Path) -> None:
    sampled = ("--temperature", "1", "--top-p", "0.9", "--max-tokens", "12")
    lines = "He go\nShe have a apple\nThey was here\n"
    one, other = (
        call("batch", "-", *PAIR, "--chat", *sampled, "--batch-size", size, stdin=lines)
        for size in ("1", "3")
    )
    assert one.code == 0 and one.out == other.out
    expected = decoder(here, chat=True).generate("He go", temperature=1.0, top_p=0.9, max_tokens=12)
    assert one.records[0]["text"] == expected.text


def test_a_prompt_beyond_the_context_is_an_error_or_loses_its_beginning(
    call: Call, here: Path
) -> None:
    done = call("batch", "-", *PAIR, stdin=LONG)
    assert done.code == 3
    assert "tokens, more than the 64 that the model is made for" in done.records[0]["error"]
    refused = call(*PAIR, "--prompt", LONG)
    refused.check_error("tokens, more than the 64")
    assert refused.err[0].endswith("(--truncate) to cut it, or split it")
    engine = decoder(here)
    ids = engine.encode(LONG)
    done = call("batch", "-", *PAIR, "--truncate", "--max-source-length", "20", stdin=LONG)
    expected = engine.generate(ids[-20:])
    assert done.records[0]["truncated"] and done.records[0]["text"] == expected.text
    assert expected.stats.emitted <= 64 - 20 + 1
    room = ("--truncate", "--max-tokens", "15")
    (found,) = call("batch", "-", *PAIR, *room, stdin=LONG).records
    assert found["text"] == engine.generate(ids[-50:], max_tokens=15).text
    assert call(*PAIR, "--prompt", LONG, "--json", *room).records[0]["text"] == found["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("batch", "-", *PAIR, "--max-source-length", "65"), "max_source_length must be at most"),
        (("batch", "-", *PAIR, "--chat", "--truncate"), "truncate would cut into the chat"),
        ((*PAIR[:2], "--draft-model", "correct-small", *TEXT), "the target is decoder-only"),
        ((*T5, "--draft-model", "target", *TEXT), "is an encoder-decoder, the draft is decoder-"),
        ((*T5, "--chat", *TEXT), "a chat needs a decoder-only model's tokenizer"),
    ],
)
def test_bad_input_is_one_line(call: Call, arguments: tuple[str, ...], message: str) -> None:
    call(*arguments).check_error(message)


def test_models_lists_them_with_their_drafts(call: Call) -> None:
    found = {Path(record["folder"]).name: record for record in call("models", "--json").records}
    assert found["target"]["family"] == found["draft"]["family"] == "qwen3"
    assert found["target"]["drafts"] == ["draft"] and found["correct-base"]["drafts"]
    assert found["target"]["stored"] == ["float32"]
    assert found["target"]["num_parameters"] > found["draft"]["num_parameters"]
