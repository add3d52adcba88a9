"""Options of commands, and what they say beside their outputs, with the shipped pair."""

from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.cli.generate import DEFAULT_PROMPT
from speculative_t5.cli.terminal import a_few_of, footer
from speculative_t5.decoding import Stats
from speculative_t5.generation import GenerationOptions

import mlx.core as mx
import pytest
from checkpoints import refused
from commands import Call
from conftest import REPOSITORY

# Outputs of commands are compared with those of others.
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
SNOW = "\u2603"
LONG = "He go home. " * 300
HOME = ("--prompt", "He go home.")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shipped pair."""
    here = tmp_path_factory.mktemp("ends")
    (here / "weights").symlink_to(REPOSITORY / "weights")
    (here / "long.txt").write_text(LONG)
    (here / "in.txt").write_text("He go home.\ncorrect: He go home.\n")
    return here


def test_the_footer_says_whether_the_output_was_cut(call: Call) -> None:
    lines = call("repl", "--max-tokens", "3", stdin="He go home.\n/set max_tokens 9\nHe go home.\n")
    first, second = lines.err
    assert first.endswith(" - cut at --max-tokens 3") and "cut" not in second
    stats = Stats((0,), (0,), (0,), 7, 0.5)
    assert footer(stats, "eos", 7) == stats.summary()


def test_the_example_shows_its_prompt(call: Call) -> None:
    done = call()
    assert done.code == 0 and done.err[0] == f"prompt: {DEFAULT_PROMPT}"
    assert done.out == call("--prompt", DEFAULT_PROMPT).out
    assert done.out.startswith("My sister has never been to Paris. ")
    assert call("--model", "correct-small", stdin="He go home.").code == 0, "it needs a prompt"


def test_characters_that_the_vocabulary_lacks_are_named_once(call: Call, lacking: Path) -> None:
    model = ("--model", str(lacking), "--max-tokens", "5")
    for command in ((), ("--json",)):
        done = call(*command, *model, "--prompt", f"He {SNOW} go {SNOW} home.")
        said = [line for line in done.err if "vocabulary" in line]
        assert said == [f"the model's vocabulary lacks {SNOW}; it sees the unknown token instead"]
    lines = f"He {SNOW} go.\nHe go.\nHe {SNOW}\u4e16 go.\n"
    done = call("batch", "-", *model, stdin=lines)
    assert done.err[-2] == (
        f"prompts with characters that the model's vocabulary lacks: 2 ({SNOW} \u4e16); "
        "it sees the unknown token instead"
    )
    assert "unknown" not in done.records[0]
    assert sum("vocabulary" in line for line in call("repl", *model, stdin=lines).err) == 2
    assert a_few_of("abcdefg") == "a b c d e and 2 more"


def test_a_prompt_that_is_too_long_is_an_error(call: Call) -> None:
    for command in (("--json", "--prompt", LONG), ("bench", "--prompts", "long.txt")):
        done = call(*command)
        done.check_error(" tokens, more than the 512 that the model is made for")
        assert "--truncate to cut it" in done.err[0]
        assert "the command document to split it" in done.err[0]


def test_truncate_cuts_a_prompt_and_says_so(call: Call) -> None:
    options = ("--truncate", "--max-tokens", "4")
    done = call("--prompt", LONG, *options)
    engine = SpeculativeDecoder.from_pretrained("correct-base", "correct-small", truncate=True)
    cut = engine.fit(LONG).cut
    assert done.err[0] == f"the prompt was cut to 512 tokens, {cut} fewer than it has"
    (record,) = call("batch", "long.txt", *options).records
    assert record["text"] + "\n" == done.out and record["truncated"]
    refused = call("repl", stdin=f"{LONG}\nHe go home.\n")
    assert refused.code == 3 and "cut it, or" in refused.err[0]
    assert refused.out == "He goes home.\n"


def test_types_go_by_name() -> None:
    folder = REPOSITORY / "weights" / "correct-small"
    for name in ("float32", "float16", "bfloat16"):
        assert load(folder, dtype=name)[0].shared.weight.dtype == getattr(mx, name)
    for dtype in ("int8", "", "FLOAT32", mx.int32, 3):
        with refused("dtype must be float32, float16 or bfloat16, "):
            load(folder, dtype=dtype)


TEXT = "He go home. She are happy, and they has a dog."
SEVERAL = ("-n", "3", "--temperature", "1.8", "--seed", "2", "--scores")
MORE = (
    "--repetition-penalty", "3", "--no-repeat-ngram-size", "1", "--min-tokens", "30",
    "--suppress-tokens", "3,5", "--bad-words", "dog", "--bad-words", "home",
    "--logit-bias", "31=-50.5", "--logit-bias", "7=-inf", "--forced-tokens", "83,65",
    "--stop", "and", "--stop", "is", "--stop-token-ids", "3",
)  # fmt: skip


@pytest.fixture(scope="module")
def decoder(loaded_once: None) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained("correct-base", "correct-small")


def test_options_reach_the_decoder(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noting(*_: Any, **options: Any) -> None:
        seen.append(options)
        raise ValueError("this is enough: leave the rest out")

    with monkeypatch.context() as patch:
        patch.setattr(SpeculativeDecoder, "generate", noting)
        assert call("--prompt", TEXT, "--json", *SEVERAL, *MORE).code == 2
    assert GenerationOptions(**seen.pop()) == GenerationOptions(
        repetition_penalty=3.0,
        no_repeat_ngram_size=1,
        min_tokens=30,
        suppress_tokens=[3, 5],
        bad_words=["dog", "home"],
        logit_bias={31: -50.5, 7: float("-inf")},
        forced_tokens=[83, 65],
        stop=["and", "is"],
        stop_token_ids=[3],
        num_return_sequences=3,
        temperature=1.8,
        seed=2,
        scores=True,
    )
    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", noting)
    for command in (HOME, ("batch", "in.txt"), ("repl",), ("bench",)):
        assert call(*command, "--dtype", "float16", "--prefix", "do: ").code == 2
        made = seen.pop()
        assert (made["dtype"], made["prefix"]) == ("float16", "do: ")


def test_a_search_takes_no_default_draft(call: Call) -> None:
    engine = SpeculativeDecoder.from_pretrained("correct-base")
    best = engine.generate("He go home.", num_beams=3, num_return_sequences=2, length_penalty=2.0)
    given = ("--num-beams", "3", "-n", "2", "--length-penalty", "2")
    (found,) = call(*HOME, "--json", *given).records
    assert (found["text"], found["score"]) == (best.text, best.score)
    assert found["alternatives"][0]["text"] == best.alternatives[0].text
    record = call("batch", "in.txt", *given).records[0]
    assert (record["text"], record["score"]) == (best.text, pytest.approx(best.score, abs=1e-4))
    assert call(*HOME, "--num-beams", "3").out == f"{best.text}\n"
    for draft in (["--draft-model", "correct-small"], ["--lookup"]):
        call(*HOME, *given, *draft).check_error("does not go with a draft")


def test_several_outputs_are_printed_a_line_each(call: Call) -> None:
    done = call(*HOME, "-n", "2", "--temperature", "1.0", "--scores")
    scores = [float(line.split("\t")[0]) for line in done.out.splitlines()]
    assert len(scores) == len(done.err) == 2 and max(scores) < 0
    greedy = call(*HOME, "--scores").out
    assert greedy.split("\t")[1] == "He goes home.\n"


def test_the_repl_keeps_its_options(call: Call) -> None:
    done = call("repl", "--stop", "home", stdin="He go home.\nHe go home.\n")
    assert "cut" not in done.err[-1] and done.out == "He goes \n" * 2


def test_texts_are_ids_at_a_beginning_and_after_a_space(
    decoder: SpeculativeDecoder, lacking: Path
) -> None:
    other = SpeculativeDecoder.from_pretrained(lacking)
    for option in ({"bad_words": ["日本"]}, {"bad_words": ["~"]}, {"forced_tokens": "日"}):
        with refused("the vocabulary lacks"):
            other.generate(TEXT, **option)  # type: ignore[arg-type]
    assert decoder.generate(TEXT, forced_tokens="She").text.startswith("She")
    with refused("has no ids"):
        other.generate(TEXT, bad_words=["\n"])
