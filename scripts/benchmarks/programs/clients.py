"""Clients of a server, many at once: each asks for one prompt after another, as a stream.

They may be made to misbehave: a third of the requests leaves at a random moment, and a tenth is
nonsense. Clients and server share the processors, so streams are read by aiohttp, which needs a
third of the processor time that httpx needs for a request.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import httpx

from .nonsense import KINDS, Wrong, message_of

LEAVE, MALFORMED = 1 / 3, 1 / 10  # shares of requests
PATIENCE = 600.0  # seconds without any byte, as OpenAI's client waits


@dataclass(frozen=True)
class Answer:
    """One output: its tokens, EOS included, and the seconds to its first text and to its end."""

    index: int
    text: str
    tokens: int
    first: float
    whole: float


@dataclass
class Run:
    """What many requests gave."""

    answers: list[Answer] = field(default_factory=list)  # that arrived whole
    # Requests that were refused because the queue was full (and sent again), were left by their
    # client, or were malformed and refused.
    others: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0  # from the first request to the last answer


@dataclass(frozen=True)
class Client:
    """Connects to a server: `streams` for prompts, `other` for all else."""

    streams: aiohttp.ClientSession
    other: httpx.AsyncClient


@asynccontextmanager
async def new_client(url: str, key: str | None = None) -> AsyncIterator[Client]:
    """Yield a client without a limit of connections, so that requests wait in the server."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    patience = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE, sock_read=PATIENCE)
    async with (
        aiohttp.ClientSession(
            url, headers=headers, timeout=patience, connector=aiohttp.TCPConnector(limit=0)
        ) as streams,
        httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=PATIENCE) as other,
    ):
        yield Client(streams, other)


async def drive(
    client: Client,
    prompts: Sequence[str],
    clients: int,
    max_tokens: int,
    *,
    disturb: random.Random | None = None,
    stay: float = 0.0,
    watch: Callable[[int], None] = lambda done: None,
) -> Run:
    """Send each prompt once, from as many clients at a time as `clients` says.

    An answer's `index` is that of its text. `disturb` chooses who leaves, within `stay` seconds, or
    sends nonsense; None lets all behave. `watch` takes the number of requests that have ended.
    """
    run, waiting = Run(), iter(enumerate(prompts))
    began = time.perf_counter()

    async def work(rng: random.Random | None, waiting: Iterator[tuple[int, str]]) -> None:
        for index, prompt in waiting:
            fate = rng.random() if rng else 1.0
            if rng and fate < MALFORMED:
                await rng.choice(KINDS)(client.other, rng)
                run.others["malformed"] += 1
            elif rng and fate < MALFORMED + LEAVE:
                try:
                    async with asyncio.timeout(rng.uniform(0, stay)):
                        run.answers.append(await ask(client, index, prompt, max_tokens, run))
                except TimeoutError:
                    run.others["left"] += 1
            else:
                run.answers.append(await ask(client, index, prompt, max_tokens, run))
            watch(len(run.answers) + run.others["left"] + run.others["malformed"])

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(work(disturb and random.Random(disturb.random()), waiting))
    run.seconds = time.perf_counter() - began
    return run


async def ask(client: Client, index: int, prompt: str, max_tokens: int, run: Run) -> Answer:
    """Return the output for a prompt; while the queue is full, wait as long as the server says."""
    began = time.perf_counter()
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    while True:
        async with client.streams.post("/v1/completions", json=body) as response:
            if response.status == 200:
                return await read(response.content, index, began)
            message = message_of(response.status, await response.read())
            if response.status != 429:
                raise Wrong(f"status {response.status}: {message}")
        run.others["queue full"] += 1
        await asyncio.sleep(float(response.headers["Retry-After"]))


async def read(lines: aiohttp.StreamReader, index: int, began: float) -> Answer:
    """Read a stream to its end."""
    texts: list[str] = []
    first, tokens, reason, ended = 0.0, None, None, False
    async for line in lines:
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]\n":
            ended = True
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise Wrong(f"a stream ended by an error: {event['error']['message']}")
        for choice in event["choices"]:
            texts.append(choice["text"])
            reason = choice["finish_reason"] or reason
            if choice["text"] and not first:
                first = time.perf_counter() - began
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    whole = time.perf_counter() - began
    if tokens is None or reason is None or not ended:
        raise Wrong(f"the stream for prompt {index} has no end, no finish_reason or no usage")
    return Answer(index, "".join(texts), tokens, first or whole, whole)


async def gauges(client: Client) -> dict[str, float] | None:
    """Return how many outputs wait and are decoded; None if the server has no metrics."""
    response = await client.other.get("/metrics")
    if response.status_code == 404:
        return None
    lines = (
        line.rsplit(" ", 1) for line in response.text.splitlines() if line[:1] not in ("#", "")
    )
    found = {name: float(value) for name, value in lines}
    return {name: float(found[f"speculative_t5_{name}"]) for name in ("queued", "rows")}


async def settle(client: Client, seconds: float = 30.0) -> None:
    """Wait until the server decodes nothing any more; `Wrong` if that does not happen."""
    until = time.monotonic() + seconds
    while (found := await gauges(client)) and any(found.values()):
        if time.monotonic() > until:
            raise Wrong(f"after {seconds:g} s without requests the server still has {found}")
        await asyncio.sleep(0.1)


async def model_of(client: Client) -> str:
    """Return the name of the server's model."""
    response = await client.other.get("/v1/models")
    if response.status_code != 200:
        message = message_of(response.status_code, response.content)
        raise Wrong(f"/v1/models has status {response.status_code}: {message}")
    name: str = response.json()["data"][0]["id"]
    return name


def differing(answers: Iterable[Answer], expected: Sequence[str]) -> list[Answer]:
    """Return the answers whose texts are not the expected ones."""
    return [answer for answer in answers if answer.text != expected[answer.index]]
