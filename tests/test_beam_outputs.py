"""Beam search through `SpeculativeDecoder` and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder

import pytest
from commands import caller
from conftest import EOS, REPOSITORY, tiny_draft, tiny_model
from messages import check_message

pytestmark = pytest.mark.cpu
PROMPTS = [[6, 2, 3, EOS], [4, 4, 8, 9, EOS], [2, EOS], [9, 13, 5, EOS], [7, 3, 3, 11, 2, EOS]]


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_model(vocab_size=20, layers=2, seed=3))


def test_outputs_are_in_the_order_of_prompts_and_scores(decoder: SpeculativeDecoder) -> None:
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_tokens": 15}
    found = decoder.generate_batch(PROMPTS, **options)
    for out in found:
        (other,) = out.alternatives
        assert out.score is not None and other.score is not None and out.score >= other.score
        assert out.stats.rounds >= out.stats.emitted and not out.stats.drafted
    indices = dict(decoder.iter_batch(enumerate(PROMPTS), batch_size=7, **options))
    assert [indices[i].tokens for i in range(5)] == [out.tokens for out in found]


def test_stop_ids_end_beams_as_eos_does(decoder: SpeculativeDecoder) -> None:
    reasons = set()
    for prompt in PROMPTS:
        whole = decoder.generate(prompt, num_beams=3, max_tokens=15)
        ids = whole.tokens[2:5:2]
        best = decoder.generate(
            prompt, num_beams=3, num_return_sequences=3, max_tokens=15, stop_token_ids=ids
        )
        for out in (best, *best.alternatives):
            assert not {*ids}.intersection(out.tokens)
            assert out.stats.emitted == len(out.tokens) + (out.finish_reason != "length")
            reasons.add(out.finish_reason)
    assert "stop" in reasons


def test_beams_do_not_go_with_drafts_and_steady_passes(
    decoder: SpeculativeDecoder,
) -> None:
    target: Any = decoder.model
    for other in (
        SpeculativeDecoder(target, tiny_draft(target)),
        SpeculativeDecoder(target, "lookup"),
        SpeculativeDecoder(target, steady=True),
    ):
        with pytest.raises(ValueError, match="does not go with") as error:
            other.generate(PROMPTS[0], num_beams=2)
        check_message(str(error.value))
    plain = SpeculativeDecoder(target, "lookup").generate(
        PROMPTS[0], num_beams=2, speculative=False
    )
    assert plain.tokens == decoder.generate(PROMPTS[0], num_beams=2).tokens


def test_commands_search_without_the_default_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weights").symlink_to(REPOSITORY / "weights")
    (tmp_path / "in.txt").write_text("He go home.\n")
    call = caller(tmp_path, monkeypatch, capfd)
    decoder = SpeculativeDecoder.from_pretrained("correct-base")
    best = decoder.generate("He go home.", num_beams=3, num_return_sequences=2, length_penalty=2.0)
    given = ("--num-beams", "3", "-n", "2", "--length-penalty", "2")
    (found,) = call("--prompt", "He go home.", "--json", *given).records
    assert (found["text"], found["score"]) == (best.text, best.score)
    assert found["alternatives"][0]["text"] == best.alternatives[0].text
    (record,) = call("batch", "in.txt", *given).records
    assert (record["text"], record["score"]) == (best.text, pytest.approx(best.score, abs=1e-4))
    shown = call("--prompt", "He go home.", "--num-beams", "3").out
    assert shown == f"{best.text}\n"
    for draft in (["--draft-model", "correct-small"], ["--lookup"]):
        (line,) = call("--prompt", "He go home.", *given, *draft).err
        check_message(line.removeprefix("error: "))
        assert "does not go with a draft" in line
