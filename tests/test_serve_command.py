"""The command `serve` with the shipped pair: what clients get, and how it ends."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from speculative_t5.cli.options import DecoderOptions
from speculative_t5.generation import SpeculativeDecoder
from speculative_t5.serve import bind

import httpx
import openai
import pytest
from commands import Call, caller, start
from conftest import REPOSITORY
from messages import check_message
from serving import KEY, PATIENCE, Running, figures, started, wait_until

PROMPTS = (REPOSITORY / "tests" / "sentences.txt").read_text(encoding="utf-8").splitlines()[:8]
SMALL = REPOSITORY / "weights" / "correct-small"
ENDLESS = {"max_tokens": 10**6, "min_tokens": 10**6}
ALLOWED = ("--max-tokens", "1000000")  # else it is too many for a request
LASTING = {"max_tokens": 60, "min_tokens": 60}
FOREVER = "600"  # seconds that no test takes

# Runs a command in which something happens as soon as a file of that name is opened once more.
AT_OPEN = """
import os, shutil, signal, sys, threading
name, left = sys.argv[1], int(sys.argv[2])
def audit(event, arguments):
    global left
    if event == "open" and str(arguments[0]).endswith(name):
        left -= 1
        if left == 0:
            {action}
from speculative_t5.cli import main
sys.addaudithook(audit)
sys.argv = ["__main__.py", *sys.argv[3:]]
main()
"""


# Loading never ends, and would be waited for as long. The port is printed nevertheless.
COMPUTES_FOR_EVER = """
import mlx.core as mx
def compute(self):
    while True:
        mx.eval(mx.random.normal((2000, 2000)) @ mx.ones((2000, 2000)))
start = service.Service._serve
def serve_all(self):
    service.Batch.round = compute  # the warm-up is over
    start(self)
service.Service._serve = serve_all
"""
LOADS_FOR_EVER = f"""
def bind(host, port, real=serve.bind):
    listening = real(host, port)
    print(f":{{listening.getsockname()[1]}}", flush=True)
    return listening
serve.bind, service.GRACE = bind, {FOREVER}
command.DecoderOptions.load = lambda self, **_: threading.Event().wait()
"""

# Once the server is ready, each round fails, also those of the warm-up.
LOSES_ITS_DEVICE = """
def announce(*given, real=command.announce):
    def fail(batch):
        raise ValueError("the device is lost")
    service.Batch.round = fail
    real(*given)
command.announce = announce
"""


def run_with(folder: Path, action: str, name: str, count: int, *arguments: str) -> tuple[int, str]:
    """Run `serve`; return its exit code and standard error. It must end by itself."""
    command = [sys.executable, "-c", AT_OPEN.format(action=action), name, str(count), "serve"]
    done = subprocess.run(
        [*command, "--port", "0", *arguments], cwd=folder, capture_output=True, text=True,
        check=False, timeout=2 * PATIENCE,
    )  # fmt: skip
    assert done.stdout == ""
    return done.returncode, done.stderr


def one_line(errors: str) -> str:
    """Check that there is one error of one line, and return it."""
    (line,) = errors.splitlines()
    check_message(line.removeprefix("error: "))
    assert line.startswith("error: ")
    return line


class Streams:
    """Streams of a server, each read to its end in a thread of its own."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._client = server.client()
        self._pool = ThreadPoolExecutor(32)
        self._accepted = threading.Semaphore(0)

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error:  # a stream may have no end
            self._server.process.kill()
        self._pool.shutdown()
        self._client.close()

    def ask(self, **fields: Any) -> Future[list[Any]]:
        """Ask for a stream; return the events that it will have had at its end."""
        return self._pool.submit(self._read, fields)

    def post(self, **fields: Any) -> Future[httpx.Response]:
        """Ask for a whole response."""
        return self._pool.submit(self._client.post, "/v1/completions", json=fields)

    def wait_until_accepted(self, count: int) -> None:
        """Wait until that many more streams have begun."""
        for _ in range(count):
            assert self._accepted.acquire(timeout=PATIENCE)

    def _read(self, fields: dict[str, Any]) -> list[Any]:
        asked = {"stream": True, **fields}
        with self._client.stream("POST", "/v1/completions", json=asked) as response:
            assert response.status_code == 200
            self._accepted.release()
            parts = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        assert parts.pop() == "[DONE]"
        return [json.loads(part) for part in parts]


def text_of(events: list[Any]) -> str:
    """Return the text of a stream of one output, which must have come to its end."""
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] in ("stop", "length")
    return "".join(choice["text"] for choice in choices)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "keys").write_text(f"# for tests\n{KEY}\n")
    options = ("--api-key-file", "keys", "--batch-size", "4", "--max-queue", "40", *ALLOWED)
    server = Running(folder, *options)
    try:
        yield server
    finally:
        assert server.end(signal.SIGINT) == (0, [])


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    """What the command line decodes with."""
    return DecoderOptions().load()


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Call:
    return caller(tmp_path, monkeypatch, capfd)


def test_a_list_of_prompts_is_a_batch(running: Running, decoder: SpeculativeDecoder) -> None:
    assert running.line.startswith("serving correct-base at http://127.0.0.1:")
    options: Any = {"temperature": 1.0, "seed": 5, "max_tokens": 30}
    with running.client() as client:
        for chosen, samples in (({"max_tokens": 256}, 1), (options, 1), (options, 3)):
            fields = {"prompt": PROMPTS, "n": samples} | chosen
            found = client.post("/v1/completions", json=fields).json()
            done = decoder.generate_batch(PROMPTS, num_return_sequences=samples, **chosen)
            expected = [each for first in done for each in (first, *first.alternatives)]
            assert [each["text"] for each in found["choices"]] == [e.text for e in expected]
            emitted = sum(each.stats.emitted for each in expected)
            assert found["usage"]["completion_tokens"] == emitted


def test_a_request_gets_the_same_alone_and_among_others(
    running: Running, decoder: SpeculativeDecoder
) -> None:
    wanted: list[dict[str, Any]] = [
        {"max_tokens": 40},
        {"temperature": 0.8, "seed": 1, "max_tokens": 50},
        {"temperature": 1.5, "seed": 2, "top_k": 5, "max_tokens": 30},
        {"temperature": 1.0, "seed": 3, "top_p": 0.5, "max_tokens": 50, "stop": [" the"]},
        {"speculative": False, "max_tokens": 50},
        {"repetition_penalty": 1.3, "logit_bias": {"5": -2.0}, "max_tokens": 50},
    ]
    protocol = ("max_tokens", "temperature", "seed", "top_p", "stop", "logit_bias")

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        options = wanted[number % len(wanted)]
        own: Any = {name: value for name, value in options.items() if name in protocol}
        extra = {name: value for name, value in options.items() if name not in protocol}
        prompt = PROMPTS[number % len(PROMPTS)]
        if number % 2:
            stream = await client.completions.create(
                model="correct-base", prompt=prompt, stream=True, extra_body=extra, **own
            )
            return "".join([part.choices[0].text async for part in stream])
        done = await client.completions.create(
            model="correct-base", prompt=prompt, extra_body=extra, **own
        )
        return done.choices[0].text

    async def all_at_once() -> list[str]:
        base = f"{running.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=KEY, timeout=PATIENCE) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(24)))

    for number, text in enumerate(asyncio.run(all_at_once())):
        options = dict(wanted[number % len(wanted)])
        if "logit_bias" in options:
            options["logit_bias"] = {int(i): bias for i, bias in options["logit_bias"].items()}
        assert text == decoder.generate(PROMPTS[number % len(PROMPTS)], **options).text, number


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--port", "65536"], "--port must be"),
        (["--host", "no host"], "--host must be"),
        (["--max-queue", "0"], "--max-queue must be"),
        (["--batch-size", "0"], "batch_size must be"),
        (["--batch-size", "2", "--steady"], "steady decodes one prompt at a time"),
        (["--shutdown-seconds", "-1"], "--shutdown-seconds must be"),
        (["--shutdown-seconds", "nan"], "--shutdown-seconds must be"),
        (["--api-key-file", "absent"], "absent: No such file"),
        (["--api-key-file", "empty"], "empty has no API key"),
        (["--cors-origin", "example.org"], "--cors-origin must be"),
        (["--num-beams", "2"], "a server has no beam search"),
        (["--scores"], "a server gives no scores"),
        (["--temperature", "-1"], "temperature must be"),
    ],
)
def test_wrong_options_are_one_line(
    call: Call, tmp_path: Path, arguments: list[str], text: str
) -> None:
    (tmp_path / "empty").touch()
    done = call("serve", "--port", "0", *arguments)
    assert done.code == 2 and len(done.err) == 1 and text in done.err[0]
    check_message(done.err[0].removeprefix("error: "))


def test_a_port_in_use_is_one_line(call: Call) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        done = call("serve", "--port", port)
    assert done.code == 2 and len(done.err) == 1
    assert f"port {port} of 127.0.0.1 is used by another program" in done.err[0]


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    process = start(tmp_path, "serve", "--port", "0", "--model", "absent/model")
    _, errors = process.communicate(timeout=PATIENCE)
    (line,) = errors.decode().splitlines()
    assert process.returncode == 2 and line.startswith("error: ") and "absent/model" in line


def test_without_its_packages_it_says_what_to_install() -> None:
    code = (
        "import sys\n"
        "sys.modules['uvicorn'] = None\n"
        "from speculative_t5.cli import main\n"
        "assert not {'starlette', 'prometheus_client'}.intersection(sys.modules)\n"
        "sys.argv = ['__main__.py', 'serve']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith("run pip install 'speculative-t5[serve]'")
    assert len(done.stderr.splitlines()) == 1


def test_a_model_that_vanishes_is_served_all_the_same(tmp_path: Path) -> None:
    """Nothing is read from its folder once the server is ready."""
    model, draft = tmp_path / "model", tmp_path / "draft"
    for folder in (model, draft):
        shutil.copytree(SMALL, folder)
    expected = DecoderOptions(model=str(model), draft_model=str(draft)).load()
    wanted: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3, "top_k": 20},
        {"speculative": False, "stop": [" the"]},
        {"bad_words": ["was"], "forced_tokens": "It", "repetition_penalty": 1.2},
    ]
    with started(tmp_path, "--model", str(model), "--draft-model", str(draft)) as server:
        shutil.rmtree(model)
        shutil.rmtree(draft)
        assert server.line.startswith("serving model at http://")
        with server.client() as client:
            for options in wanted:
                for prompt in PROMPTS[:3]:
                    fields = {"model": "model", "prompt": prompt, "max_tokens": 40, **options}
                    (choice,) = client.post("/v1/completions", json=fields).json()["choices"]
                    output = expected.generate(prompt, max_tokens=40, **options)
                    assert choice["text"] == output.text, (options, prompt)
            assert client.get("/").status_code == client.get("/health").status_code == 200
        assert server.end() == (0, [])


@pytest.mark.parametrize(
    ("name", "count"),
    [("config.json", 1), ("spiece.model", 1), ("weights.npz", 2)],
)
def test_a_model_that_vanishes_while_it_is_loaded_is_one_line(
    tmp_path: Path, name: str, count: int
) -> None:
    shutil.copytree(SMALL, tmp_path / "model")
    code, errors = run_with(
        tmp_path, "shutil.rmtree('model')", f"model/{name}", count,
        "--model", "model", "--regular-decode",
    )  # fmt: skip
    assert code == 2 and name in one_line(errors)
    assert not (tmp_path / "model").exists()


HANG = "sys.modules['speculative_t5.serve.service'].GRACE = 0.0; threading.Event().wait()"


@pytest.mark.parametrize("then", ["pass", HANG], ids=["ends", "hangs"])
def test_a_server_that_is_stopped_while_it_loads_does_not_serve(tmp_path: Path, then: str) -> None:
    action = f"os.kill(os.getpid(), signal.SIGTERM); {then}"
    assert run_with(tmp_path, action, "weights.npz", 1, "--shutdown-seconds", FOREVER) == (0, "")


def test_sigterm_under_load_lets_streams_end(tmp_path: Path, decoder: SpeculativeDecoder) -> None:
    options = ("--batch-size", "4", "--shutdown-seconds", FOREVER)
    with started(tmp_path, *options) as server, server.client() as client:
        with Streams(server) as streams:
            found = [streams.ask(prompt=prompt, **LASTING) for prompt in PROMPTS]
            streams.wait_until_accepted(len(PROMPTS))
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: is_stopping(client))
            check_refused(client)
            texts = [text_of(each.result()) for each in found]
        assert texts == [each.text for each in decoder.generate_batch(PROMPTS, **LASTING)]
        assert server.end(None) == (0, [])


def is_stopping(client: httpx.Client) -> bool:
    try:
        return client.get("/health").json() == {"status": "stopping"}
    except httpx.TransportError:  # nobody listens any more
        return True


def check_refused(client: httpx.Client) -> None:
    """Check that a new request is refused."""
    try:
        response = client.post("/v1/completions", json={"prompt": "a"})
    except httpx.TransportError:  # all outputs have ended in the meantime
        return
    assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
    check_message(response.json()["error"]["message"])


def test_sigterm_without_time_tells_every_client(tmp_path: Path) -> None:
    options = ("--host", "0.0.0.0", "--batch-size", "4", "--shutdown-seconds", "0", *ALLOWED)
    with started(tmp_path, *options) as server, server.client() as client:
        with Streams(server) as streams:
            found = [streams.ask(prompt=prompt, **ENDLESS) for prompt in PROMPTS]
            whole = streams.post(prompt=PROMPTS[0], **ENDLESS)
            wait_until(lambda: figures(client)["rows"] == 4)
            wait_until(lambda: figures(client)["queued"] == len(PROMPTS) - 3)
            server.process.send_signal(signal.SIGTERM)
            for events in (each.result() for each in found):
                *parts, last = events
                check_message(last["error"]["message"])
                assert all(part["choices"][0]["finish_reason"] is None for part in parts)
            assert whole.result().status_code == 503
        code, (warning,) = server.end(None)
        assert code == 0 and "anybody who reaches 0.0.0.0" in warning


def signal_twice(server: Running, number: signal.Signals) -> None:
    """Send a signal, and once the server is stopping, send it again."""
    server.process.send_signal(number)
    with server.client() as client:
        wait_until(lambda: client.get("/health").json() == {"status": "stopping"})
    server.process.send_signal(number)


def test_a_second_signal_ends_streams_at_once(tmp_path: Path) -> None:
    options = ("--shutdown-seconds", FOREVER, *ALLOWED)
    with started(tmp_path, *options) as server, server.client() as client:
        fields = {"prompt": PROMPTS[0], "stream": True, **ENDLESS}
        with client.stream("POST", "/v1/completions", json=fields) as response:
            parts = response.iter_lines()
            assert "choices" in next(parts)
            signal_twice(server, signal.SIGTERM)
            assert server.end(None) == (0, [])


def test_a_second_signal_does_not_wait_for_loading(tmp_path: Path) -> None:
    with (
        started(tmp_path, "--shutdown-seconds", FOREVER, change=LOADS_FOR_EVER) as server,
        server.client() as client,
    ):
        for status in ("loading", "stopping"):
            wait_until(lambda status=status: client.get("/health").json() == {"status": status})  # type: ignore[misc]
            server.process.send_signal(signal.SIGINT)
        assert server.end(None) == (0, [])


def test_a_second_signal_does_not_wait_for_a_pass_that_hangs(tmp_path: Path) -> None:
    """Python must not be torn down below the thread, which MLX would answer by aborting."""
    with started(tmp_path, "--shutdown-seconds", FOREVER, change=COMPUTES_FOR_EVER) as server:
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}),
        ):
            signal_twice(server, signal.SIGINT)
        assert server.end(None) == (0, [])


def test_a_server_that_cannot_decode_any_more_ends(tmp_path: Path) -> None:
    """A service manager then starts it again."""
    with (
        started(tmp_path, "--shutdown-seconds", FOREVER, change=LOSES_ITS_DEVICE) as server,
        server.client() as client,
    ):
        response = client.post("/v1/completions", json={"prompt": PROMPTS[0]})
        assert response.status_code == 500
        check_message(response.json()["error"]["message"])
        code, (*log, last) = server.end(None)
        assert code == 1
        assert "the device is lost" in last and last.startswith("error: ")
        check_message(last.removeprefix("error: "))
        assert log[0] == "ERROR: a round has failed"
        assert "ERROR: the decoding thread has ended" in log


def test_those_who_were_accepted_get_theirs_when_the_queue_is_full(
    tmp_path: Path, decoder: SpeculativeDecoder
) -> None:
    options = ("--batch-size", "2", "--max-queue", "4", *ALLOWED)
    expected = [each.text for each in decoder.generate_batch(PROMPTS, max_tokens=40)]
    with started(tmp_path, *options) as server, server.client() as client:
        with Streams(server) as streams, ExitStack() as leaving:
            for _ in range(2):
                fields = {"prompt": PROMPTS[0], "stream": True, **ENDLESS}
                leaving.enter_context(client.stream("POST", "/v1/completions", json=fields))
            wait_until(lambda: figures(client)["rows"] == 2)
            waiting = [streams.ask(prompt=prompt, max_tokens=40) for prompt in PROMPTS[:4]]
            wait_until(lambda: figures(client)["queued"] == 4)
            for stream in (True, False) * 5:
                fields = {"prompt": PROMPTS[4], "stream": stream}
                response = client.post("/v1/completions", json=fields)
                assert response.status_code == 429
                assert 1 <= int(response.headers["retry-after"]) <= 60
                error = response.json()["error"]
                assert error["code"] == "queue_full"
                check_message(error["message"], "4 outputs")
            assert figures(client)["queued"] == 4
            leaving.close()
            assert [text_of(each.result()) for each in waiting] == expected[:4]
            later = [streams.ask(prompt=prompt, max_tokens=40) for prompt in PROMPTS[4:]]
            assert [text_of(each.result()) for each in later] == expected[4:]
        assert server.end() == (0, [])
