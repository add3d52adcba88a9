"""What a split of a T5 among processes costs in memory.

    python scripts/benchmarks/measure_sharding.py memory --shape t5-3b --work runs/sharding

It writes a checkpoint of random weights in bfloat16, loads and runs it in one process, then in
several that share it, all on this machine; on Linux it also reads what the kernel counts.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.bench.synthetic import SHAPES, random_prompts
from speculative_t5.checkpoints import convert

import mlx.core as mx
import typer
from mlx.utils import tree_flatten
from random_checkpoint import write_random_checkpoint

GB = 1e9
INTERVAL = 0.005  # seconds between two readings of the kernel's counts
STATUS = Path("/proc/self/status")
PHASES = ("loading", "one prompt", "batch")
FIGURES = {"mlx": "MLX's arrays", "RssAnon": "anonymous", "VmRSS": "resident"}

app = typer.Typer(help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)
ShapeOption = Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")]


@app.command()
def memory(
    shape: ShapeOption = "t5-3b",
    processes: Annotated[int, typer.Option(min=2, help="Processes that share the model.")] = 2,
    work: Annotated[Path, typer.Option(help="Where the checkpoint is written, and kept.")] = Path(
        "runs/sharding"
    ),
    converted: Annotated[bool, typer.Option(help="Load what convert writes (.npz).")] = False,
    source: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens to decode for one prompt.")] = 32,
    batch: Annotated[int, typer.Option(help="Prompts in the batch.")] = 8,
    batch_tokens: Annotated[int, typer.Option(help="Tokens to decode for each of them.")] = 8,
) -> None:
    """Compare the memory of one process with that of several; 0 prompts or tokens leave out."""
    folder = work / shape
    if not folder.exists():
        write_random_checkpoint(folder, SHAPES[shape])
    if converted:
        small = work / f"{shape}-converted"
        folder = small if small.exists() else convert(str(folder), small)
    amounts = [f"{amount}" for amount in (source, tokens, batch, batch_tokens)]
    whole = run_processes(1, work, [str(folder), *amounts])[0]
    parts = run_processes(processes, work, [str(folder), *amounts])
    print(f"{shape}, bfloat16, prompts of {source} tokens, K = 4 from a lookup; peaks in GB")
    print(f"{'':14}{'process':16}" + "".join(f"{name:>16}" for name in FIGURES.values()))
    for phase in [phase for phase in PHASES if phase in whole]:
        rows = {"the only one": whole[phase]}
        rows |= {f"{i + 1} of {processes}": part[phase] for i, part in enumerate(parts)}
        for name, row in rows.items():
            cells = [f"{row[key] / GB:.2f} ({row[key] / whole[phase][key]:.2f})" for key in row]
            print(f"{phase:14}{name:16}" + "".join(f"{cell:>16}" for cell in cells))
    print(f"weights: {whole['weights'] / GB:.2f} GB, " + ", ".join(
        f"{part['weights'] / whole['weights']:.3f} of them" for part in parts
    ))  # fmt: skip


@app.command(hidden=True)
def measure(folder: Path, source: int, tokens: int, batch: int, batch_tokens: int) -> None:
    """Load and decode in this process, one of a group if MLX_RANK says so; print its peaks."""
    group = mx.distributed.init(strict=True, backend="ring") if "MLX_RANK" in os.environ else None
    found: dict[str, Any] = {}
    with peaks(found, "loading"):
        model, _ = load(folder, dtype="bfloat16", group=group)
    found["weights"] = model_bytes(model)
    decoder = SpeculativeDecoder(model, "lookup", num_draft=4)
    prompts = random_prompts(model, source, batch + 1)
    if tokens:
        with peaks(found, "one prompt"):
            decoder.generate(prompts[-1], max_tokens=tokens)
    if batch and batch_tokens:
        with peaks(found, "batch"):
            decoder.generate_batch(prompts[:batch], batch_size=batch, max_tokens=batch_tokens)
    print(json.dumps(found))


@contextmanager
def peaks(found: dict[str, Any], phase: str) -> Iterator[None]:
    """Note the most memory that this process has while the body runs, in bytes.

    "mlx" are MLX's arrays; "RssAnon" all that the process has allocated, MLX's cache and Python's
    objects among it; "VmRSS" that and pages of mapped files: libraries, and tensors being read.
    """
    most = {"RssAnon": 0, "VmRSS": 0}
    done = threading.Event()

    def sample() -> None:
        while STATUS.exists():
            lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
            for name in most:
                most[name] = max(most[name], int(lines[name].split()[0]) * 1024)
            if done.wait(INTERVAL):
                break

    thread = threading.Thread(target=sample)
    mx.reset_peak_memory()
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    found[phase] = {"mlx": mx.get_peak_memory()} | {k: v for k, v in most.items() if v}
    print(f"{phase}: {found[phase]}", file=sys.stderr, flush=True)


def model_bytes(model: Any) -> int:
    return sum(array.nbytes for _, array in cast(Any, tree_flatten(model.parameters())))


def run_processes(count: int, work: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """Run `measure` in fresh processes, several connected as a ring; return what each found."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    hosts = [[f"127.0.0.1:{server.getsockname()[1]}"] for server in servers]
    for server in servers:
        server.close()
    file = work / "hosts.json"
    file.write_text(json.dumps(hosts))
    environments = [{"MLX_RANK": f"{i}", "MLX_HOSTFILE": f"{file}"} for i in range(count)]
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "measure", *arguments],
            env=os.environ | (environment if count > 1 else {}), stdout=subprocess.PIPE, text=True,
        )
        for environment in environments
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("a process failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


if __name__ == "__main__":
    app()
