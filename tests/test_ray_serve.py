"""`serve_app`: what its replicas run and report, and Ray Serve itself on this machine."""

import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.ray import serving

import httpx
import pytest
from conftest import REPOSITORY
from serving import PATIENCE, FakeService

pytestmark = pytest.mark.cpu  # outputs of replicas are compared with those of this process
WORDS = ["old", "man", "The", "sea", "and", "was", "fish"]
PROMPTS = [" ".join(WORDS[(i * j) % 7] for j in range(1, 2 + i % 9)) for i in range(64)]


def replica_of(*models: str, **options: Any) -> Any:
    return serving.Replica(models[0], serving.ServingOptions(draft=models[1], **options))


@pytest.fixture
def models(place: Path) -> tuple[str, str]:
    return str(place / "weights" / "target"), str(place / "weights" / "draft")


@pytest.mark.anyio
async def test_a_replica_answers_as_the_server_does(models: Any) -> None:
    options = {"num_draft": 5, "max_tokens": 12, "api_keys": ["secret"], "batch_size": 3}
    replica = replica_of(*models, **options)
    app = replica.__serve_build_asgi_app__()
    assert replica.record_autoscaling_stats() == {"load": 0.0}
    async with app.router.lifespan_context(app):
        replica.check_health()
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://any.host")
        async with client:
            body = {"prompt": PROMPTS[:4]}
            assert (await client.post("/v1/completions", json=body)).status_code == 401
            client.headers["Authorization"] = "Bearer secret"
            done = await client.post("/v1/completions", json=body)
            listed = await client.get("/v1/models")
    decoder = SpeculativeDecoder.from_pretrained(*models, num_draft=5)
    expected = [decoder.generate(prompt, max_tokens=12).text for prompt in PROMPTS[:4]]
    assert [choice["text"] for choice in done.json()["choices"]] == expected
    assert listed.json()["data"][0]["id"] == "target"


def test_replicas_are_as_many_as_have_rows_for_all_outputs(models: Any) -> None:
    replica = replica_of(*models, batch_size=4, max_replicas=3)
    service = FakeService(now={"queued": 5, "rows": 4})
    replica._models.first.service = service
    assert replica.record_autoscaling_stats() == {"load": 9 / 4}
    service.now["jobs"] = 8  # of embeddings
    assert replica.record_autoscaling_stats() == {"load": 9 / 4 + 2}
    loads = [{}, {"a": 0.0}, {"a": 9 / 4}, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 0.1}]
    found = [
        serving.replicas_for_load(SimpleNamespace(aggregated_metrics={"load": each}))
        for each in loads
    ]
    assert found == [(0, {}), (0, {}), (3, {}), (2, {}), (2, {})]
    assert serving.replicas_for_load(SimpleNamespace(aggregated_metrics={})) == (0, {})


@pytest.mark.anyio
async def test_a_replica_whose_model_fails_is_not_healthy(tmp_path: Path) -> None:
    replica = replica_of(str(tmp_path / "nothing"), None)
    app = replica.__serve_build_asgi_app__()
    with pytest.raises(ValueError, match="nothing"):
        async with app.router.lifespan_context(app):
            raise AssertionError("there is no such model")
    with pytest.raises(ValueError, match="nothing"):
        replica.check_health()


@pytest.mark.skipif(find_spec("grpc") is None, reason="Ray Serve is not installed")
@pytest.mark.filterwarnings("ignore")  # of what Ray imports
def test_options_are_checked_at_once_and_go_to_replicas(models: Any) -> None:
    for options, said in [
        ({"temperature": -1.0}, "temperature"),
        ({"num_beams": 2}, "num_beams is 2, which needs finished outputs"),
        ({"max_queue": 0}, "max_queue must be an integer of at least 1, got 0"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas must be at least min_replicas"),
        ({"batch_size": 2, "steady": True}, "steady decodes one prompt at a time"),
        ({"group": object()}, "group splits a model"),
        ({"api_keys": "secret"}, "api_keys must be a list of texts"),
        ({"api_keys": [""]}, "api_keys must be a list of texts"),
        ({"api_keys": [None]}, "api_keys must be a list of texts"),
        ({"api_keys": ["a b"]}, "api_keys must be a list of texts"),
        ({"cors_origins": ["foo"]}, "--cors-origin must be"),
        ({"cors_origins": "*"}, "cors_origins must be a list of sites"),
        ({"name": 5}, "name must be text, got 5"),
        ({"autoscaling": {"upscale_delay_s": 1}}, "autoscaling needs max_replicas above"),
        ({"autoscaling": {"delay": 1}, "max_replicas": 2}, "autoscaling has 'delay'"),
    ]:
        with pytest.raises(ValueError, match=said):
            serving.serve_app(models[0], **options)
    with pytest.raises(TypeError, match="max_replica': write max_replicas"):
        serving.serve_app(models[0], max_replica=2)
    options = serving.ServingOptions(draft=None, dtype="float32", stop=["x"], api_keys=["k"])
    assert pickle.loads(pickle.dumps(options)) == options


def test_without_ray_serve_one_line_says_what_to_install(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(ValueError, match=r"pip install 'speculative-t5\[ray\]'"):
        serving.serve_app(models[0])


@pytest.fixture
def ray_app(models: tuple[str, str]) -> Iterator[tuple[httpx.Client, Callable[[], int]]]:
    """Ray Serve with one replica of four rows, or two under load: a client, and their number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, REPOSITORY / "tests" / "ray_app.py", *models, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        text=True,
    )

    def said() -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()
        return line.strip()

    def replicas() -> int:
        print(file=process.stdin, flush=True)
        return int(said())

    try:
        assert said() == "ready"
        headers = {"Authorization": "Bearer secret"}
        address = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=address, headers=headers, timeout=PATIENCE) as client:
            yield client, replicas
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
    finally:
        process.kill()


@pytest.mark.skipif(
    find_spec("ray") is None or find_spec("grpc") is None, reason="Ray Serve is not installed"
)
def test_ray_serve_answers_many_clients_streams_and_starts_replicas(
    ray_app: tuple[httpx.Client, Callable[[], int]], models: tuple[str, str]
) -> None:
    client, replicas = ray_app
    decoder = SpeculativeDecoder.from_pretrained(*models, num_draft=5)
    expected = [decoder.generate(prompt, max_tokens=12).text for prompt in PROMPTS]
    assert len({*expected}) > 7

    def ask(number: int) -> str:
        body = {"prompt": PROMPTS[number], "model": "tiny", "stream": number % 2 == 1}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if number % 2 == 0:
            return answer.json()["choices"][0]["text"]
        *events, done = (line[6:] for line in answer.text.splitlines() if line)
        assert done == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    with ThreadPoolExecutor(16) as clients:
        assert [*clients.map(ask, range(64))] == expected
    assert client.post("/v1/completions", json={"prompt": ""}).status_code == 400
    assert client.get("/", headers={"Authorization": ""}).status_code == 200
    assert client.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401

    # Each event of a stream comes as soon as it is there.
    body = {"prompt": PROMPTS[8], "stream": True, "min_tokens": 300, "max_tokens": 300}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        parts = [part for part in answer.iter_raw() if part]
    assert len(parts) > 5

    long = {"min_tokens": 200, "max_tokens": 200}
    until = time.monotonic() + PATIENCE
    with ThreadPoolExecutor(16) as clients:
        while replicas() < 2:
            assert time.monotonic() < until, "outputs wait, and there is one replica"
            bodies = [{"prompt": prompt} | long for prompt in PROMPTS[:32]]
            answers = clients.map(lambda body: client.post("/v1/completions", json=body), bodies)
            assert {answer.status_code for answer in answers} == {200}
