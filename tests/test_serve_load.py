"""The load test of servers: what it measures and notices."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speculative_t5.doctor.outputs import KNOWN

import psutil
import pytest
import serve_load
import uvicorn
from programs.clients import new_client, settle
from programs.nonsense import BAD_BODIES, Wrong
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

PROMPTS = [f"Sentence number {i}." for i in range(40)]


def error_of(message: str, status: int, **headers: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status, headers)


@dataclass
class Fake:
    """A server whose output is the prompt in capitals, and which may do things wrong.

    Attributes:
        full: How many requests find the queue full.
        wrong: A prompt that gets another output.
        fault: "leak" keeps the rows of those who leave; "lenient" accepts what is malformed;
            "traceback" shows one; "no end" ends streams early; "error" ends them by an error.
    """

    full: int = 0
    wrong: str = ""
    fault: str = ""
    rows: int = 0
    most_rows: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
            ],
            exception_handlers={HTTPException: self.nowhere},
        )

    async def nowhere(self, _: Request, error: Exception) -> Response:
        self.seen["malformed"] += 1
        return error_of("there is no such route: use another", 404)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake"}]})

    async def metrics(self, _: Request) -> Response:
        text = "# HELP speculative_t5_rows Rows.\n"
        return PlainTextResponse(
            f"{text}speculative_t5_rows {float(self.rows)}\nspeculative_t5_queued 0.0\n"
        )

    async def completions(self, request: Request) -> Response:
        try:
            body = await request.body()
        except ClientDisconnect:
            self.seen["cut"] += 1  # it left, or sent too slowly
            return Response()
        try:
            good = body not in BAD_BODIES and json.loads(body).keys() >= {"prompt", "stream"}
        except (ValueError, AttributeError):
            good = False
        if not good and self.fault != "lenient":
            self.seen["malformed"] += 1
            trace = "Traceback (most recent call last):\n  oh"
            return error_of(trace if self.fault == "traceback" else "no: leave it out", 400)
        if self.full:
            self.full -= 1
            return error_of("the queue is full: wait", 429, **{"Retry-After": "0"})
        found = json.loads(body) if good else {}
        assert not found or found["stream"] and found["stream_options"] == {"include_usage": True}
        prompt = found.get("prompt", "")
        return StreamingResponse(self.stream(prompt), media_type="text/event-stream")

    async def stream(self, prompt: str) -> AsyncIterator[str]:
        self.rows += 1
        self.most_rows = max(self.rows, self.most_rows)
        self.seen[prompt] += 1
        text = "something else" if prompt == self.wrong else prompt.upper()
        try:
            for part in (text[:5], text[5:]):
                choice = {"index": 0, "text": part, "finish_reason": None}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
                await asyncio.sleep(60 if self.fault == "leak" else 0.005)
        except asyncio.CancelledError:
            self.rows -= self.fault != "leak"
            raise
        self.rows -= 1
        if self.fault == "error":
            yield 'data: {"error": {"message": "decoding failed: send it again"}}\n\n'
        last: Any = {"index": 0, "text": "", "finish_reason": "stop"}
        yield f": ping\n\ndata: {json.dumps({'choices': [last]})}\n\n"
        if self.fault != "no end":
            usage = {"prompt_tokens": 3, "completion_tokens": len(prompt), "total_tokens": 0}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


class Served:
    """An application on a free port of loopback."""

    def __init__(self, app: Starlette) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        # Loggers are of the whole process: they stay as they are.
        config = uvicorn.Config(
            app, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        run = {"sockets": [self.socket]}
        self.thread = threading.Thread(target=self.server.run, kwargs=run, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        self.socket.close()


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def url(fake: Fake) -> Iterator[str]:
    served = Served(fake.app)
    yield served.url
    served.close()


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of prompts, whose outputs by `batch` are capitals."""

    def run(offline: serve_load.Offline) -> tuple[float, float]:
        offline.texts = [prompt.upper() for prompt in offline.prompts]
        return 1000.0, 50.0

    monkeypatch.setattr(serve_load.Offline, "run", run)
    path = tmp_path / "prompts.tsv"
    path.write_text("".join(f"{prompt}\tA correction.\n" for prompt in PROMPTS))
    return path


def test_every_output_is_checked_and_timed(
    fake: Fake, url: str, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.full = 3
    serve_load.main([url], clients="1,8", requests=40, turns=2, prompts=prompts, as_json=True)
    found = json.loads(capsys.readouterr().out)
    batch, one, many = found["variants"]
    assert (batch["name"], batch["tokens_per_second"]) == ("batch", [1000.0, 1000.0])
    assert [one["clients"], many["clients"]] == [1, 8]
    for variant in (one, many):
        assert variant["name"].startswith("fake at ")
        assert (variant["answers"], variant["differ"]) == (80, 0)
        assert len(variant["tokens_per_second"]) == 2 and min(variant["memory"]) > 10**7
        for half, most in (variant["first"], variant["whole"]):
            assert 0 < half <= most < 60
        assert variant["first"][0] < variant["whole"][0]
        assert min(variant["requests_per_second"]) > 0
    assert 1 < fake.most_rows <= 8
    # Two turns of each variant, and a first one of 2 prompts by 1 client and 16 by 8.
    assert fake.seen.total() == 4 * 40 + 2 + 16
    serve_load.main([url], clients="4", requests=40, turns=1, prompts=prompts)
    table = capsys.readouterr().out.splitlines()
    assert "40/40" in table[-1] and table[-1].split()[3] == "4"


def test_another_output_is_noticed(
    fake: Fake, url: str, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.wrong = PROMPTS[7]
    with pytest.raises(SystemExit, match="outputs differ"):
        serve_load.main([url], clients="2", requests=40, turns=1, prompts=prompts)
    out, err = capsys.readouterr()
    assert "39/40" in out and "'something else' instead of 'SENTENCE NUMBER 7.'" in err


def test_those_who_stay_get_their_outputs(
    fake: Fake, url: str, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_load.main(
        [url], clients="8", requests=200, turns=1, prompts=prompts, disturb=True, as_json=True
    )
    (_, found) = json.loads(capsys.readouterr().out)["variants"]
    others = found["others"]
    refused, cut = fake.seen["malformed"], fake.seen["cut"]
    assert 5 < refused <= others["malformed"] <= refused + cut and others["left"] > 20
    assert found["answers"] + others["left"] + others["malformed"] == 200
    assert found["differ"] == fake.rows == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("lenient", "was answered with status 200"),
        ("traceback", "another message than one line"),
        ("no end", "has no end, no finish_reason or no usage"),
        ("error", "a stream ended by an error: decoding failed"),
    ],
)
def test_what_a_server_must_not_do_ends_the_test(
    fake: Fake, url: str, prompts: Path, fault: str, message: str
) -> None:
    fake.fault = fault
    with pytest.raises(SystemExit, match=message):
        serve_load.main([url], clients="4", requests=200, turns=1, prompts=prompts, disturb=True)


@pytest.mark.parametrize(
    ("url", "clients"),
    [("http://a:1", "0"), ("http://a:1", "1,x"), ("http://a:1", "1,"), ("127.0.0.1:8080", "1"),
     ("http://a:1/v1", "1")],
)  # fmt: skip
def test_wrong_arguments_are_one_line(url: str, clients: str, prompts: Path) -> None:
    with pytest.raises(SystemExit, match="^error: .* must be .*, got '[^']*'$"):
        serve_load.main([url], clients=clients, prompts=prompts)


def test_rows_that_are_left_over_are_noticed(fake: Fake, url: str) -> None:
    async def leave() -> None:
        async with new_client(url) as client:
            fake.fault = "leak"
            body = {"prompt": "left", "stream": True, "stream_options": {"include_usage": True}}
            async with client.other.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_lines())
            await settle(client, seconds=0.2)

    with pytest.raises(Wrong, match="still has .*'rows': "):
        asyncio.run(leave())


def test_the_process_at_a_port_is_found(url: str) -> None:
    port = int(url.rsplit(":", 1)[1])
    assert serve_load.process_at(port) == psutil.Process()


def test_prompts_may_be_joined(fake: Fake, url: str, prompts: Path) -> None:
    serve_load.main([url], clients="2", requests=5, turns=1, prompts=prompts, join=2)
    assert f"{PROMPTS[2]} {PROMPTS[3]}" in fake.seen


def test_batch_gives_the_expected_outputs() -> None:
    sentences = [*KNOWN][:2]
    offline = serve_load.Offline(sentences, ["--max-tokens", "30"])
    speed, rate = offline.run()
    assert offline.texts == [KNOWN[sentence] for sentence in sentences]
    assert 0 < rate < speed
    offline.texts = [*reversed(offline.texts)]
    with pytest.raises(SystemExit, match="other outputs than before"):
        offline.run()
