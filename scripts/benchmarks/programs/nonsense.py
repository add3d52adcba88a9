"""Requests that a server must refuse: malformed, too large, too slow, to nowhere."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}
GOOD = json.dumps({"prompt": "He go home.", "max_tokens": 5, "temperature": 0.5}).encode()
HUGE = 5 * 2**19  # bytes, more than a server here takes, but not than it reads before it closes
SLOW = 0.5  # seconds, at most, until a client that sends slowly leaves
# Bodies of requests that a server must refuse with a status from 400 to 499.
BAD_BODIES = (
    b"",
    b"{",
    b"[]",
    b"{}",
    b'"prompt"',
    b'{"prompt": "\xff"}',
    b'{"prompt": 7}',
    b'{"prompt": []}',
    b'{"prompt": ""}',
    b'{"prompt": [999999999]}',
    b'{"prompt": ["He", 5]}',
    b'{"prompt": "He", "max_tokens": -2}',
    b'{"prompt": "He", "temperature": "warm"}',
    b'{"prompt": "He", "model": "no-such-model"}',
    b'{"prompt": "He", "n": 0}',
    b'{"prompt": "He", "stop": 5}',
    b'{"prompt": "He", "top_p": 2}',
    b"[" * 10_000,
)
ROUTES = (
    ("GET", COMPLETIONS),
    ("DELETE", COMPLETIONS),
    ("PATCH", "/v1/models"),
    ("POST", "/v1/models"),
    ("BREW", "/"),
    ("GET", "/v1"),
    ("GET", "/v1/completions/"),
    ("POST", "/v2/completions"),
    ("GET", "/%00"),
    ("GET", "/v1/models/../../etc/passwd"),
    ("OPTIONS", "/v1/chat"),
)


class Wrong(Exception):
    """The server did not do what it must; the text says what."""


async def bad_body(client: httpx.AsyncClient, rng: random.Random) -> None:
    """Send a body that is refused whatever the model is."""
    body = rng.choice(BAD_BODIES)
    check_refused(await client.post(COMPLETIONS, content=body, headers=JSON), repr(body[:80]))


async def fuzzed(client: httpx.AsyncClient, rng: random.Random) -> None:
    """Send a good body with up to five changed bytes, which may be good by chance."""
    body = bytearray(GOOD)
    for _ in range(rng.randint(1, 5)):
        place = rng.randrange(len(body))
        body[place : place + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
    response = await client.post(COMPLETIONS, content=bytes(body), headers=JSON)
    if response.status_code != 200:
        check_refused(response, repr(bytes(body)))


async def huge(client: httpx.AsyncClient, rng: random.Random) -> None:
    """Send a body that is too large, with its length or without."""
    if rng.random() < 0.5:
        response = await client.post(COMPLETIONS, content=b" " * HUGE, headers=JSON)
    else:
        response = await client.post(COMPLETIONS, content=parts(HUGE), headers=JSON)
    check_refused(response, f"a body of {HUGE:,} bytes")


async def parts(size: int) -> AsyncIterator[bytes]:
    for _ in range(0, size, 2**16):
        yield b" " * 2**16


async def slow(client: httpx.AsyncClient, rng: random.Random) -> None:
    """Send a body byte by byte, and leave before its end."""

    async def bytes_of_it() -> AsyncIterator[bytes]:
        for byte in GOOD[:-1]:
            yield bytes([byte])
            await asyncio.sleep(0.01)
        await asyncio.sleep(SLOW)

    try:
        async with asyncio.timeout(rng.uniform(0, SLOW)):
            await client.post(COMPLETIONS, content=bytes_of_it(), headers=JSON)
    except TimeoutError:
        return
    raise Wrong("a body without its end was answered")


async def to_nowhere(client: httpx.AsyncClient, rng: random.Random) -> None:
    """Ask for what there is not."""
    method, path = rng.choice(ROUTES)
    check_refused(await client.request(method, path), f"{method} {path}")


KINDS: tuple[Callable[[httpx.AsyncClient, random.Random], Awaitable[None]], ...] = (
    bad_body,
    bad_body,
    fuzzed,
    fuzzed,
    huge,
    slow,
    to_nowhere,
)


def check_refused(response: httpx.Response, sent: str) -> None:
    """Check that a request was refused in the protocol's form."""
    if not 400 <= response.status_code < 500:
        raise Wrong(f"{sent} was answered with status {response.status_code}")
    message_of(response.status_code, response.content)


def message_of(status: int, body: bytes) -> str:
    """Return the message of an error, which has to be one line, and no traceback."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError) as error:
        raise Wrong(f"status {status} without OpenAI's error object: {body[:200]!r}") from error
    if not isinstance(message, str) or len(message.splitlines()) != 1 or "Traceback" in message:
        raise Wrong(f"status {status} with another message than one line: {message!r}")
    return message
