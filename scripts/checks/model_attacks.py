"""Let clients use models of a server that do not fit side by side, and one that is broken.

Starts `serve` with few open files and so much memory that one of the shipped target and its draft
has room, both as models of their own, beside a model whose weights are cut off. Shows

1. what those who ask for the broken model and then for another one get;
2. memory and threads while the models take turns;
3. what /v1/models, /languages and /v2/languages answer meanwhile;
4. how many are refused, and who waits longest, where eight clients always use the large model, and
   two the small one;
5. with which code the server ends once no model can be loaded any more.

Exits with 1 if anything of that is not as docs/server.md says.
"""

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Annotated

import psutil
import typer

WEIGHTS = Path(__file__).parents[2] / "weights"
MODELS = {"large": "correct-base", "small": "correct-small", "broken": "correct-small"}
LISTS = ("/v1/models", "/languages", "/v2/languages")
PATIENCE = 150.0  # seconds for an answer
LOST = 0  # the status of a request that got no answer


def ask(port: int, path: str, model: str = "") -> tuple[int, str]:
    """Send a request, for a few tokens of a model if one is named; return status and answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    fields = {"model": model, "prompt": "He go home and she have a apple.", "max_tokens": 12}
    try:
        connection.request("POST" if model else "GET", path, json.dumps(fields) if model else None)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, HTTPException) as error:
        return LOST, repr(error)
    finally:
        connection.close()


def complete(port: int, model: str) -> tuple[int, str]:
    return ask(port, "/v1/completions", model)


def make_models(folder: Path) -> list[Path]:
    """Copy models, one of them without the end of its weights."""
    for name, model in MODELS.items():
        shutil.copytree(WEIGHTS / model, folder / name)
    weights = folder / "broken" / "weights.npz"
    weights.write_bytes(weights.read_bytes()[:-1000])
    config = folder / "large" / "config.json"
    settings = json.loads(config.read_text("utf-8"))
    settings.pop("draft", None)  # it would be beside it
    config.write_text(json.dumps(settings), "utf-8")
    return [folder / name for name in MODELS]


@contextmanager
def server(files: int, folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a server with room for the largest model, which may open so many files."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    paths = make_models(folder)
    size = max(sum(file.stat().st_size for file in path.iterdir()) for path in paths)
    command = [sys.executable, "-m", "speculative_t5", "serve", "--port", "0"]
    command += ["--memory", f"{size / 1e9 + 0.001:.3f}"]
    for path in paths:
        command += ["--model", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=limit) as process:
        try:
            assert process.stdout
            yield process, int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.kill()


def broken_model(port: int) -> list[str]:
    """Ask for the broken model and then for the first, some times; return what is wrong."""
    faults = []
    for _ in range(5):
        status, text = complete(port, "broken")
        after, _ = complete(port, "large")
        health, _ = ask(port, "/health")
        print(f"  broken: {status} {text[:100]}...\n  large: {after}, health: {health}")
        if status != 503 or "broken cannot be used" not in text or (after, health) != (200, 200):
            faults.append("after a broken model another one is not served")
    return faults


def turns(process: psutil.Process, port: int, swaps: int) -> list[str]:
    """Let two models take turns; return what is wrong."""
    statuses: Counter[int] = Counter()
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for path in LISTS:
                statuses[ask(port, path)[0]] += 1

    watching = threading.Thread(target=watch)
    watching.start()
    rows = []
    for swap in range(swaps + 1):
        status, text = complete(port, ("large", "small")[swap % 2])
        if status != 200:
            raise RuntimeError(f"swap {swap}: status {status}: {text}")
        if swap % max(1, swaps // 4) == 0:
            rows.append((swap, process.memory_info().rss / 1e6, process.num_threads()))
    over.set()
    watching.join()
    for swap, memory, threads in rows:
        print(f"  after {swap:3d} swaps: {memory:.0f} MB, {threads} threads")
    print(f"  {', '.join(LISTS)} meanwhile: {dict(statuses)}")
    faults = []
    if rows[-1][2] > rows[1][2]:
        faults.append("taking turns leaves threads behind")
    if set(statuses) != {200}:
        faults.append("what models do is not always said")
    return faults


def crowd(port: int, seconds: float) -> list[str]:
    """Let eight clients use one model all the time, and two another; return what is wrong."""
    statuses = {"large": Counter[int](), "small": Counter[int]()}
    longest = {"large": 0.0, "small": 0.0}
    until = time.monotonic() + seconds

    def client(model: str) -> None:
        while (began := time.monotonic()) < until:
            statuses[model][complete(port, model)[0]] += 1
            longest[model] = max(longest[model], time.monotonic() - began)

    with ThreadPoolExecutor(10) as threads:
        for model in ["large"] * 8 + ["small"] * 2:
            threads.submit(client, model)
    for model, found in statuses.items():
        print(f"  {model}: {dict(found)}, the longest wait {longest[model]:.1f} s")
    refused = [model for model, found in statuses.items() if set(found) != {200}]
    return [f"requests for the {model} model are refused" for model in refused]


def nothing_left(process: subprocess.Popen[str], port: int, folder: Path) -> list[str]:
    """Take the weights of all models away, and ask; return what is wrong."""
    for file in folder.glob("*/weights.npz"):
        file.unlink()
    began = time.monotonic()
    while process.poll() is None and time.monotonic() < began + PATIENCE:
        for model in ("small", "large"):
            complete(port, model)
    print(f"  exit code {process.poll()} after {time.monotonic() - began:.1f} s")
    return [] if process.poll() == 1 else ["a server that can serve nothing goes on"]


def main(
    swaps: Annotated[int, typer.Option(help="Times that models take turns.")] = 160,
    seconds: Annotated[float, typer.Option(help="That clients use both models.")] = 60.0,
    files: Annotated[int, typer.Option(help="Files that the server may open.")] = 256,
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        server(files, Path(folder)) as (process, port),
    ):
        print("a model that cannot be loaded:")
        faults = broken_model(port)
        print("two models take turns:")
        faults += turns(psutil.Process(process.pid), port, swaps)
        print("eight clients of one model, two of another:")
        faults += crowd(port, seconds)
        print("no model can be loaded any more:")
        faults += nothing_left(process, port, Path(folder))
    if faults:
        sys.exit("\n".join(dict.fromkeys(faults)))


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
