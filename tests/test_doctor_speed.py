"""What `doctor` measures, and the block that it prints for an issue."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, device, measure
from speculative_t5.checkpoints import dtype_name
from speculative_t5.cli import doctor as command
from speculative_t5.decoding import Outcome
from speculative_t5.doctor import Check, Finding, Subject, speed
from speculative_t5.measure import Run, passes
from speculative_t5.measure.comparison import record
from speculative_t5.models import T5, T5Config

import mlx.core as mx
import pytest
from commands import Call, Done, Printed, caller
from conftest import KINDS, tiny
from markdown_it import MarkdownIt


@pytest.fixture(scope="module", autouse=True)
def few() -> Iterator[None]:
    """Measure little."""
    shape = T5Config(64, 16, 64, 2, 1, 1, vocab_size=160)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "SENTENCE_STEP", 50)
        patch.setattr(speed, "SECONDS_OF_TURNS", 0.0)
        patch.setattr(passes, "SECONDS_AT_A_TIME", 0.0)
        patch.setattr(passes, "SECONDS_IN_ALL", 0.0)
        patch.setitem(measure.SHAPES, "tiny", lambda: shape)
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_timed_passes_come_after_the_prompt_and_the_output(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, started = tiny(kind, vocab_size=4), []
    start = type(model).start

    def watched(*given: Any, **options: Any) -> Any:
        started.extend(given[1])
        return start(*given, **options)

    monkeypatch.setattr(type(model), "start", watched)
    stepper = passes.Stepper(model, [2, 9, 7, 1])
    assert started == [[2, 3, 3, 1]] and stepper._fill(2).tolist() == [[3, 3]], "ids it has"
    expected = [passes.OUTPUT_LENGTH + 4 - 1 if kind == "qwen3" else passes.OUTPUT_LENGTH]
    assert stepper._session.lengths == expected
    for _ in range(2):
        stepper.draft(4)
        assert stepper._session.lengths == expected
        stepper.step(4)
        assert stepper._session.lengths == expected


def test_acceptance_counts_tokens_that_were_reached() -> None:
    run = Run(outcomes=[Outcome(5, [5], [n], 0.0, 0.0) for n in (5, 1)])
    assert measure.acceptance([run]) == 6 / 7
    assert measure.acceptance([]) == 0


def test_random_pairs_accept_as_often_as_asked_in_any_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their outputs have no near-ties, which 16 bits would decide otherwise in longer passes."""
    score, rate = T5.score, 0.8

    def rounded(model: T5, kind: Any, x: mx.array, *rest: Any) -> mx.array:
        noise = 0.05 * mx.random.normal(x.shape, x.dtype, key=mx.random.key(0))
        return score(model, kind, x + noise if x.shape[1] > 1 else x, *rest)

    monkeypatch.setattr(T5, "score", rounded)
    for dtype in (mx.float32, mx.bfloat16):
        target, draft = (measure.random_model("tiny", dtype=dtype) for _ in range(2))
        decoder = SpeculativeDecoder(target, draft, num_draft=5, max_source_length=64)
        prompts = measure.random_prompts(target, 64, 3)
        outputs = {
            tuple(prompt): decoder.generate(prompt, max_tokens=200, speculative=False).tokens
            for prompt in prompts
        }
        (_, drafted) = measure.variants_of({"drafted": decoder}, 200)
        variant = replace(drafted, plan=measure.replaying_plan(decoder, outputs, rate))
        runs = [record(variant, prompt) for prompt in prompts]
        assert measure.acceptance(runs) == pytest.approx(rate, abs=0.06)


def tables(block: str) -> dict[str, list[list[str]]]:
    """Return the rows of Markdown's tables by the first cell of their heads."""
    found: list[list[list[str]]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(block):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and token.level == 4:  # in a cell
            found[-1][-1].append(token.content)
    return {rows[0][0]: rows for rows in found}


@dataclass(frozen=True)
class Block:
    """What `doctor --report` printed for three checks, and what they had found."""

    printed: Done
    findings: list[Finding]
    tables: dict[str, list[list[str]]]

    @property
    def details(self) -> Mapping[str, Any]:
        return self.findings[2].details


@pytest.fixture(scope="module")
def block(place: Path, few: None) -> Block:
    findings: list[Finding] = []

    def run_check(check: Check, subject: Subject) -> Finding:
        findings.append(check.find(subject))
        return findings[-1]

    chosen = [part for name in ("versions", "device", "speed") for part in ("--only", name)]
    pair = ("--model", str(place / "weights" / "target"), "--draft-model", "weights/draft")
    with pytest.MonkeyPatch.context() as patch:
        call = caller(place, patch, Printed(patch))
        patch.setattr(command, "run_check", run_check)
        patch.setenv("HOME", str(place))
        done = call("doctor", "--report", *chosen, *pair)
    return Block(done, findings, tables(done.out))


def test_a_block_for_an_issue_can_be_published(block: Block, place: Path) -> None:
    assert block.printed.code == 0 and str(place) not in block.printed.out
    assert block.printed.out.startswith("### `doctor")


def test_a_block_for_an_issue_describes_the_machine_and_the_checks(block: Block) -> None:
    machine = dict(block.tables["machine"][1:])
    known = {"chip", "CPU cores", "memory", "system", "Python", "MLX", "speculative_t5", "models"}
    assert machine.keys() >= known
    default = dtype_name(device.default_type().dtype)
    assert machine["default type"].startswith(f"{default}: ")
    assert [row[1] for row in block.tables["check"][1:]] == ["ok"] * 3


def test_a_block_for_an_issue_has_the_curve_of_passes(block: Block) -> None:
    head, *curves = block.tables["tokens in a pass of the target"]
    assert head[2:] == [*map(str, range(1, 18)), "33", "64"]
    assert [row[:2] for row in curves] == [
        ["~/weights/target, drafts by weights/draft", "ms"],
        ["", "times one token"],
    ]
    seconds = block.details["pass_seconds"]
    for length, ms, times in zip(head[2:], curves[0][2:], curves[1][2:], strict=True):
        assert ms == speed.as_ms(seconds[length])
        assert times == f"{seconds[length] / seconds['1']:.2f}"


def test_a_block_for_an_issue_has_the_speeds(block: Block) -> None:
    head, ours = block.tables["target and draft"]
    assert len(head) == len(ours) == 10
    assert ours[6] == f"{block.details['measured_speedup']:.2f}"
    assert ours[9].split(", ") == [*block.details["auto"]["rounds"]][:3]


def test_a_block_for_an_issue_has_what_was_chosen_and_no_other_form(call: Call) -> None:
    done = call("doctor", "--report", "--only", "versions")
    assert tables(done.out).keys() == {"machine", "check"}
    for other in ("--json", "--list"):
        call("doctor", "--report", other).check_error("--report prints a block of its own")
