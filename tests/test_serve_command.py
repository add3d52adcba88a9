"""The command `serve` with the shipped pair, as clients use it, and how it ends."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
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
from serving import KEY, PATIENCE, Running, figures, wait_until

PROMPTS = (REPOSITORY / "tests" / "sentences.txt").read_text(encoding="utf-8").splitlines()[:8]
LONG = {"max_tokens": 3000, "min_tokens": 3000}  # an output that takes a while


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "keys").write_text(f"# for tests\n{KEY}\n")
    server = Running(folder, "--api-key-file", "keys", "--batch-size", "4", "--max-queue", "40")
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
        for chosen in ({}, options):
            found = client.post("/v1/completions", json={"prompt": PROMPTS} | chosen).json()
            expected = decoder.generate_batch(PROMPTS, **chosen)
            assert [each["text"] for each in found["choices"]] == [e.text for e in expected]
            emitted = sum(each.stats.emitted for each in expected)
            assert found["usage"]["completion_tokens"] == emitted


def test_a_request_gets_the_same_alone_and_among_others(
    running: Running, decoder: SpeculativeDecoder
) -> None:
    wanted: list[dict[str, Any]] = [
        {"max_tokens": 40},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.5, "seed": 2, "top_k": 5, "max_tokens": 30},
        {"temperature": 1.0, "seed": 3, "top_p": 0.5, "stop": [" the"]},
        {"speculative": False},
        {"repetition_penalty": 1.3, "logit_bias": {"5": -2.0}},
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


def test_samples_of_a_prompt_are_those_of_the_command_line(
    running: Running, decoder: SpeculativeDecoder
) -> None:
    options: Any = {"temperature": 1.0, "seed": 7}
    done = decoder.generate(PROMPTS[0], num_return_sequences=3, **options)
    with running.client() as client:
        fields = {"prompt": PROMPTS[0], "n": 3, **options}
        found = client.post("/v1/completions", json=fields).json()["choices"]
    assert [each["text"] for each in found] == [e.text for e in (done, *done.alternatives)]


def test_a_prompt_that_is_wrong_is_said_to_be(running: Running) -> None:
    wrong = {
        "the prompt is empty": {"prompt": " "},
        "prompt ids must be from 0 to": {"prompt": [10**6]},
        "the prompt has": {"prompt": "too long " * 2000},
        "logit_bias has the id 999999, and the model has ids below": {
            "prompt": "a",
            "logit_bias": {"999999": 1},
        },
        "outputs, and the queue holds 40": {"prompt": ["a"] * 41},
    }
    with running.client() as client:
        for text, fields in wrong.items():
            response = client.post("/v1/completions", json=fields)
            assert response.status_code == 400 and text in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_row(running: Running, stream: bool) -> None:
    fields = {"prompt": PROMPTS[0], "stream": stream, **LONG}
    head = {"Host": "localhost", "Authorization": f"Bearer {KEY}"}
    request = httpx.Request("POST", running.url + "/v1/completions", headers=head, json=fields)
    lines = [b"POST /v1/completions HTTP/1.1", *(b": ".join(each) for each in request.headers.raw)]
    with running.client() as client:
        before = figures(client)["emitted_total"]
        with socket.create_connection(("127.0.0.1", running.port), PATIENCE) as leaving:
            leaving.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + request.read())
            wait_until(lambda: figures(client)["rows"] == 1)
        wait_until(lambda: figures(client)["rows"] == 0)
        assert figures(client)["emitted_total"] - before < LONG["max_tokens"]
        assert client.get("/health").json() == {"status": "ready"}


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
