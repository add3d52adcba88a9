"""Streams of events: what is sent when, and what happens when somebody leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from speculative_t5.serve.responses import EventStream, Write

import pytest

Produce = Callable[[Write], Coroutine[Any, Any, str]]
PAUSE = 0.1  # seconds after which there is a comment
PING = (b": ping\n\n", True)


def sent_by(produce: Produce) -> list[tuple[bytes, bool]]:
    """Run a stream to its end; return each body that was sent, and whether more was to come."""
    sent: list[tuple[bytes, bool]] = []
    closed: list[None] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append((message["body"], message["more_body"]))

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def run() -> None:
        response = EventStream(produce, close=lambda: closed.append(None), ping_seconds=PAUSE)
        await response({}, receive, send)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    try:
        asyncio.run(run())
    finally:
        assert closed == [None]
    return sent


def test_the_last_events_come_with_the_end() -> None:
    async def produce(write: Write) -> str:
        await write("first")
        return "last"

    assert sent_by(produce) == [(b"first", True), (b"last", False)]


def test_a_stream_that_moves_has_no_comments() -> None:
    longest = 0.0

    async def produce(write: Write) -> str:
        nonlocal longest
        now = asyncio.get_running_loop().time
        began = written = now()
        while now() < began + 4 * PAUSE:
            longest, written = max(longest, now() - written), now()
            await write("event")
            await asyncio.sleep(PAUSE / 50)
        return "last"

    assert PING not in sent_by(produce) or longest > PAUSE / 2, "and the machine was not busy"


def test_a_stream_that_waits_has_one_comment_a_pause() -> None:
    async def produce(write: Write) -> str:
        await write("event")
        await asyncio.sleep(3.5 * PAUSE)
        return "last"

    first, *pings, last = sent_by(produce)
    assert (first, last) == ((b"event", True), (b"last", False))
    assert set(pings) == {PING} and 1 <= len(pings) <= 4


def test_a_stream_that_fails_is_closed() -> None:
    async def produce(write: Write) -> str:
        await write("event")
        raise ValueError("the text cannot be made")

    with pytest.raises(ValueError, match="cannot be made"):
        sent_by(produce)
