"""Measure how long the command `serve` takes to its first answer.

    python scripts/benchmarks/serve_start.py
    python scripts/benchmarks/serve_start.py --turns 5 --options "--model t5-base --regular-decode"

Each time a server is started on a free port and asked for one short prompt until it answers; then
it is stopped. Needs `pip install ".[compare,serve]"`.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import httpx
import typer

REPOSITORY = Path(__file__).parents[2]
PATIENCE = 600.0  # seconds for a response


def main(
    turns: Annotated[int, typer.Option(min=1, help="How many servers are started.")] = 3,
    options: Annotated[str, typer.Option(help="Options of the server.")] = "",
    prompt: Annotated[str, typer.Option(help="What it is asked.")] = "He go home.",
) -> None:
    """Print the seconds from each start to when the server is ready, and to its first answer."""
    for _ in range(turns):
        ready, answered, text = start(shlex.split(options), prompt)
        print(f"ready after {ready:.2f} s, first answer after {answered:.2f} s: {text!r}")


def start(options: list[str], prompt: str) -> tuple[float, float, str]:
    """Start a server and ask it once; return both times, in seconds, and the answer."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "speculative_t5", "serve", "--port", "0", *options]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            ready = time.perf_counter() - began
            if not line:
                sys.exit("error: the server has ended, see above")
            url = line.rsplit(" ", 1)[1].strip()
            found = httpx.post(f"{url}/v1/completions", json={"prompt": prompt}, timeout=PATIENCE)
            found.raise_for_status()
            answered = time.perf_counter() - began
            return ready, answered, found.json()["choices"][0]["text"]
        finally:
            server.terminate()


if __name__ == "__main__":
    typer.run(main)
