"""Servers: in a thread, with a service that decodes nothing, or the command in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from speculative_t5.decoding import Stats
from speculative_t5.decoding.logits import NOTHING_LEFT
from speculative_t5.generation import Chunk, GenerationOptions
from speculative_t5.serve import Models, Settings, Workers, make_app
from speculative_t5.serve import Served as Model
from speculative_t5.serve.connections import Limits
from speculative_t5.serve.requests import Refused
from speculative_t5.serve.server import Server, bind
from speculative_t5.serve.service import State
from speculative_t5.tokenizers import Languages

import httpx
from conftest import REPOSITORY

PATIENCE = 60  # seconds, on a machine that does other things
MODEL = "tiny"
FAIL, STALL, FORBIDDEN = "fail", "stall", "forbidden"  # words of prompts

FIGURES = {
    "queued": 2, "rows": 3, "rounds": 40, "drafted": 50, "accepted": 30, "emitted": 90,
    "prompt_tokens": 70, "failures": 1, "seconds_since_round": 0.5,
}  # fmt: skip


def rounds_of(prompt: Any, sample: int, options: GenerationOptions) -> list[Chunk]:
    """The rounds of an output: the prompt's words in capitals, two a round, one of them drafted."""
    parts = prompt.split() if isinstance(prompt, str) else prompt
    text = " ".join(p["content"] if isinstance(p, dict) else str(p) for p in parts)
    words, reason = [*text.upper().split(), *(["AGAIN"] * sample)], "eos"
    for string in options.stop:
        if string in words:
            words, reason = words[: words.index(string)], "stop"
    if len(words) > options.max_tokens:
        words, reason = words[: options.max_tokens], "length"
    chunks: list[Chunk] = []
    for start in range(0, max(len(words), 1), 2):
        own, number = words[start : start + 2], start // 2 + 1
        ends: Any = reason if start + 2 >= len(words) else None
        pieces = tuple(" " * (start + place > 0) + word for place, word in enumerate(own))
        emitted = start + len(own) + (ends == "eos")
        stats = Stats((1,) * number, (1,) * number, (1,) * number, emitted, 0.01 * number)
        end_id = 1 if ends == "eos" else None
        chunks.append(Chunk("".join(pieces), [5] * len(own), 1, stats, ends, pieces, end_id))
    return chunks


@dataclass(eq=False)
class FakeCall:
    """Chunks that are known from the start."""

    service: FakeService
    prompts: list[Any]
    options: GenerationOptions
    cancelled: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.left = len(self.prompts) * self.options.num_return_sequences

    @property
    def prompt_tokens(self) -> int:
        return sum(len(p.split()) + 1 if isinstance(p, str) else len(p) for p in self.prompts)

    async def chunks(
        self, patience: float | None = None
    ) -> AsyncIterator[tuple[int, Chunk] | None]:
        count = self.options.num_return_sequences
        waiting = {
            i: rounds_of(self.prompts[i // count], i % count, self.options)
            for i in range(self.left)
        }
        while waiting:
            for number, chunks in list(waiting.items()):
                await asyncio.sleep(self.service.pause)
                chunk = chunks.pop(0)
                if STALL.upper() in chunk.text:
                    self.stalled.set()
                    while not self.service.held.is_set():
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(self.service.held.wait(), patience)
                            break
                        yield None
                if FORBIDDEN.upper() in chunk.text:
                    raise Refused(400, NOTHING_LEFT)
                if FAIL.upper() in chunk.text:
                    raise Refused(500, "decoding has failed: send the request again")
                if chunk.finish_reason:
                    del waiting[number]
                    self.left -= 1
                yield number, chunk

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class FakeService:
    """Has a Service's interface; what it answers follows from the prompt."""

    makes: ClassVar[type[FakeCall]] = FakeCall
    state: State = "ready"
    failure: BaseException | None = None
    busy: int = 0  # calls that are still to be refused
    tokenizer: Any = None
    max_queue: int = 256
    pause: float = 0.0  # seconds of a round
    calls: list[FakeCall] = field(default_factory=list)
    submitted: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    stopped: list[float] = field(default_factory=list)
    now: dict[str, float] = field(default_factory=lambda: dict(FIGURES))
    loop: Any = None

    def start(self) -> None:
        self.held = asyncio.Event()  # set it to let prompts go on that stall
        self.loop = asyncio.get_running_loop()

    def check_ready(self) -> None:
        if self.state != "ready":
            headers = {"Retry-After": "5"} if self.state == "loading" else None
            message = f"the server is {self.state}: wait until it is ready"
            raise Refused(503, message, headers=headers)

    @property
    def decoder(self) -> Any:
        self.check_ready()
        bare = SimpleNamespace(tokenizer=None)  # in another process
        prompts = SimpleNamespace(without_model=lambda: bare)
        return SimpleNamespace(tokenizer=self.tokenizer, prompts=prompts, min_probability=0.0)

    def submit(
        self, prompts: Sequence[Any], options: GenerationOptions, field: str = "prompt"
    ) -> FakeCall:
        wanted = len(prompts) * options.num_return_sequences
        if wanted > self.max_queue:
            raise ValueError(f"the request asks for {wanted} outputs: split it")
        self.check_ready()
        if self.busy:
            self.busy -= 1
            message = "the queue is full: wait and send the request again"
            raise Refused(429, message, code="queue_full", headers={"Retry-After": "1"})
        for prompt in prompts:
            if isinstance(prompt, str) and not prompt.strip():
                raise Refused(400, "the prompt is empty: give some text", param=field)
            largest = max((part for part in prompt if isinstance(part, int)), default=0)
            if largest >= 100:
                wrong = f"prompt ids must be from 0 to 99, got {largest}"
                raise Refused(400, wrong, param=field)
        self.calls.append(self.makes(self, list(prompts), options))
        self.submitted.release()
        return self.calls[-1]

    async def fitted(self, prompts: Sequence[Any], field: str = "prompt") -> list[Any]:
        return [*prompts]

    def figures(self) -> dict[str, float]:
        return self.now

    async def stop(self, seconds: float, hurried: Callable[[], bool]) -> None:
        self.state = "stopping"
        self.stopped.append(seconds)
        await self.held.wait()
        self.state = "stopped"

    def last_call(self) -> FakeCall:
        """Wait for a call, and return it."""
        assert self.submitted.acquire(timeout=PATIENCE)
        return self.calls[-1]

    def forget_calls(self) -> None:
        """Let `last_call` wait for the next one."""
        while self.submitted.acquire(blocking=False):
            pass

    def let_go(self) -> None:
        """Let prompts go on that stall, unless the server has ended."""
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self.loop.call_soon_threadsafe(self.held.set)


@dataclass
class Served:
    """A server that runs: where it is, and what it decodes with."""

    service: FakeService
    server: Server
    port: int
    client: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return self.client.post(path, json=fields)

    def events(self, path: str = "/v1/completions", **fields: Any) -> list[str]:
        """The data of a stream's events."""
        response = self.post(path, stream=True, **fields)
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        lines = response.text.split("\n\n")
        assert lines.pop() == ""
        return [line.removeprefix("data: ") for line in lines]


def served_as(name: str, service: Any, workers: Workers | None = None) -> Models:
    """A single model, whose service is there already."""
    own = SimpleNamespace(corrects=None, languages=Languages())
    return Models([Model(name, lambda: service, lambda: own)], workers=workers)


@contextlib.contextmanager
def serving(
    service: Any = None,
    shutdown_seconds: float = 7,
    limits: Limits | None = None,
    **changes: Any,
) -> Iterator[Served]:
    """Run a server for the block, by default of a fake; `changes` are those of its settings."""
    service = service or FakeService()
    options: dict[str, Any] = {"defaults": GenerationOptions()}
    models = service
    if not isinstance(service, Models):
        models = served_as(changes.pop("model", MODEL), service)
    app = make_app(models, Settings(**options | changes))
    with bind("127.0.0.1", 0) as listening:
        server = Server(
            app, models, shutdown_seconds=shutdown_seconds, ready=lambda: None, limits=limits
        )
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            wait_until(lambda: server.started and getattr(service, "loop", True))
            port = listening.getsockname()[1]
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
                yield Served(service, server, port, client)
        finally:
            server.should_exit = True
            if isinstance(service, FakeService):
                service.let_go()
            thread.join(PATIENCE)
            assert not thread.is_alive()


# Runs a command that some code has changed.
CHANGED = """
import sys
from speculative_t5 import cli
from speculative_t5.serve import service
{change}
sys.argv[0] = "__main__.py"
cli.main()
"""


@contextlib.contextmanager
def started(
    folder: Path, *arguments: str, change: str
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """Run the command, changed by some code, in a process of its own, with a client of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHANGED.format(change=change), "serve", "--port", "0", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        # A background process of a script inherits that it ignores this signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line, process.communicate()
        with httpx.Client(base_url=line.split()[-1], timeout=PATIENCE) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate()


def is_there(client: httpx.Client) -> bool:
    """Whether a server answers."""
    try:
        return client.get("/health").status_code > 0
    except httpx.TransportError:
        return False


def wait_until(holds: Callable[[], bool], pause: float = 0.01) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(pause)
