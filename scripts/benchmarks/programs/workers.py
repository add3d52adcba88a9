"""Start the programs, each in a process of its own."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from programs import PLAIN

COMPARE = Path(__file__).parents[1] / "compare.py"  # its hidden commands run in the processes
ONE_BY_ONE, BATCHES = "worker", "batch-worker"  # of these commands
# Seconds between two requests: threads of the program before may spin for a while when it is done.
PAUSE = 0.1


class Lost(Exception):
    """A program failed; the text says why."""


class Worker:
    """A program in a process of its own; `Lost` if it cannot run."""

    def __init__(
        self, name: str, spec: dict[str, Any], command: str = ONE_BY_ONE, **environment: str
    ) -> None:
        self.name, self.command = name, command
        self._process = subprocess.Popen(
            [sys.executable, COMPARE, command, name, json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
        )
        self.about = self._answer()

    def ask(self, ids: list[int], max_tokens: int) -> tuple[list[int], float]:
        """Return the output, EOS included, and the seconds that it took."""
        answer = self.request(ids=ids, max_tokens=max_tokens)
        self.about["peak"] = answer["peak"]
        time.sleep(PAUSE)
        return answer["tokens"], answer["seconds"]

    def ask_all(
        self, prompts: Sequence[list[int]], max_tokens: int, batch_size: int
    ) -> tuple[list[list[int]], float]:
        """Return the outputs of prompts decoded in batches, EOS included, and the seconds."""
        answer = self.request(prompts=prompts, max_tokens=max_tokens, batch_size=batch_size)
        self.about["peak"] = answer["peak"]
        time.sleep(PAUSE)
        return answer["outputs"], answer["seconds"]

    def request(self, **request: Any) -> dict[str, Any]:
        """Return the answer to a request, as the command defines them."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # its answer, or none, says why it has ended
            print(json.dumps(request), file=self._process.stdin)
            self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process, by closing its input, and wait for it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise Lost(f"ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "missing" in answer:
            self.close()
            raise Lost(answer["missing"])
        return answer


class Workers(dict[str, Worker]):
    """The programs that run, by name, and in `left_out` why others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out: dict[str, str] = {}

    def leave_out(self, name: str, reason: str) -> None:
        """Go on without a program, and print why; exit if it is the one to compare with."""
        print(f"left out: {name}: {reason}", file=sys.stderr)
        if name == PLAIN:
            sys.exit(f"error: nothing can be compared without {PLAIN}")
        self.left_out[name] = reason
        self.pop(name, None)


def start(
    names: Sequence[str],
    options: dict[str, Any],
    place: Path,
    probes: Sequence[list[int]],
    max_tokens: int,
    stack: contextlib.ExitStack,
    command: str = ONE_BY_ONE,
) -> Workers:
    """Start programs on place/target and place/draft; those that cannot run are left out.

    `options` has the `backend` and the `dtype` to compute with. CTranslate2 gets its best settings
    on the source ids `probes`, one by one or, if the `command` is `BATCHES`, as a batch; `stack`
    ends the programs.
    """
    workers, unable = Workers(), ""
    if any(name.startswith("ctranslate2") for name in names):
        unable = convert(place / "target", place / "ctranslate2")
    for name in names:
        spec = {"place": str(place), **options}
        try:
            if not name.startswith("ctranslate2"):
                program = Worker(name, spec, command)
            elif unable:
                raise Lost(unable)
            else:
                program = start_fastest(name, spec, probes, max_tokens, command)
        except Lost as error:
            workers.leave_out(name, str(error))
        else:
            stack.callback(program.close)
            workers[name] = program
    return workers


def timed(program: Worker, probes: Sequence[list[int]], max_tokens: int) -> float:
    """Return the seconds that a program takes for prompts."""
    if program.command == BATCHES:
        return program.ask_all(probes, max_tokens, len(probes))[1]
    return sum(program.ask(ids, max_tokens)[1] for ids in probes)


def convert(source: Path, output: Path) -> str:
    """Write a checkpoint for CTranslate2; return why that fails, if it does."""
    command = [sys.executable, COMPARE, "convert", source, output]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if not done.returncode:
        return ""
    *_, last = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return f"its checkpoint cannot be written: {last}"


def start_fastest(
    name: str,
    spec: dict[str, Any],
    probes: Sequence[list[int]],
    max_tokens: int,
    command: str,
) -> Worker:
    """Start CTranslate2 with the number of threads and the backend that are fastest here.

    They differ by several times on small models: threads may wait for each other by sleeping. On a
    GPU neither matters. `Lost` if it runs with none of them.
    """
    best, least, reason = None, float("inf"), Lost("nothing was tried")
    for threads in sorted({1, os.cpu_count() or 1}):
        for backend in ({}, {"CT2_USE_MKL": "0"}):
            try:
                program = Worker(name, {**spec, "threads": threads}, command, **backend)
                if program.about["device"] != "cpu":
                    return program
                _, seconds = [timed(program, probes, max_tokens) for _ in range(2)]
            except Lost as error:
                reason = error
                continue
            if seconds < least:
                best, least, program = program, seconds, best
            if program:
                program.close()
    if best is None:
        raise reason
    return best
