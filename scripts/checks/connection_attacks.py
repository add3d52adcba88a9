"""Attack a server's connections, and show what a client beside the attack sees.

Starts `serve` with few open files, as a Mac allows by default, and lets clients connect that are
silent, send a head or a body byte by byte, send a body that nobody wants, send many requests at a
time, or read no answer: a new server for each kind. A client in a process of its own asks for
/health all the time, with a new connection each time, and now and then for a correction.

Exits with 1 if that client ever waited for longer than `--most`, lost a connection, or was refused
more than once in twenty times; or if the server wrote more than a line in ten seconds.
"""

import asyncio
import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from multiprocessing.connection import Connection
from statistics import median
from typing import IO, Annotated, Any

import psutil
import typer

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
PAGE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
LARGE = 2_000_000  # bytes of a body that lacks its last one
PIPELINED = 50  # requests that one client sends at a time
PAUSE = 0.1  # seconds between two questions of the client beside
PATIENCE = 60.0  # seconds for an answer
RECEIVES = 4096  # bytes that a client's system keeps of an answer that it does not read


@dataclass
class Seen:
    """What a client saw: seconds until answers, how many were 503, and connections lost."""

    answered: list[float] = field(default_factory=list)
    refused: int = 0
    lost: int = 0


def ask(port: int, seen: Seen, number: int) -> None:
    """Ask once, with a connection of its own; every tenth time for a correction."""
    connection, began = HTTPConnection("127.0.0.1", port, timeout=PATIENCE), time.monotonic()
    try:
        if number % 10 == 9:
            body = json.dumps({"prompt": "He go home.", "max_tokens": 8})
            connection.request("POST", "/v1/completions", body)
        else:
            connection.request("GET", "/health")
        status = connection.getresponse().status
        if status == 200:
            seen.answered.append(time.monotonic() - began)
        else:
            seen.refused += 1
    except (OSError, HTTPException):
        seen.lost += 1
    finally:
        connection.close()


def watch(port: int, ends: Connection) -> None:
    """Say that it begins, ask until told to end, and send what was seen."""
    seen, number = Seen(), 0
    ends.send(None)
    while not ends.poll(PAUSE):
        ask(port, seen, number)
        number += 1
    ends.send(seen)


Attack = Callable[[int, asyncio.Event], Awaitable[None]]


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def silent(port: int, over: asyncio.Event) -> None:
    """Connect, send nothing, and connect again once that is closed."""
    while not over.is_set():
        reader, writer = await connect(port)
        try:
            await reader.read()
        finally:
            writer.close()
        await asyncio.sleep(PAUSE)


def dripping(start: bytes, part: bytes, pause: float) -> Attack:
    """Return an attack that sends a start and then parts of which there is no end."""

    async def drip(port: int, over: asyncio.Event) -> None:
        while not over.is_set():
            _, writer = await connect(port)
            try:
                writer.write(start)
                while True:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(pause)
            finally:
                writer.close()

    return drip


def unread(request: bytes) -> Attack:
    """Return an attack that sends many requests at a time, and reads no answer."""

    async def send(port: int, over: asyncio.Event) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=RECEIVES)
        try:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(request * PIPELINED)
            await over.wait()
        finally:
            writer.close()

    return send


# By name: what each client does, and how many there are by default.
ATTACKS: dict[str, tuple[Attack, int]] = {
    "nothing": (silent, 0),
    "silent": (silent, 250),
    "head byte by byte": (dripping(HEAD, b"x", 1.0), 250),
    "body byte by byte": (dripping(POST, b" ", 1.0), 250),
    "bodies of 2 MB, no end": (
        dripping(POST.replace(b"1000", b"%d" % (LARGE + 1)) + b" " * LARGE, b"", 1.0),
        250,
    ),
    "body of 100 GB on GET": (
        dripping(HEAD + b"Content-Length: 100000000000\r\n\r\n", b" " * 2000, 0.1),
        250,
    ),
    "50 GETs at a time": (unread(HEAD + b"\r\n"), 1000),
    "50 pages at a time": (unread(PAGE), 1000),
}


async def attack(port: int, clients: Attack, count: int, seconds: float) -> None:
    """Let clients attack for a while."""
    over = asyncio.Event()

    async def one() -> None:
        while not over.is_set():
            with suppress(OSError):
                await clients(port, over)
            await asyncio.sleep(PAUSE)

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    await asyncio.sleep(seconds)
    over.set()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def server(model: str, files: int, log: IO[bytes]) -> Iterator[tuple[psutil.Process, int]]:
    """Run a server that may open so many files, and give its process and port."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    command = [sys.executable, "-m", "speculative_t5", "serve", "--port", "0", "--model", model]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=limit
    ) as process:
        try:
            assert process.stdout
            yield psutil.Process(process.pid), int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.terminate()


def measure(
    process: psutil.Process, port: int, clients: Attack, count: int, seconds: float
) -> tuple[Seen, int, int]:
    """Attack, and return what a client saw, the server's memory in bytes and its open files."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    beside = context.Process(target=watch, args=(port, there), daemon=True)
    beside.start()
    here.recv()
    most = {"memory": 0, "files": 0}

    async def sample() -> None:
        while True:
            most["memory"] = max(most["memory"], process.memory_info().rss)
            most["files"] = max(most["files"], process.num_fds())
            await asyncio.sleep(PAUSE)

    async def both() -> None:
        sampling = asyncio.create_task(sample())
        await attack(port, clients, count, seconds)
        sampling.cancel()

    asyncio.run(both())
    here.send(None)
    if not here.poll(2 * PATIENCE):
        raise TimeoutError("the client beside has ended, or waits for ever")
    seen: Seen = here.recv()
    beside.join()
    return seen, most["memory"], most["files"]


def main(
    model: Annotated[str, typer.Option(help="Model to serve.")] = "correct-small",
    files: Annotated[int, typer.Option(help="Files that the server may open.")] = 256,
    seconds: Annotated[float, typer.Option(help="Of each attack.")] = 40.0,
    share: Annotated[float, typer.Option(help="Of the clients of each attack.")] = 1.0,
    most: Annotated[float, typer.Option(help="Seconds that a client beside may wait.")] = 2.0,
    only: Annotated[str, typer.Option(help="A word of the attacks' names.")] = "",
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if sys.platform == "linux" else soft, hard))
    failed = []
    print(f"{files} open files, {seconds:g} s each; a client beside sees:")
    print(
        "attack                  clients    200  503  lost  median s  longest s  lines  MB  files"
    )
    for name, (clients, count) in ATTACKS.items():
        if only not in name:
            continue
        row, faults = one_attack(model, files, clients, round(count * share), seconds, most)
        print(f"{name:22s} {row}", flush=True)
        failed += [f"{name}: {fault}" for fault in faults]
    if failed:
        sys.exit("\n".join(failed))


def one_attack(
    model: str, files: int, clients: Attack, count: int, seconds: float, most: float
) -> tuple[str, list[str]]:
    """Attack a new server, and return a row of the table and what is wrong with it."""
    with tempfile.TemporaryFile() as log:
        with server(model, files, log) as (process, port):
            seen, memory, opened = measure(process, port, clients, count, seconds)
        log.seek(0)
        lines = len(log.read().splitlines())
    longest = max(seen.answered, default=PATIENCE)
    row: tuple[Any, ...] = (count, len(seen.answered), seen.refused, seen.lost)
    shown = "{:8d} {:6d} {:4d} {:5d}".format(*row)
    shown += f"  {median(seen.answered or [PATIENCE]):8.3f}  {longest:9.3f}"
    shown += f"  {lines:5d}  {memory / 1e6:.0f}  {opened:5d}"
    faults = {
        f"the client waited for {longest:.1f} s": longest > most,
        f"the client lost {seen.lost} connections": seen.lost,
        f"the client was refused {seen.refused} times": (
            seen.refused * 20 > len(seen.answered) + seen.refused
        ),
        f"the server wrote {lines} lines": lines > 1 + seconds / 10,
    }
    return shown, [fault for fault, is_one in faults.items() if is_one]


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
