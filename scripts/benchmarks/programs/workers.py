"""Start the programs, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMPARE = Path(__file__).parents[1] / "compare.py"  # its hidden commands run in the processes
# Seconds between two requests: threads of the program before may spin for a while when it is done.
PAUSE = 0.1


class Worker:
    """A program in a process of its own.

    Attributes:
        about: Its versions, threads and perhaps a note, or why it is `missing`.
    """

    def __init__(self, name: str, spec: dict[str, Any], **environment: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, COMPARE, "worker", name, json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
        )
        self.about = self._answer()

    def ask(self, ids: list[int], max_tokens: int) -> tuple[list[int], float]:
        """Return the output, EOS included, and the seconds that it took."""
        assert self._process.stdin
        print(json.dumps({"ids": ids, "max_tokens": max_tokens}), file=self._process.stdin)
        self._process.stdin.flush()
        answer = self._answer()
        time.sleep(PAUSE)
        return answer["tokens"], answer["seconds"]

    def close(self) -> None:
        """End the process, by closing its input, and wait for it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"error: {self.name} ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def start(
    names: Sequence[str],
    options: dict[str, Any],
    place: Path,
    probes: Sequence[list[int]],
    max_tokens: int,
    stack: contextlib.ExitStack,
) -> dict[str, Worker]:
    """Start programs on place/target and place/draft; print which of them cannot run.

    CTranslate2 gets its best settings on the source ids `probes`; `stack` ends the programs.
    """
    if any(name.startswith("ctranslate2") for name in names):
        paths = [str(place / "target"), str(place / "ctranslate2")]
        subprocess.run([sys.executable, COMPARE, "convert", *paths], check=True)
    workers = {}
    for name in names:
        spec = {"place": str(place), **options}
        if name.startswith("ctranslate2"):
            program = start_fastest(name, spec, probes, max_tokens)
        else:
            program = Worker(name, spec)
        stack.callback(program.close)
        if "missing" in program.about:
            print(f"left out: {name}: {program.about['missing']}", file=sys.stderr)
        else:
            workers[name] = program
    return workers


def start_fastest(
    name: str, spec: dict[str, Any], probes: Sequence[list[int]], max_tokens: int
) -> Worker:
    """Start CTranslate2 with the number of threads and the backend that are fastest here.

    They differ by several times on small models: threads may wait for each other by sleeping.
    """
    best, least = None, float("inf")
    for threads in sorted({1, os.cpu_count() or 1}):
        for backend in ({}, {"CT2_USE_MKL": "0"}):
            program = Worker(name, {**spec, "threads": threads}, **backend)
            if "missing" in program.about:
                return program
            program.ask(probes[0], max_tokens)
            seconds = sum(program.ask(ids, max_tokens)[1] for ids in probes)
            if seconds < least:
                best, least, program = program, seconds, best
            if program:
                program.close()
    assert best
    return best
