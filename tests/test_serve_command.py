"""The command `serve` with the shipped pair: what clients get, and how it ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from speculative_t5.cli import serve as command
from speculative_t5.cli.options import DecoderOptions
from speculative_t5.decoding import Batch
from speculative_t5.generation import GenerationOptions, SpeculativeDecoder
from speculative_t5.serve import Service, Settings, bind, service

import httpx
import pytest
from commands import Call, Done
from conftest import REPOSITORY
from messages import check_message
from serving import PATIENCE, Served, is_there, serving, started, wait_until

PROMPTS = (REPOSITORY / "tests" / "sentences.txt").read_text(encoding="utf-8").splitlines()[:8]
SMALL = REPOSITORY / "weights" / "correct-small"
ENDLESS = {"max_tokens": 10**6, "min_tokens": 10**6}
LASTING = {"max_tokens": 60, "min_tokens": 60}
FOREVER = 600.0  # seconds that no test takes
Serve = Callable[..., AbstractContextManager[Served]]

# From the first request on, a pass has no end.
COMPUTES_FOR_EVER = """
import mlx.core as mx
def compute(self):
    while True:
        mx.eval(mx.random.normal((2000, 2000)) @ mx.ones((2000, 2000)))
start = service.Service._serve
def serve_all(self, batch):
    service.Batch.round = compute  # the warm-up is over
    start(self, batch)
service.Service._serve = serve_all
"""


def text_of(events: list[str]) -> str:
    """Return the text of a stream of one output, which must have come to its end."""
    *parts, done = events
    choices = [choice for part in parts for choice in json.loads(part)["choices"]]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] in ("stop", "length") and done == "[DONE]"
    return "".join(choice["text"] for choice in choices)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    """What the command line decodes with."""
    return DecoderOptions().load()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def lasting(decoder: SpeculativeDecoder) -> Serve:
    """A function that serves a service with four rows for requests of any length."""
    defaults = GenerationOptions(max_tokens=10**6)  # else it is too many for a request

    @contextmanager
    def served(seconds: float, load: Any = None) -> Iterator[Served]:
        loaded = Service(load or (lambda: decoder), batch_size=4)
        with serving(loaded, seconds, defaults=defaults) as running:
            wait_until(lambda: load or loaded.state == "ready")
            yield running

    return served


def test_wrong_options_are_one_line(call: Call, here: Path) -> None:
    (here / "empty").touch()
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        in_use = f"port {port} of 127.0.0.1 is used by another program"
        call("serve", "--port", port).check_error(in_use)
    for arguments, text in {
        "--port 65536": "--port must be",
        "--host [": "--host must be",
        "--max-queue 0": "--max-queue must be",
        "--batch-size 0": "--batch-size must be",
        "--batch-size 2 --steady": "steady decodes one prompt at a time",
        "--shutdown-seconds -1": "--shutdown-seconds must be",
        "--shutdown-seconds nan": "--shutdown-seconds must be",
        "--sentence-cache -1": "--sentence-cache must be between 0 and 1,000,000, got -1.0",
        "--api-key-file absent": "absent: No such file",
        "--api-key-file empty": "empty has no API key",
        "--cors-origin example.org": "--cors-origin must be",
        "--num-beams 2": "--num-beams is 2, which needs finished outputs",
        "--scores": "scores is True, which needs finished outputs",
        "--temperature -1": "temperature must be",
    }.items():
        call("serve", "--port", "0", *arguments.split()).check_error(text)


def test_a_model_that_is_not_there_is_one_line(
    call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    call("serve", "--port", "0", "--model", "absent/model").check_error("absent/model")
    assert not caplog.records


def test_without_its_packages_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None; sys.argv = ['__main__.py', 'serve']; "
        "from speculative_t5.cli import main; assert 'starlette' not in sys.modules; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.endswith("run pip install 'speculative-t5[serve]'")


def run_and_ask(
    call: Call, monkeypatch: pytest.MonkeyPatch, ask: Callable[[httpx.Client], None], *options: str
) -> Done:
    """Run the command, ask the server in another thread once it is ready, and stop it."""
    asked: list[Future[None]] = []

    def announce(
        settings: Settings, names: Any, host: str, port: int, real: Any = command.announce_server
    ) -> None:
        real(settings, names, host, port)
        asked.append(pool.submit(ask_and_stop, port))

    def ask_and_stop(port: int) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            try:
                ask(client)
            finally:
                if is_there(client):
                    os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(command, "announce_server", announce)
    with ThreadPoolExecutor(1) as pool:
        done = call("serve", "--port", "0", *options)
    asked[0].result()
    return done


def test_a_model_that_vanishes_is_served_all_the_same(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read from its folder once the server is ready."""
    model, draft = here / "model", here / "draft"
    for folder in (model, draft):
        shutil.copytree(SMALL, folder)
    expected = DecoderOptions(model=str(model), draft_model=str(draft)).load()
    wanted: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3, "top_k": 20},
        {"speculative": False, "stop": [" the"]},
        {"bad_words": ["was"], "forced_tokens": "It", "repetition_penalty": 1.2},
    ]

    def ask(client: httpx.Client) -> None:
        shutil.rmtree(model)
        shutil.rmtree(draft)
        for options in wanted:
            for prompt in PROMPTS[:2]:
                fields = {"model": "model", "prompt": prompt, "max_tokens": 40, **options}
                (choice,) = client.post("/v1/completions", json=fields).json()["choices"]
                output = expected.generate(prompt, max_tokens=40, **options)
                assert choice["text"] == output.text, (options, prompt)
        assert client.get("/").status_code == client.get("/health").status_code == 200

    paths = ("--model", str(model), "--draft-model", str(draft), "--host", "0.0.0.0")
    done = run_and_ask(call, monkeypatch, ask, *paths)
    assert done.code == 0 and done.out.startswith("serving model at http://0.0.0.0:")
    assert len(done.err) == 1 and "anybody who reaches 0.0.0.0" in done.err[0]


def test_a_server_that_cannot_decode_any_more_ends(
    call: Call, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A service manager then starts it again."""

    def fail(batch: Batch) -> None:
        raise ValueError("the device is lost")

    def ask(client: httpx.Client) -> None:
        monkeypatch.setattr(Batch, "round", fail)
        response = client.post("/v1/completions", json={"prompt": PROMPTS[0]})
        assert response.status_code == 500
        check_message(response.json()["error"]["message"])
        wait_until(lambda: not is_there(client))

    done = run_and_ask(call, monkeypatch, ask, "--model", str(SMALL))
    (line,) = done.err
    assert done.code == 1 and line.startswith("error: ")
    check_message(line.removeprefix("error: "), "the device is lost")
    assert [record.message for record in caplog.records] == [
        "a round has failed",
        "the decoding thread has ended",
    ]


def is_stopping(client: httpx.Client) -> bool:
    try:
        return client.get("/health").json() == {"status": "stopping"}
    except httpx.TransportError:  # nobody listens any more
        return True


def stop(served: Served) -> None:
    """Send the signal, and wait until the server is stopping."""
    served.server.handle_exit(signal.SIGTERM, None)
    wait_until(lambda: is_stopping(served.client))


def test_sigterm_under_load_lets_streams_end(lasting: Serve, decoder: SpeculativeDecoder) -> None:
    with lasting(FOREVER) as served, ThreadPoolExecutor(8) as pool:
        found = [pool.submit(served.events, prompt=prompt, **LASTING) for prompt in PROMPTS]
        total = sum(len(decoder.encode(prompt)) for prompt in PROMPTS)
        wait_until(lambda: served.service.figures()["prompt_tokens"] == total)
        stop(served)
        with suppress(httpx.TransportError):  # all outputs have ended in the meantime
            response = served.post(prompt="a")
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
            check_message(response.json()["error"]["message"])
        texts = [text_of(each.result()) for each in found]
    assert texts == [each.text for each in decoder.generate_batch(PROMPTS, **LASTING)]


def calls(served: Served) -> float:
    """How many calls are queued or in a row of the batch."""
    figures = served.service.figures()
    return figures["queued"] + figures["rows"]


def test_sigterm_without_time_tells_every_client(lasting: Serve) -> None:
    with lasting(0) as served, ThreadPoolExecutor(9) as pool:
        found = [pool.submit(served.events, prompt=prompt, **ENDLESS) for prompt in PROMPTS]
        whole = pool.submit(served.post, prompt=PROMPTS[0], **ENDLESS)
        wait_until(lambda: calls(served) == len(PROMPTS) + 1)
        served.server.handle_exit(signal.SIGTERM, None)
        for *parts, last, done in (each.result() for each in found):
            check_message(json.loads(last)["error"]["message"])
            assert all(json.loads(p)["choices"][0]["finish_reason"] is None for p in parts)
            assert done == "[DONE]"
        assert whole.result().status_code == 503


def test_a_second_signal_ends_streams_at_once(lasting: Serve) -> None:
    with lasting(FOREVER) as served:
        fields = {"prompt": PROMPTS[0], "stream": True, **ENDLESS}
        with served.client.stream("POST", "/v1/completions", json=fields) as response:
            parts = response.iter_lines()
            assert "choices" in next(parts)
            stop(served)
            served.server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: not is_there(served.client))


def test_a_second_signal_does_not_wait_for_loading(
    lasting: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "GRACE_SECONDS", FOREVER)
    loading = threading.Event()
    with lasting(FOREVER, loading.wait) as served:
        try:
            assert served.client.get("/health").json() == {"status": "loading"}
            stop(served)
            served.server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: not is_there(served.client))
        finally:
            loading.set()


def test_a_second_signal_does_not_wait_for_a_pass_that_hangs(tmp_path: Path) -> None:
    """Python must not be torn down below the thread, which MLX would answer by aborting."""
    options = ("--model", str(SMALL), "--shutdown-seconds", "600")
    with started(tmp_path, *options, change=COMPUTES_FOR_EVER) as (process, client):
        fields = {"prompt": "a", "stream": True}
        with client.stream("POST", "/v1/completions", json=fields):
            process.send_signal(signal.SIGINT)
            wait_until(lambda: is_stopping(client))
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (0, b"")
