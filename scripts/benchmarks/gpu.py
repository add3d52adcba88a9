"""Measure what a GPU gives, the most valuable first, and write the tables of docs/gpu.md.

    scripts/gpu.sh                      # on a machine whose GPU MLX uses
    scripts/gpu.sh --shape t5-small     # repeatable: with these shapes only
    scripts/gpu.sh --try                # the same on the CPU with tiny shapes, in a few minutes
    scripts/gpu.sh --tables             # only write the tables again

Each step is a command with a time limit. Its output goes to the folder of results; when it fails,
the next one begins. Steps whose results are there are skipped, so a run that was interrupted goes
on where it ended. The exit status is 1 if a step failed.
"""

import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import gpu_tables
import typer
from gpu_tables import REPOSITORY, Step
from programs import SPECULATIVE, STEADY

DOCS = REPOSITORY / "docs" / "gpu.md"
BENCH = ("python", "-m", "speculative_t5", "bench", "--json", "--steady")
COMPARE = ("python", "scripts/benchmarks/compare.py", "shape")
PYTEST = ("python", "-m", "pytest", "-q", "--continue-on-collection-errors")
TINY = "t5-efficient-tiny"
DRAFTS = {TINY: TINY, "t5-small": TINY}  # shapes; others have drafts of t5-small's
SHAPES = ("t5-small", "t5-base", "t5-large", "t5-3b")
ON_GPU = {"SPECULATIVE_T5_TEST_DEVICE": "gpu"}  # read by tests/conftest.py
ON_CPU = {"SPECULATIVE_T5_DEVICE": "cpu"}
# What killing a group raises if none of its processes runs: on a Mac the second, if some have ended
# and nobody has waited for them.
GONE = (ProcessLookupError, PermissionError)
GRACE = 20  # seconds for a step to end and say how far it came


@dataclass(frozen=True)
class Sizes:
    """How much is measured of random weights."""

    shapes: Sequence[str]
    acceptances: Sequence[str]  # the first is measured for all shapes before the others
    lengths: str  # numbers of tokens to draft, for `bench`
    num_draft: int  # for compare.py
    source: int
    tokens: int
    repeats: int  # prompts, and turns


FULL = Sizes(SHAPES, ("0.8", "0.6", "0.9"), "2,4,7", 4, 256, 64, 3)
SMALL = Sizes((TINY,), ("0.8", "0.6"), "2", 2, 16, 8, 1)


def all_steps(shapes: Sequence[str]) -> list[Step]:
    """Return what is measured on a GPU, the most valuable first."""
    pairs = (("float16", "pair-float16"), ("float32", "pair-float32"))
    return [
        machine_step(),
        Step("doctor", ("python", "-m", "speculative_t5", "doctor"), 300, results=(0, 1)),
        Step("pair", BENCH, 300),
        *synthetic_steps(replace(FULL, shapes=shapes)),
        *(Step(name, (*BENCH, "--dtype", dtype), 300) for dtype, name in pairs),
        Step("tests", (*PYTEST, "-n", "auto", "--dist", "loadfile"), 900, ON_GPU, (0, 1)),
    ]


def trial_steps() -> list[Step]:
    """Return steps of the same kinds, for the CPU and in a few minutes."""
    doctor = ("doctor", "--only", "versions", "--only", "device")
    brief = ("--num-draft", "2", "--turns", "1", "--max-tokens", "48")
    steps = [
        machine_step(),
        Step("doctor", ("python", "-m", "speculative_t5", *doctor), 60, results=(0, 1)),
        Step("tests", (*PYTEST, "tests/test_cache.py"), 60, results=(0, 1)),
        Step("pair", (*BENCH, *brief), 120),
        *synthetic_steps(SMALL),
    ]
    return [replace(step, environment=ON_CPU) for step in steps]


def machine_step() -> Step:
    return Step("machine", ("python", "scripts/benchmarks/gpu.py", "machine"), 60)


def synthetic_steps(sizes: Sizes) -> Iterator[Step]:
    """Yield the steps that measure random weights."""
    repeats = str(sizes.repeats)
    common = ("--dtype", "bfloat16", "--count", repeats, "--turns", repeats)
    common += ("--source", str(sizes.source))
    first, *_ = sizes.acceptances
    for acceptance in sizes.acceptances:
        # The other programs' speed does not depend on it.
        only = () if acceptance == first else ("--only", SPECULATIVE, "--only", STEADY)
        for shape in sizes.shapes:
            draft, limit = DRAFTS.get(shape, "t5-small"), 600 if shape == "t5-3b" else 300
            options = ("--acceptance", acceptance, *common)
            pair = f"--random {shape}:{draft}"
            lengths = f"--num-draft {sizes.lengths} --max-tokens {sizes.tokens}"
            command = (*BENCH, *pair.split(), *lengths.split(), *options)
            yield Step(f"bench-{shape}-{acceptance}", command, limit)
            pair = f"{shape} --draft-shape {draft}"
            lengths = f"--num-draft {sizes.num_draft} --tokens {sizes.tokens}"
            command = (*COMPARE, *pair.split(), *lengths.split(), *options, "--json", *only)
            yield Step(f"compare-{shape}-{acceptance}", command, limit)


def run(step: Step, folder: Path) -> None:
    """Run a step, and write its outputs and its record to a folder."""
    command = [sys.executable, *step.command[1:]]
    began, date = time.monotonic(), datetime.datetime.now().isoformat(timespec="seconds")
    output, errors = folder / f"{step.name}.out", folder / f"{step.name}.err"
    with output.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=os.environ | step.environment,
            start_new_session=True,
            # Where this program runs in the background, SIGINT may be ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        code: int | None = None
        try:
            code = process.wait(step.limit)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(subprocess.TimeoutExpired, *GONE):
                os.killpg(process.pid, signal.SIGINT)  # pytest then says how far it came
                process.wait(GRACE)
        finally:  # also on Ctrl-C, and for processes that it has started
            with contextlib.suppress(*GONE):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = round(time.monotonic() - began, 1)
    record = {"command": list(step.command), "date": date, "seconds": seconds, "exit_code": code}
    step.record_path(folder).write_text(json.dumps(record), encoding="utf-8")


def run_all(steps: Sequence[Step], folder: Path) -> Iterator[Step]:
    """Run the steps that have no result yet, say how each ended, and yield it."""
    for number, step in enumerate(steps, start=1):
        shown = f"{number}/{len(steps)} {step.name}"
        if number > 1 and step.is_done(folder):  # the first is about the machine as it is now
            print(f"{shown}: done before", flush=True)
        else:
            print(f"{shown}: {step.line()} (at most {step.limit} s)", flush=True)
            run(step, folder)
            print(f"    {gpu_tables.outcome(step, folder)}", flush=True)
        yield step


def main(
    context: typer.Context,
    trial: Annotated[
        bool, typer.Option("--try", help="Use the CPU and tiny shapes; docs/gpu.md is left alone.")
    ] = False,
    tables: Annotated[bool, typer.Option("--tables", help="Only write the tables.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the commands.")] = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Measure random weights of this shape; repeatable.", show_default="all"),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Folder of results.", show_default="gpu-results, or gpu-results/try with --try"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File of the tables.", show_default="docs/gpu.md, or tables.md with the results"
        ),
    ] = None,
) -> None:
    if context.invoked_subcommand:
        return
    check_known(shape or ())
    steps = trial_steps() if trial else all_steps(shape or SHAPES)
    if dry_run:
        return print("\n".join(step.line() for step in steps))
    folder = results or REPOSITORY / "gpu-results" / ("try" if trial else "")
    folder.mkdir(parents=True, exist_ok=True)
    if not tables:
        measure(steps, folder, trial=trial)
    write_tables(steps, folder, output or (folder / "tables.md" if trial else DOCS))


def check_known(shapes: Sequence[str]) -> None:
    if unknown := [name for name in shapes if name not in SHAPES]:
        raise typer.BadParameter(f"no shape {unknown[0]!r}, expected one of: {', '.join(SHAPES)}")


def measure(steps: Sequence[Step], folder: Path, *, trial: bool) -> None:
    """Run all steps that have no result; end where MLX finds no GPU, except for a trial."""
    for step in run_all(steps, folder):
        on_cpu = step is steps[0] and gpu_tables.machine(step, folder)["backend"] == "cpu"
        if on_cpu and not trial:
            sys.exit("error: MLX computes on the CPU here: give --try, or install MLX for the GPU")


def write_tables(steps: Sequence[Step], folder: Path, output: Path) -> None:
    """Write the tables of all results; end with an error if some are missing."""
    gpu_tables.write(output, gpu_tables.section(steps, folder))
    print(f"tables: {output}")
    if failed := [step.name for step in steps if not step.is_done(folder)]:
        sys.exit(f"error: without a result: {', '.join(failed)} (see {folder})")


def machine() -> None:
    """Print what MLX computes on, as JSON."""
    import speculative_t5
    from speculative_t5 import device

    import mlx.core as mx

    info: dict[str, Any] = mx.device_info(mx.default_device())
    gpu = "cuda" if mx.cuda.is_available() else "metal"
    described = {
        "device": info.get("device_name", str(mx.default_device())),
        "backend": "cpu" if device.on_cpu() else gpu,
        "info": info,
        "mlx": mx.__version__,
        "speculative_t5": speculative_t5.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    print(json.dumps(described))


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(help=__doc__, invoke_without_command=True)(main)
    app.command(hidden=True)(machine)
    app()
