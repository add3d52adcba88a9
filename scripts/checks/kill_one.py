"""End one of several processes of a `batch` at a random moment, and finish the job.

python scripts/checks/kill_one.py in.txt

`batch` runs in one process first. Then `mlx.launch` runs it in several; one of these gets SIGKILL,
and the same command with --resume has to give the same bytes.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

PAIR = ("--model", "correct-base", "--draft-model", "correct-small")


def main(
    prompts: Annotated[Path, typer.Argument(help="File of prompts, one a line.")],
    processes: Annotated[int, typer.Option(help="Processes that share the lines.")] = 3,
    times: Annotated[int, typer.Option(help="How often to end one.")] = 3,
    seed: Annotated[int, typer.Option(help="For the moments and the processes.")] = 0,
) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        expected, began = Path(folder, "one.jsonl"), time.monotonic()
        subprocess.run([sys.executable, *batch(prompts, expected)], check=True)
        seconds = time.monotonic() - began
        for turn in range(1, times + 1):
            output = Path(folder, f"{turn}.jsonl")
            rank = rng.randrange(processes)
            kept = killed(prompts, output, processes, rank, rng.uniform(0.3, 0.9) * seconds)
            launch(processes, [*batch(prompts, output), "--resume"]).wait()
            same = output.exists() and output.read_bytes() == expected.read_bytes()
            print(f"{turn}: process {rank + 1} of {processes} ended, {kept} records kept; "
                  f"joined output {'the same' if same else 'DIFFERS'}")  # fmt: skip
            if not same:
                raise typer.Exit(1)


def batch(prompts: Path, output: Path) -> list[str]:
    return ["-m", "speculative_t5", "batch", str(prompts), "--output", str(output), *PAIR]


def launch(processes: int, arguments: list[str]) -> subprocess.Popen[bytes]:
    program = shutil.which("mlx.launch", path=Path(sys.executable).parent) or "mlx.launch"
    launcher = [program, "-n", str(processes), "--python", sys.executable, "--"]
    return subprocess.Popen([*launcher, *arguments], stdin=subprocess.DEVNULL)


def killed(prompts: Path, output: Path, processes: int, rank: int, seconds: float) -> list[int]:
    """Run the job, and end one process so long after the first record; return what is written."""
    parts = [Path(f"{output}.{number + 1}-of-{processes}") for number in range(processes)]
    with launch(processes, batch(prompts, output)) as launcher:
        while not all(part.exists() and part.stat().st_size for part in parts):
            time.sleep(0.05)
        time.sleep(seconds)
        for child in psutil.Process(launcher.pid).children(recursive=True):
            if child.environ().get("MLX_RANK") == str(rank):
                child.kill()
    if output.exists():
        raise RuntimeError("the job was done before a process was ended: use more prompts")
    return [part.read_bytes().count(b"\n") for part in parts]


if __name__ == "__main__":
    typer.run(main)
