"""The application under any ASGI server: lifespans, other scopes, no thread of ours."""

import asyncio
from typing import Any

from speculative_t5.generation import GenerationOptions
from speculative_t5.serve import Settings, make_app

import httpx
import pytest
from serving import MODEL, FakeService, served_as

pytestmark = pytest.mark.anyio
Message = dict[str, Any]


class Starting(FakeService):
    """A service that counts its starts, and stops at once."""

    starts = 0

    def start(self) -> None:
        super().start()
        self.starts += 1
        self.held.set()


def app_of(service: FakeService, *, waits: bool = False) -> Any:
    return make_app(served_as(MODEL, service), Settings(GenerationOptions()), waits=waits)


async def test_a_lifespan_starts_and_stops_the_models() -> None:
    service = Starting()
    app = app_of(service)
    asked: asyncio.Queue[Message] = asyncio.Queue()
    said: asyncio.Queue[Message] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    running = asyncio.create_task(app(scope, asked.get, said.put))
    await asked.put({"type": "lifespan.startup"})
    assert await said.get() == {"type": "lifespan.startup.complete"}
    assert service.starts == 1
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost"
    ) as client:
        done = await client.post("/v1/completions/", json={"prompt": "one two"})
        assert done.status_code == 200 and done.json()["choices"][0]["text"] == "ONE TWO"
    await asked.put({"type": "lifespan.shutdown"})
    assert await said.get() == {"type": "lifespan.shutdown.complete"}
    await running
    assert service.stopped == [10.0]


async def test_a_lifespan_waits_for_the_model_if_it_is_to() -> None:
    service = Starting(state="loading")
    app = app_of(service)
    async with app.router.lifespan_context(app):
        assert service.starts == 1, "and requests get 503"
    service = Starting(state="loading")
    app = app_of(service, waits=True)
    entered = asyncio.Event()

    async def enter() -> None:
        async with app.router.lifespan_context(app):
            entered.set()

    entering = asyncio.create_task(enter())
    await asyncio.sleep(0.1)
    assert service.starts == 1 and not entered.is_set()
    service.state = "ready"
    await entering
    assert entered.is_set()


async def test_a_lifespan_fails_with_the_reason_why_there_is_no_model() -> None:
    service = Starting(state="failed", failure=ValueError("there is no such folder: give another"))
    with pytest.raises(ValueError, match="no such folder"):
        async with app_of(service, waits=True).router.lifespan_context(None):
            raise AssertionError("there is no model")


async def test_a_websocket_is_closed() -> None:
    said: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        said.append(message)

    scope = {"type": "websocket", "path": "/v1/completions", "headers": [], "query_string": b""}
    await app_of(Starting())(scope | {"subprotocols": []}, receive, send)
    assert [message["type"] for message in said] == ["websocket.close"]


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
async def test_keys_and_sites_are_for_requests_alone(kind: str) -> None:
    settings = Settings(
        GenerationOptions(), api_keys=["secret"], cors_origins=["https://a.example"]
    )
    app = make_app(served_as(MODEL, Starting()), settings)
    said: list[Message] = []
    events = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> Message:
        return events.pop(0) if kind == "lifespan" else {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        said.append(message)

    scope = {"type": kind, "path": "/", "headers": [], "query_string": b"", "state": {}}
    await app(scope, receive, send)
    assert said[0]["type"] in ("lifespan.startup.complete", "websocket.close")


async def test_an_application_may_be_mounted_below_a_path() -> None:
    """As a proxy says by root_path: guards, errors and public paths see what is below it."""
    settings = Settings(GenerationOptions(), api_keys=["secret"], local=False)
    app = make_app(served_as(MODEL, Starting()), settings)
    transport = httpx.ASGITransport(app, root_path="/t5")
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        for path, status in [
            ("/t5/health", 200),
            ("/t5/", 200),
            ("/t5//v2/languages/", 200),
            ("/t5/v1/models", 401),
            ("/t5/nothing", 401),
        ]:
            assert (await client.get(path)).status_code == status, path
        client.headers["Authorization"] = "Bearer secret"
        assert (await client.get("/t5/v1/models")).status_code == 200
        message = (await client.get("/t5/nothing")).json()["error"]["message"]
        assert "/nothing is not a route" in message.replace("'", "")
        metrics = (await client.get("/t5/metrics")).text
        assert 'endpoint="/health"' in metrics and 'endpoint="/"' in metrics
        client.headers.update({"sec-fetch-site": "cross-site", "origin": "https://a.example"})
        refused = await client.get("/t5/v2/check", params={"text": "a", "language": "en"})
        assert refused.status_code == 403
