"""Processes for whole texts: what one of them does holds up nobody else, and ends in time."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from speculative_t5.cli.options import DecoderOptions
from speculative_t5.serve import Service, workers
from speculative_t5.serve.requests import Refused
from speculative_t5.serve.workers import Unfinished, Worker, Workers

import httpx
import pytest
import text_attacks
from messages import check_message
from serving import PATIENCE, Served, served_as, serving, started, wait_until

# A process that answers each text by itself, or does what it says, and imports nothing.
ECHO = """
import pickle, sys, time
from multiprocessing.connection import Connection
socket = Connection(int(sys.argv[-1]))
socket.send(("ready",))
while True:
    try: kind, value = socket.recv()
    except EOFError: break
    if value == "sleep": time.sleep(600)
    if value == "end": sys.exit()
    if value == "ask":
        socket.send(("outputs", [], None))
        _, value = socket.recv()
    if value == "big": value = "x" * 3_000_000
    socket.send(("answer", value))
"""
FAKE = [sys.executable, "-c", ECHO]

# What this does to a text with the word HANGS is what a bad pattern does: it holds the interpreter.
HANGING = """
import sys; sys.path[:] = {path!r}
import re
from speculative_t5.serve import languagetool, libretranslate, text_worker
def hang(text):
    if "HANGS" in text: re.match("(a+)+$", "a" * 60 + "b")
edits, text_field = languagetool.edits, libretranslate.text_field
def hanging_edits(before, after):
    hang(before)
    return edits(before, after)
def hanging_field(fields, name):
    hang(fields[name])
    return text_field(fields, name)
languagetool.edits, libretranslate.text_field = hanging_edits, hanging_field
text_worker.work_on_texts()
"""
HANGS = [sys.executable, "-c", HANGING.format(path=sys.path)]
BAD = "He go home. This HANGS for ever."


def run(work: Callable[[Workers], Awaitable[None]], **options: Any) -> None:
    """Do something with processes in an event loop, and end them."""

    async def all_of_it() -> None:
        pool = Workers(**{"command": FAKE} | options)
        pool.start()
        try:
            async with asyncio.timeout(PATIENCE):
                await work(pool)
        finally:
            await pool.stop(0)

    asyncio.run(all_of_it())


@contextlib.asynccontextmanager
async def told(pool: Workers, what: str, *, is_long: bool = False) -> AsyncIterator[Worker]:
    async with pool.lent(is_long=is_long) as worker:
        worker.send("text", what)
        yield worker


async def answer(pool: Workers, what: str, *, is_long: bool = False) -> str:
    async with told(pool, what, is_long=is_long) as worker:
        kind, found = await worker.receive()
        assert kind == "answer"
        return str(found)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_is_lent_again() -> None:
    async def work(pool: Workers) -> None:
        pids = set()
        for what in ("a", "big", "b"):
            async with told(pool, what) as worker:
                pids.add(worker.pid)
                assert len((await worker.receive())[1]) == (3_000_000 if what == "big" else 1)
            await asyncio.sleep(0.05)
        assert len(pids) == 1
        assert await asyncio.gather(*(answer(pool, str(i)) for i in range(20))) == [
            str(i) for i in range(20)
        ]

    run(work)


def test_processes_go_on_after_clients_that_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment: while it computes, waits for a reply, or a message is half read."""
    monkeypatch.setattr(workers, "LEAVING_SECONDS", 0.5)

    async def work(pool: Workers) -> None:
        for what, pause in [("ask", 0.2), ("sleep", 0.1), ("big", 0.0), ("big", 0.01), ("a", 0.0)]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause), told(pool, what) as worker:
                    if what == "ask":
                        assert (await worker.receive())[0] == "outputs"
                        await asyncio.sleep(PATIENCE)
                    await worker.receive()
            assert await asyncio.gather(*(answer(pool, str(i)) for i in range(8))) == [
                str(i) for i in range(8)
            ]

    run(work)


def test_a_message_that_is_half_read_is_read_to_its_end() -> None:
    """The process is lent again: its next message begins where this one ends."""

    async def work(pool: Workers) -> None:
        async with told(pool, "big") as worker:
            reading = asyncio.create_task(worker.receive())
            while worker._size is None:
                await asyncio.sleep(0)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            assert worker._size and worker.owes
        await asyncio.gather(*pool._tasks)
        assert [*pool._idle] == [worker] and await answer(pool, "a") == "a"

    run(work)


def test_a_process_that_is_ready_goes_first() -> None:
    """One that is started ahead of the next text takes no other one's place."""

    async def work(pool: Workers) -> None:
        assert await answer(pool, "a") == "a"
        await asyncio.sleep(0.1)
        (ready, starting), pids = (worker.pid for worker in reversed(pool._idle)), set()
        for _ in range(10):
            async with told(pool, "a") as worker:
                pids.add(worker.pid)
                await worker.receive()
            await asyncio.sleep(0.02)
        assert pids == {ready} and {worker.pid for worker in pool._idle} == {ready, starting}

    run(work, ahead=True)


def test_a_process_that_ends_is_replaced() -> None:
    async def work(pool: Workers) -> None:
        for how in ("end", "kill", "cut"):
            with pytest.raises(Unfinished if how == "cut" else EOFError):
                async with told(pool, "end" if how == "end" else "sleep") as worker:
                    if how == "kill":
                        os.kill(worker.pid, signal.SIGKILL)
                    if how == "cut":
                        worker.cut("enough")
                    await worker.receive()
            assert await answer(pool, "a") == "a"
        await asyncio.sleep(0.1)  # until it is back
        async with pool.lent(is_long=False) as worker:
            pass
        await asyncio.sleep(0.1)
        os.kill(worker.pid, signal.SIGKILL)  # while nobody has it
        while worker.is_alive:
            await asyncio.sleep(0.01)
        assert await answer(pool, "a") == "a"

    run(work)


def test_long_texts_leave_processes_to_short_ones() -> None:
    async def work(pool: Workers) -> None:
        long = [asyncio.create_task(answer(pool, "sleep", is_long=True)) for _ in range(10)]
        await asyncio.sleep(0.3)
        assert len(pool._lent) == workers.MOST_LONG
        async with asyncio.timeout(workers.FAIR_SECONDS / 2):
            assert await answer(pool, "a") == "a"
        for each in long:
            each.cancel()
        await asyncio.wait(long)
        assert await answer(pool, "a", is_long=True) == "a"

    run(work)


def test_who_only_computes_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each who waits, and none that waits for the server."""
    monkeypatch.setattr(workers, "FAIR_SECONDS", 1.0)

    async def work(pool: Workers) -> None:
        async with told(pool, "ask") as asking:
            await asking.receive()
            busy = [
                asyncio.create_task(answer(pool, "sleep")) for _ in range(workers.MOST_SHORT - 1)
            ]
            await asyncio.sleep(0.5)
            assert await answer(pool, "a") == "a"
            assert sum(task.done() for task in busy) == 1
            for each in busy:
                if each.done():
                    assert str(each.exception()) == "it held up other texts"
                each.cancel()
            await asyncio.wait(busy)
            asking.send("reply", "b")
            assert await asking.receive() == ("answer", "b")

    run(work)


def test_too_many_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MOST_SHORT", 2)
    monkeypatch.setattr(workers, "MOST_WAITING", 3)

    async def work(pool: Workers) -> None:
        tasks = [asyncio.create_task(answer(pool, "sleep")) for _ in range(5)]
        await asyncio.sleep(0.3)
        with pytest.raises(Refused, match="3 texts wait already: wait and send") as refused:
            await answer(pool, "a")
        check_message(str(refused.value))
        assert refused.value.headers == {"Retry-After": "5"}
        assert await answer(pool, "a", is_long=True) == "a", "long ones do not count as short ones"
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)

    run(work)


def test_a_process_that_cannot_be_started_is_said() -> None:
    async def work(pool: Workers) -> None:
        with pytest.raises(Refused, match="no process for the text can be started") as refused:
            await answer(pool, "a")
        check_message(str(refused.value))

    run(work, command=["/nowhere/python"], ahead=True)


def test_processes_end_with_the_pool() -> None:
    pids: list[int] = []

    async def work(pool: Workers) -> None:
        tasks = [asyncio.create_task(answer(pool, what)) for what in ("sleep", "sleep", "a")]
        await asyncio.sleep(0.3)
        pids.extend(worker.pid for worker in [*pool._lent, *pool._idle])
        await pool.stop(0)
        assert [type(each.exception()) for each in tasks[:2]] == [Unfinished] * 2
        with pytest.raises(Refused, match="the server is stopping"):
            await answer(pool, "a")

    run(work, ahead=True)
    assert len(pids) in (3, 4) and not any(map(is_there, pids))


# With a model, and a process that hangs at a word as at a bad pattern:


@pytest.fixture(scope="module")
def hanging() -> Iterator[Served]:
    decoder = DecoderOptions().load()
    models = served_as("correct-base", Service(lambda: decoder), Workers(command=HANGS, ahead=True))
    with serving(models, text_seconds=60.0) as server:
        wait_until(lambda: models.state == "ready")
        yield server


def took(work: Callable[[], httpx.Response]) -> tuple[float, httpx.Response]:
    began = time.perf_counter()
    response = work()
    return time.perf_counter() - began, response


def test_what_only_computes_is_answered_as_far_as_it_went(
    hanging: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are answered meanwhile, as if there were nothing else.

    The processes yield to them, and on busy processors take seconds for what comes first.
    """
    from speculative_t5.serve import text_routes

    monkeypatch.setattr(text_routes, "COMPUTING_SECONDS", 15.0)
    assert hanging.post("/v2/check", text="He go home.", language="en").status_code == 200
    with ThreadPoolExecutor() as threads:
        bad = [
            threads.submit(hanging.post, "/v2/check", text=BAD, language=code)
            for code in ("en", "en-GB", "en-US")
        ]
        time.sleep(1.0)
        times = []
        while not all(each.done() for each in bad) and len(times) < 100:
            seconds, health = took(lambda: hanging.client.get("/health"))
            assert health.status_code == 200
            times.append(seconds)
            seconds, done = took(lambda: hanging.post(prompt="He go home."))
            assert done.json()["choices"][0]["text"] == "He goes home."
            times.append(seconds)
        assert sorted(times)[len(times) * 9 // 10] < 0.5, times
        for each in bad:
            found = each.result().json()
            assert found.get("warnings") == {
                "incompleteResults": True,
                "incompleteResultsReason": "it took more than 15 seconds to read",
            }
            (match,) = found["matches"]
            assert (match["offset"], match["replacements"]) == (3, [{"value": "goes"}])
    monkeypatch.setattr(text_routes, "COMPUTING_SECONDS", 2.0)
    fields = {"q": "a", "source": "HANGS", "target": "de", "model": "correct-base"}
    translated = hanging.post("/translate", **fields)
    assert translated.status_code == 503
    assert "more than 2 seconds to read): send it in parts" in translated.json()["error"]
    check_message(translated.json()["error"])


def test_a_text_is_answered_within_its_seconds() -> None:
    """Also where it is decoded all the time."""
    decoder = DecoderOptions().load()
    text = " ".join(f"She have {i} apple and he dont likes it." for i in range(2000))
    models = served_as("correct-base", Service(lambda: decoder), Workers(ahead=True))
    with serving(models, text_seconds=6.0) as server:
        wait_until(lambda: models.state == "ready")
        seconds, response = took(lambda: server.post("/v2/check", text=text, language="en"))
        assert response.status_code == 200 and seconds < PATIENCE
        found = response.json()
        assert found["warnings"]["incompleteResultsReason"] == "it was not done within 6 seconds"
        offsets = [match["offset"] for match in found["matches"]]
        assert offsets and offsets == sorted(offsets) and offsets[-1] < len(text) / 2
        wait_until(lambda: not models.figures()["rows"] and not models.figures()["queued"])


def test_texts_may_be_bounded(hanging: Served) -> None:
    with serving(max_text=20) as server:
        for fields in (
            {"text": "a" * 21},
            {"data": {"annotation": [{"text": "a" * 21}]}},
            {"data": json.dumps({"annotation": [{"text": "a" * 21}]})},
        ):
            refused = server.post("/v2/check", language="en", **fields)
            assert refused.status_code == 413
            assert "this server takes 20: send it in parts" in refused.json()["error"]
            check_message(refused.json()["error"])
        assert server.post("/detect", q=["a" * 15, "a" * 6]).status_code == 413
        assert server.post("/detect", q="a" * 20).status_code == 200


# The command in a process of its own:

PLANTED = """
from speculative_t5.serve import workers
workers.default_command = lambda: {command!r}
"""


def test_a_server_that_stops_ends_what_only_computes(tmp_path: Path) -> None:
    change = PLANTED.format(command=HANGS)
    with started(tmp_path, change=change) as (process, client), ThreadPoolExecutor() as threads:
        assert client.post("/v2/check", json={"text": "a", "language": "en"}).status_code == 200
        bad = []
        for who in ("He", "She", "Anna"):  # each is decoded, as none is kept
            before = figure(client, "prompt_tokens_total")
            body = {"text": BAD.replace("He", who), "language": "en"}
            bad.append(threads.submit(client.post, "/v2/check", json=body))
            wait_until(lambda before=before: figure(client, "prompt_tokens_total") > before)
            wait_until(lambda: figure(client, "rows") == 0)
            time.sleep(1.0)  # now it hangs
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert time.monotonic() - began < 10
        found = [each.result().json().get("warnings") for each in bad]
        warnings = {"incompleteResults": True, "incompleteResultsReason": "the server is stopping"}
        assert found == [warnings] * 3, [each.result().json() for each in bad]


def figure(client: httpx.Client, name: str) -> float:
    """A figure of the server's metrics."""
    lines = client.get("/metrics").text.splitlines()
    (found,) = [line for line in lines if line.startswith(f"speculative_t5_{name} ")]
    return float(found.split()[1])


@pytest.mark.linux
def test_processes_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, change="") as (process, client):
        assert client.post("/v2/check", json={"text": "a", "language": "en"}).status_code == 200
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        process.kill()
        wait_until(lambda: not any(is_running(int(pid)) for pid in children))


def is_running(pid: int) -> bool:
    """Whether a process has not ended, on Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("name", text_attacks.attacks(3000))
def test_texts_of_every_kind_are_answered(hanging: Served, name: str) -> None:
    """A sample of `scripts/checks/text_attacks.py`; one of the models translates nothing."""
    attack = text_attacks.attacks(3000)[name]
    status = text_attacks.send(hanging.port, attack)
    assert status in ((404,) if attack.path == "/translate" else (200, 400))
