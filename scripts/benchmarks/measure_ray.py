"""Run a Ray Data job with the shipped pair, check its rows against `batch`, and time both.

    python scripts/benchmarks/measure_ray.py --kill --turns 0       # rows alone; a worker is killed
    python scripts/benchmarks/measure_ray.py --turns 3              # and throughput
    python scripts/benchmarks/measure_ray.py --data deu.txt.xz      # damaged sentences of Tatoeba

A local Ray instance reads Parquet, decodes greedily in some workers, and writes Parquet. As many
processes of `batch` decode a shard each. Each process computes with one thread. With `--kill`, the
first worker that has a batch behind it is killed by SIGKILL in the midst of its next. Ends with
exit code 1 if a row is missing, there twice, or differs. Needs `pip install ".[ray]"`.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any

# Before Ray is imported: nothing is reported, and each worker has one thread, as batch has here.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}

from speculative_t5.ray_data import Generator

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
import typer
from texts import held_out_examples

REPOSITORY = Path(__file__).parents[2]
PROMPTS = REPOSITORY / "tests" / "learners.tsv"  # sentences of learners, a tab, their corrections
STATS = ("tokens", "rounds", "drafted", "accepted")
COLUMNS = ("text", "finish_reason", *STATS)


class Watched(Generator):
    """Appends a line to a file when its models are loaded and as a batch begins and ends."""

    def __init__(self, events: str, *names: str, **options: Any) -> None:
        super().__init__(*names, **options)
        self.events = events

    def note(self, event: str, rows: int) -> None:
        line = {"worker": os.getpid(), "event": event, "rows": rows, "time": time.time()}
        with open(self.events, "a") as file:
            file.write(json.dumps(line) + "\n")

    def __call__(self, batch: Any) -> Any:
        self.note("called", len(batch))
        _ = self.decoder
        self.note("loaded", len(batch))
        done = super().__call__(batch)
        self.note("done", len(batch))
        return done


def read_events(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kill_one(path: Path) -> None:
    """Kill the first worker that has a batch behind it and is in the midst of another."""
    while True:
        events = read_events(path)
        for worker in {event["worker"] for event in events}:
            own = [event["event"] for event in events if event["worker"] == worker]
            if "done" in own and own[-1] == "loaded":
                os.kill(worker, signal.SIGKILL)
                rows = next(e["rows"] for e in reversed(events) if e["worker"] == worker)
                print(f"killed worker {worker} in the midst of a batch of {rows} rows", flush=True)
                return
        time.sleep(0.002)


class Job:
    """The same rows for Ray and for `batch`."""

    def __init__(
        self, prompts: list[str], folder: Path, models: list[str], max_tokens: int, workers: int,
        block: int,
    ) -> None:  # fmt: skip
        self.prompts, self.folder, self.models = prompts, folder, models
        self.max_tokens, self.workers, self.block = max_tokens, workers, block
        folder.mkdir(parents=True)
        (folder / "in").mkdir()
        for start in range(0, len(prompts), block):
            part = prompts[start : start + block]
            table = pa.table({"id": range(start, start + len(part)), "prompt": part})
            pq.write_table(table, folder / "in" / f"{start:09}.parquet")
        lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (folder / "in.jsonl").write_text("".join(lines))

    def by_ray(self, name: str = "out", *, kill: bool = False) -> dict[str, Any]:
        """Run the job with Ray; return its rows, its seconds, and those of its parts."""
        events = self.folder / "events"
        events.unlink(missing_ok=True)
        if kill:
            threading.Thread(target=kill_one, args=[events], daemon=True).start()
        began = time.time()
        rows = ray.data.read_parquet(str(self.folder / "in"))
        # Ray reads several small files as one block, which one worker would decode alone.
        rows.repartition(target_num_rows_per_block=self.block).map_batches(
            Watched,
            fn_constructor_args=[str(events), *self.models],
            fn_constructor_kwargs={"max_tokens": self.max_tokens},
            compute=ray.data.ActorPoolStrategy(size=self.workers),
            batch_format="pyarrow",
        ).write_parquet(str(self.folder / name))
        whole = time.time() - began
        rows = pq.read_table(self.folder / name).sort_by("id").to_pylist()
        found = read_events(events)
        loads = []
        for worker in {event["worker"] for event in found}:  # the first batch of each loads
            called, loaded, *_ = [e["time"] for e in found if e["worker"] == worker]
            loads.append(loaded - called)
        starts = [event["time"] for event in found if event["event"] == "loaded"]
        ends = [event["time"] for event in found if event["event"] == "done"]
        parts = {
            "decoding": max(ends) - min(starts), "whole": whole,
            "starting": min(e["time"] for e in found) - began, "loading": max(loads),
        }  # fmt: skip
        return {"rows": rows, "tokens": sum(row["tokens"] for row in rows), **parts}

    def by_batch(self) -> dict[str, Any]:
        """Run `batch` in as many processes; return the same."""
        processes, began = [], time.time()
        for number in range(1, self.workers + 1):
            command = [
                sys.executable, "-m", "speculative_t5", "batch", "in.jsonl", "--force",
                "--output", f"batch{number}.jsonl", "--shard", f"{number}/{self.workers}",
                "--model", self.models[0], "--draft-model", self.models[1],
                "--max-tokens", str(self.max_tokens),
            ]  # fmt: skip
            processes.append(
                subprocess.Popen(command, cwd=self.folder, stderr=subprocess.PIPE, text=True)
            )
        notes = [process.communicate()[1] for process in processes]
        whole = time.time() - began
        for process, note in zip(processes, notes, strict=True):
            if process.returncode:
                sys.exit(f"error: batch: {note.strip().splitlines()[-1]}")
        seconds = [float(note.split(" tokens in ")[1].split()[0]) for note in notes]
        rows: list[Any] = [None] * len(self.prompts)
        for number in range(1, self.workers + 1):
            with open(self.folder / f"batch{number}.jsonl") as file:
                for record in map(json.loads, file):
                    rows[record["id"] - 1] = record | record.get("stats", {})
        tokens = sum(row.get("tokens", 0) for row in rows)
        return {"rows": rows, "tokens": tokens, "decoding": max(seconds), "whole": whole}


def differences(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    """Compare the rows of a job with the records of `batch`."""
    if [row["id"] for row in found] != list(range(len(expected))):
        return [f"{len(found)} rows with {len({row['id'] for row in found})} ids"]
    wrong = []
    for row, record in zip(found, expected, strict=True):
        ours, theirs = ([each.get(name) for name in COLUMNS] for each in (row, record))
        if row["error"] is not None or "error" in record:
            ours, theirs = [row["error"]], [str(record.get("error")).partition(": ")[2]]
        if ours != theirs:
            wrong.append(f"row {row['id']}: {ours} instead of {theirs}")
    return wrong


def check(job: Job, found: dict[str, Any], expected: dict[str, Any]) -> None:
    wrong = differences(found["rows"], expected["rows"])
    for line in wrong[:3]:
        print(line)
    if wrong:
        sys.exit(f"error: {len(wrong)} of {len(job.prompts)} rows differ from batch's")
    errors = sum(row["error"] is not None for row in found["rows"])
    print(f"{len(job.prompts):,} rows, {errors} with errors: the same as batch's", flush=True)


def compare(job: Job, turns: int, order: random.Random) -> None:
    """Time both, interleaved, and print the ratio of each turn."""
    ratios, wholes = [], []
    for turn in range(turns):
        done: dict[str, dict[str, Any]] = {}
        for name in order.sample(["ray", "batch"], 2):
            done[name] = job.by_ray(f"out{turn}") if name == "ray" else job.by_batch()
        check(job, done["ray"], done["batch"])
        for name, each in done.items():
            parts = ", ".join(
                f"{part} {each[part]:.1f} s"
                for part in ("whole", "starting", "loading", "decoding")
                if part in each
            )
            print(f"{name:5} {each['tokens'] / each['decoding']:6.0f} tokens/s decoding; {parts}")
        ours, theirs = done["ray"], done["batch"]
        ratios.append(theirs["decoding"] / ours["decoding"])
        wholes.append(theirs["whole"] / ours["whole"])
        print(f"turn {turn + 1}: {ratios[-1]:.2f} of batch's speed, {wholes[-1]:.2f} as a whole")
    print(
        f"{job.workers} workers, {turns} turns: Ray decodes at {median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) of batch's speed; with starting and loading "
        f"{median(wholes):.2f} ({min(wholes):.2f} to {max(wholes):.2f})"
    )


def main(
    data: Annotated[
        Path | None, typer.Option(help="deu.txt.xz; damaged sentences of it are the prompts.")
    ] = None,
    prompts: Annotated[
        Path, typer.Option(help="A prompt a line, up to a tab; taken again from the first.")
    ] = PROMPTS,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the job.")] = 2000,
    block: Annotated[int, typer.Option(min=1, help="Rows of a block, and of a file.")] = 250,
    workers: Annotated[int, typer.Option(min=1, help="Workers, and processes of batch.")] = 2,
    model: Annotated[str, typer.Option(help="The target.")] = "correct-base",
    draft: Annotated[str, typer.Option(help="The draft model.")] = "correct-small",
    max_tokens: Annotated[int, typer.Option(min=1, help="Bound on an output's tokens.")] = 256,
    kill: Annotated[bool, typer.Option("--kill", help="Kill a worker of the first job.")] = False,
    turns: Annotated[int, typer.Option(min=0, help="How often both are timed.")] = 3,
    folder: Annotated[
        Path | None, typer.Option(help="A new folder for inputs and outputs, kept.")
    ] = None,
) -> None:
    """Run a Ray Data job with the shipped pair, check its rows against `batch`, and time both."""
    if data is None:
        lines = prompts.read_text(encoding="utf-8").splitlines()
        texts = list(islice(cycle(line.split("\t")[0] for line in lines if line.strip()), rows))
    else:
        texts = [source for source, _ in held_out_examples(data, rows)]
    names = [str(REPOSITORY / "weights" / name) for name in (model, draft)]
    names = [path if Path(path).exists() else name
             for path, name in zip(names, (model, draft), strict=True)]  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        job = Job(texts, folder or Path(temporary, "job"), names, max_tokens, workers, block)
        began = time.time()
        # Reading and writing need a processor that no worker has claimed.
        ray.init(
            num_cpus=workers + 1, include_dashboard=False, object_store_memory=2**28,
            logging_level="ERROR", log_to_driver=False,
        )  # fmt: skip
        logging.getLogger("ray.data").setLevel("ERROR")
        ray.data.DataContext.get_current().enable_progress_bars = False
        print(f"Ray {ray.__version__} started in {time.time() - began:.1f} s", flush=True)
        found = job.by_ray(kill=kill)
        check(job, found, job.by_batch())
        if turns:
            compare(job, turns, random.Random(0))
        ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
