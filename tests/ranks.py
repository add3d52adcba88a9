"""Several processes on this machine, connected as a ring, as `mlx.launch` starts them.

Run as a program, it forks them: importing the package takes a second, and is done once.
"""

import functools
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent


class Pair:
    """Stands for the group of two processes, of which this is the first."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def run_ranks(
    folder: Path, commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]] = ()
) -> list[tuple[int, str, str]]:
    """Run Python with arguments of its own in each process; return exit codes, outputs, errors."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in commands]
    hosts = [[f"127.0.0.1:{server.getsockname()[1]}"] for server in servers]
    for server in servers:
        server.close()
    (folder / "hosts.json").write_text(json.dumps(hosts))
    common = {**os.environ, "MLX_HOSTFILE": str(folder / "hosts.json")}
    own = environments or [{}] * len(commands)
    ranks = [
        {"command": command, "environment": common | {"MLX_RANK": f"{rank}"} | own[rank]}
        for rank, command in enumerate(commands)
    ]
    forking = forking_process()
    assert forking.stdin and forking.stdout
    print(json.dumps({"folder": str(folder), "ranks": ranks}), file=forking.stdin, flush=True)
    codes = json.loads(forking.stdout.readline())
    shown = [[(folder / f"rank{n}.{end}").read_text() for end in ENDS] for n in range(len(codes))]
    return [(code, *texts) for code, texts in zip(codes, shown, strict=True)]


ENDS = ("out", "err")


@functools.cache
def forking_process() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )


def become(folder: str, rank: int, environment: dict[str, str], command: list[str]) -> None:
    """Run a command in this process, which was forked for it."""
    signal.alarm(300)  # for one that hangs
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.pipe()[0], 0)  # a launcher's, which never ends
    for descriptor, end in enumerate(ENDS, 1):
        os.dup2(os.open(f"rank{rank}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    kind, *arguments = command
    if kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(arguments[0], {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(kind, run_name="__main__")


def main() -> None:
    for name in ("cli.batch", "cli.main", "generation"):
        importlib.import_module(f"speculative_t5.{name}")
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        children = []
        for rank, each in enumerate(request["ranks"]):
            if not (child := os.fork()):
                become(request["folder"], rank, **each)
                return
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
