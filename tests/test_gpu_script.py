"""scripts/gpu.sh: its commands are understood, failures cost one step, and tables say what was."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from speculative_t5.cli.terminal import ArgumentError
from speculative_t5.measure import SHAPES, VariantReport, config_of_shape
from speculative_t5.models import T5, T5Config

import compare
import expected
import gpu
import gpu_tables
import mlx.core as mx
import pytest
import typer
from conftest import REPOSITORY
from gpu_tables import BEGIN, END, Step
from programs import PLAIN, SPECULATIVE, measuring

STEPS = gpu.trial_steps()
ALL = [*gpu.all_steps(gpu.SHAPES), *STEPS]
HEADING = "## A GPU"


def understand(command: Sequence[str]) -> None:
    """Parse a command of a step as its program does, without running it."""
    assert command[0] == "python"
    if command[1:3] == ("-m", "speculative_t5"):
        app, name = typer.Typer(), command[3]
        app.command()(getattr(import_module(f"speculative_t5.cli.{name}"), name))
        typer.main.get_command(app).make_context(name, list(command[4:]))
    elif command[1] == "scripts/benchmarks/compare.py":
        group: Any = typer.main.get_command(compare.app)
        context = group.commands[command[2]].make_context("", list(command[3:]))
        compare.chosen(context.params["only"])
        assert {context.params["name"], context.params["draft_shape"]} <= SHAPES.keys()
    elif command[1:3] == ("-m", "pytest"):
        files = [part for part in command if part.endswith(".py")]
        assert all((REPOSITORY / file).exists() for file in files)
        options = ["--noconftest", "--collect-only", "-p", "xdist.plugin", "/dev/null"]
        given = [part for part in command[1:] if part not in files]
        done = subprocess.run(
            [sys.executable, *given, *options], check=False, capture_output=True,
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )  # fmt: skip
        assert b"unrecognized arguments" not in done.stderr
    else:
        assert command[1:] == ("scripts/benchmarks/gpu.py", "machine")


def test_commands_are_understood() -> None:
    for command in dict.fromkeys(step.command for step in ALL):
        understand(command)


def test_the_check_of_commands_can_fail() -> None:
    for command in (
        "-m speculative_t5 bench --no-such-option",
        "-m speculative_t5 bench --acceptance much",
        "scripts/benchmarks/compare.py shape t5-base --only nothing",
        "-m pytest --no-such-option",
    ):
        with pytest.raises((ArgumentError, AssertionError)):
            understand(("python", *command.split()))


def test_the_script_prints_what_it_would_run_and_refuses_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context: Any = SimpleNamespace(invoked_subcommand=None)
    for steps, options in ((STEPS, {"trial": True}), (gpu.all_steps(["t5-base"]), {})):
        gpu.main(context, dry_run=True, shape=["t5-base"], **options)
        assert capsys.readouterr().out.splitlines() == [step.line() for step in steps]
    script, page = REPOSITORY / "scripts" / "gpu.sh", tmp_path / "page.md"
    refused = subprocess.run(
        [script, "--results", tmp_path, "--output", page],
        check=False, capture_output=True, text=True,
        env=os.environ | {"PYTHON": sys.executable, "SPECULATIVE_T5_DEVICE": "cpu"},
    )  # fmt: skip
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: MLX computes on the CPU here: ")
    assert json.loads((tmp_path / "machine.out").read_text())["backend"] == "cpu"
    assert not page.exists()


def python(name: str, code: str, limit: int = 60, results: Sequence[int] = (0,)) -> Step:
    return Step(name, ("python", "-c", code), limit, {"GIVEN": "given"}, results)


def test_a_step_that_fails_or_takes_too_long_costs_only_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        python("machine", "print(1)"),
        python("good", "import os; print(os.environ['GIVEN'])"),
        python("failing", "import sys; print(1); sys.exit('no memory')"),
        python("slow", "import time; print('begun', flush=True); time.sleep(600)", 2),
        python("finding", "print('2 failed'); raise SystemExit(1)", results=(0, 1)),
        python("silent", "raise SystemExit(1)", results=(0, 1)),
    ]
    assert [*gpu.run_all(steps, tmp_path)] == steps
    assert [step.is_done(tmp_path) for step in steps] == [True, True, False, False, True, False]
    assert steps[1].text(tmp_path) == "given"
    ends = [gpu_tables.outcome(step, tmp_path) for step in steps]
    assert ends[2] == "failed with exit code 1: no memory"
    assert re.fullmatch(r"stopped after \d+ s: KeyboardInterrupt", ends[3])
    assert ends[4:] == ["failed with exit code 1: 2 failed", "failed with exit code 1"]
    capsys.readouterr()
    again = [*gpu.run_all([*steps[:3], python("good", "print(2)")], tmp_path)]
    shown = capsys.readouterr().out
    assert shown.count("done before") == 1, "the machine, failures and other commands run again"
    assert again[-1].text(tmp_path) == "2"


def a_report(name: str, speed: float) -> dict[str, Any]:
    values = {f.name: 1 if f.type == "int" else 1.5 for f in fields(VariantReport)}
    return asdict(VariantReport(**{**values, "name": name, "tokens_per_second": speed}))


def a_comparison() -> str:
    about = {"device": "cuda", "dtype": "bfloat16", "versions": {}, "threads": 1}
    figures = {
        name: measuring.Figures(about, agree, [speed, speed + 2.0, speed + 4.0])
        for name, agree, speed in ((PLAIN, 3, 10.0), (SPECULATIVE, 2, 22.0))
    }
    return measuring.as_object("a title", figures, 3, {"ctranslate2": "it has no cuBLAS"})


def write_results(folder: Path, steps: Sequence[Step], **codes: int | None) -> None:
    """Write canned results; `codes` are exit codes by the names of steps, if not 0."""
    bench = {"rows": [a_report("regular", 100.4), a_report("K = 2", 251.6)], "acceptance": 0.8}
    described = {
        "device": "A GPU", "backend": "cuda", "mlx": "0.99", "speculative_t5": "1.0",
        "python": "3.11", "system": "Linux",
    }  # fmt: skip
    outputs = {
        "machine": json.dumps(described),
        "doctor": f"all is well in {REPOSITORY / 'docs'} of {Path.home()}, not {Path.home()}x",
        "tests": "..F\nFAILED tests/test_x.py::test_y - no\n1 failed, 2 passed in 3.00s",
        "pair": json.dumps({"rows": [a_report("auto", 77.0)]}),
        "bench": json.dumps(bench),
        "compare": a_comparison(),
    }
    for step in steps:
        code = codes.get(step.name.replace("-", "_").replace(".", "_"), 0)
        record = {"command": [*step.command], "date": "2027-01-02T03:04:05", "seconds": 7.2}
        step.record_path(folder).write_text(json.dumps(record | {"exit_code": code}))
        output = outputs[step.name.partition("-")[0]] if code in step.results else ""
        (folder / f"{step.name}.out").write_text(f"loading\n{output}" if "{" in output else output)
        (folder / f"{step.name}.err").write_text("" if code == 0 else "Traceback\nerror: no memory")
    (folder / "machine.out").write_text(outputs["machine"])


def test_tables_stand_between_the_marks_of_a_page(tmp_path: Path) -> None:
    write_results(tmp_path, STEPS)
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n{BEGIN}\nNothing has been measured.\n{END}\nAfter.\n")
    gpu_tables.write(page, gpu_tables.section(STEPS, tmp_path))
    text = page.read_text()
    assert text.startswith(f"Before.\n{BEGIN}\n\n{HEADING}\n") and text.endswith(f"{END}\nAfter.\n")
    assert "Nothing" not in text
    gpu_tables.write(page, gpu_tables.section(STEPS, tmp_path))
    assert page.read_text() == text


def test_tables_have_every_result(tmp_path: Path) -> None:
    write_results(tmp_path, STEPS, tests=1)
    text = gpu_tables.section(STEPS, tmp_path)
    assert "Measured on 2027-01-02 with MLX 0.99 (cuda), speculative_t5 1.0, Python 3.11" in text
    assert f"all is well in ./docs of ~, not {Path.home()}x\n" in text
    assert "FAILED tests/test_x.py::test_y - no\n1 failed, 2 passed in 3.00s\n" in text
    assert "| auto | 77 | 1.50 |" in text, "no empty column for an acceptance"
    assert "| 0.8 | plain | 100 | 1.50 |" in text and "| 0.8 | K = 2 | 252 | 1.50 |" in text
    row = f"| {SPECULATIVE} | cuda | bfloat16 | 24.0 | 22.0 to 26.0 | 2.00 | 2/3 |"
    assert f"| 0.8 {row}" in text and f"| 0.6 {row}" in text
    assert text.count("- **ctranslate2** is left out: it has no cuBLAS") == 1
    assert all(step.line() in text for step in STEPS[1:]), "each with its command"
    assert "failed with" not in text and "not run" not in text
    assert text.count("```") % 2 == 0


def test_tables_name_what_failed_and_what_is_missing(tmp_path: Path) -> None:
    missing = "compare-t5-efficient-tiny-0.6"
    write_results(tmp_path, STEPS, doctor=2, pair=None, bench_t5_efficient_tiny_0_6=1)
    (tmp_path / f"{missing}.json").unlink()
    text = gpu_tables.section(STEPS, tmp_path)
    assert "- **doctor**: failed with exit code 2: error: no memory\n" in text
    assert "- **pair**: stopped after 7 s: error: no memory\n" in text
    failed = "- **bench-t5-efficient-tiny-0.6**: failed with exit code 1: error: no memory\n"
    assert "| 0.8 | plain | 100 |" in text and failed in text
    assert f"- **{missing}**: not run\n" in text
    assert f"| 0.8 | {PLAIN} |" in text and f"| 0.6 | {PLAIN} |" not in text
    (tmp_path / "machine.json").unlink()
    with pytest.raises(SystemExit, match="what MLX computes on is unknown, not run"):
        gpu_tables.section(STEPS, tmp_path)


def test_other_machines_keep_their_sections(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for device, text in (("A", "old"), ("B", "other"), ("A", "new")):
        gpu_tables.write(page, f"## {device}\n\n### Part\n\n{text}\n")
    assert page.read_text() == (
        f"{BEGIN}\n\n## B\n\n### Part\n\nother\n\n## A\n\n### Part\n\nnew\n\n{END}\n"
    )
    page.write_text("no markers\n")
    with pytest.raises(SystemExit, match="lacks the lines"):
        gpu_tables.write(page, "## A\n")
    assert (REPOSITORY / "docs" / "gpu.md").read_text().count(f"\n{BEGIN}\n") == 1


class Pass:
    """A model whose pass launches six kernels: a write counts twice, and a view not at all."""

    info = Mock(eos_token_id=1)

    def start(self, prompts: Any) -> Any:
        return self, [[0]]

    def step_argmax(self, tokens: mx.array) -> mx.array:
        x = mx.exp(mx.zeros((1, 1, 64, 64)))
        written = mx.slice_update(x, x[:, :, :1] + x[:, :, 1:2], tokens.reshape(1) + 1, axes=[2])
        return mx.fast.scaled_dot_product_attention(x.reshape(x.shape), written, written, scale=1.0)


def test_kernels_are_counted() -> None:
    """As many for each layer, whatever the sizes."""
    six = "an exponential, two sums, a write in two parts, attention"
    assert expected.kernels(Pass()) == 6, six
    one, two, three = (
        expected.kernels(T5(T5Config(32 * n, 16, 64, 2, 1, n, vocab_size=160))) for n in (1, 2, 3)
    )
    assert 10 <= two - one == three - two <= 20
    assert expected.launched(config_of_shape("t5-small")) == 92


def test_what_to_expect_follows_from_bandwidth_launches_and_curves() -> None:
    """As the page works it out for t5-large; every chip and target has a row there."""
    large, layer = config_of_shape("t5-large"), 6 * 1024 * 1024 + 2 * 1024 * 4096 + 2 * 256 * 1024
    read = 2 * (24 * layer + 1024 * 32128)
    chips = {chip.name: chip for chip in expected.CHIPS}
    m4, m1 = chips["M4 Max"], chips["M1"]
    reading = expected.seconds(replace(m4, launch=0.0), large)
    assert reading == pytest.approx(read / 546e9, rel=1e-3), "norms are left out"
    launched = expected.seconds(m4, large) - reading
    assert launched == pytest.approx(expected.launched(large) * 2.75e-6)
    assert expected.best(m1, 2.0, 0.0, 0.97)[1] == 63, "any pass up to 64 tokens costs the same"
    assert expected.best(m4, 2.0, 0.0, 0.75)[1] == 4, "the next token would begin a step"
    gain, length = expected.best(m4, 2.0, 0.4, 0.75)
    assert length == 3 and gain == pytest.approx((1 + 0.75 + 0.75**2 + 0.75**3) / (3 * 0.2 + 1.06))
    assert expected.best(m1, 2.0, 2.0, 0.1) == (1.0, 0)
    page = (REPOSITORY / "docs" / "gpu-predictions.md").read_text()
    for row in (found := [*expected.rows()]):
        assert f"\n| {' | '.join(row)} |\n" in page
    assert ("M4 Max", "t5-11b") in {(row[0], row[3]) for row in found}
    assert ("M1", "t5-11b") not in {(row[0], row[3]) for row in found}


def test_the_page_works_out_a_row_as_the_script_does(capsys: pytest.CaptureFixture[str]) -> None:
    expected.main("M4 Max", "t5-large")
    page = (REPOSITORY / "docs" / "gpu-predictions.md").read_text()
    assert f"```text\n{capsys.readouterr().out}```\n" in page
    with pytest.raises(SystemExit, match="choose --chip from M1, M1 Max, .* from t5-large, "):
        expected.main("M9", "t5-large")
