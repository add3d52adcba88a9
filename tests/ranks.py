"""Several processes on this machine, connected as a ring, as `mlx.launch` starts them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from conftest import REPOSITORY


class Pair:
    """Stands for the group of two processes, of which this is the first."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@contextmanager
def started(
    folder: Path, commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]] = ()
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run Python with arguments of its own in each process, in a folder; end all at the end."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in commands]
    hosts = [[f"127.0.0.1:{server.getsockname()[1]}"] for server in servers]
    for server in servers:
        server.close()
    file = folder / "hosts.json"
    file.write_text(json.dumps(hosts))
    common = {"MLX_HOSTFILE": str(file), "PYTHONPATH": f"{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    own = environments or [{}] * len(commands)
    processes = [
        subprocess.Popen(
            [sys.executable, *command], cwd=folder,
            env=os.environ | common | {"MLX_RANK": f"{rank}"} | own[rank],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, command in enumerate(commands)
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ended(
    processes: Sequence[subprocess.Popen[str]], timeout: float = 300.0
) -> list[tuple[int, str, str]]:
    """Wait for processes, some seconds each; return their exit codes, outputs and errors."""
    found = [process.communicate(timeout=timeout) for process in processes]
    return [(p.returncode, *texts) for p, texts in zip(processes, found, strict=True)]
