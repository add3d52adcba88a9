"""What earlier versions made or left half done still works, or a line says what to do."""

import json
import shutil
from pathlib import Path

from speculative_t5 import SpeculativeDecoder

import mlx.core as mx
import pytest
from commands import Call
from conftest import REPOSITORY
from messages import check_message

MADE = REPOSITORY / "tests" / "upgrading"
# The outputs of 0.5 for both models: quantizing changes none of them.
OUTPUTS = {
    "He go home.": [10, 303, 29, 231, 91, 225, 198, 49],
    "a": [10, 105, 35, 289, 19, 16, 200, 16],
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with what 0.5 made."""
    shutil.copytree(MADE, tmp_path / "weights")
    for name in ("prompts.txt", "output.jsonl"):
        shutil.copy(MADE / name, tmp_path)
    return tmp_path


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["converted", "quantized"])
def test_a_folder_of_earlier_versions_gives_the_same_outputs(name: str) -> None:
    decoder = SpeculativeDecoder.from_pretrained(MADE / name, dtype=mx.float32)
    for prompt, tokens in OUTPUTS.items():
        assert decoder.generate(prompt, max_tokens=8).tokens == tokens


@pytest.mark.cpu
@pytest.mark.parametrize("torn", ["", '{"id": 4, "prompt": "He go'])
def test_an_output_that_an_earlier_version_began_is_continued(
    call: Call, here: Path, torn: str
) -> None:
    whole = (here / "output.jsonl").read_text()
    (here / "output.jsonl").write_text("".join(whole.splitlines(True)[:3]) + torn)
    arguments = ("batch", "prompts.txt", "--model", "converted", "--max-tokens", "8")
    done = call(*arguments, "--output", "output.jsonl", "--resume")
    assert done.code == 0 and "3 of them earlier" in done.err[-1]
    records, expected = (
        [json.loads(line) for line in text.splitlines()]
        for text in ((here / "output.jsonl").read_text(), whole)
    )
    assert [each["prompt"] for each in records] == [each["prompt"] for each in expected]
    assert records[:3] == expected[:3] and records[3]["finish_reason"] == "length"


def test_what_a_killed_conversion_left_is_set_right(call: Call, here: Path) -> None:
    """Earlier versions were killed between the two renames, as today's may be."""
    left = here / "weights" / ".converted.partial"
    left.mkdir()
    (here / "weights" / "converted").rename(left / "old")
    shutil.copytree(MADE / "converted", here / "checkpoint")
    done = call("convert", "checkpoint", "--output", "weights/converted", "--force")
    assert done.code == 0 and not left.exists()
    assert (here / "weights" / "converted" / "weights.npz").exists()


def test_what_is_gone_says_what_to_do(call: Call, here: Path) -> None:
    (here / "lines.jsonl").write_text('{"text": "He go home."}\n')
    for arguments, said in (
        (("bench", "--plot", "x.png"), "run bench --json | python scripts/figures/draw_sweep.py"),
        (("batch", "lines.jsonl", "--model", "converted"), "with --prompt-field"),
        (
            (
                "--model",
                str(REPOSITORY / "weights" / "correct-base"),
                "--prompt",
                "a",
                "--draft-model",
                "converted",
            ),
            "choose another draft",
        ),
    ):
        done = call(*arguments)
        (line,) = done.err
        assert done.code == 2 and said in line, line
        if "see python" not in line:
            check_message(line.removeprefix("error: "))


def test_what_earlier_versions_cached_changes_nothing(call: Call, here: Path) -> None:
    for name in ("calibration/85d37102e47d95d917532da42cf7a472.json", "history", "tips-given"):
        path = here / "cache" / "speculative_t5" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"draft_seconds": [')
    before = call("--model", "converted", "--prompt", "a", "--max-tokens", "8")
    shutil.rmtree(here / "cache")
    after = call("--model", "converted", "--prompt", "a", "--max-tokens", "8")
    assert (before.code, before.out) == (after.code, after.out) == (0, after.out)
