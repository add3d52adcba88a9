"""What the server refuses, and how: OpenAI's error objects, one clear line in each."""

import gzip
import json
import re
import socket
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from speculative_t5.decoding.logits import NOTHING_LEFT
from speculative_t5.serve import bind, check_origins, read_keys
from speculative_t5.serve.bodies import inflated
from speculative_t5.serve.requests import Refused

import httpx
import pytest
from messages import check_message
from serving import FAIL, FORBIDDEN, PATIENCE, STALL, FakeService, Served, serving

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(FakeService(max_queue=8), max_body=100_000) as running:
        yield running


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """Check that a response is an error object with one line, and return the error."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    assert error["type"] == kinds.get(status, "invalid_request_error")
    assert error["param"] == param, error
    check_message(error["message"])
    assert len(error["message"]) < 500
    return dict(error)


WRONG: dict[str, list[Any]] = {
    "prompt": [
        None,
        "",
        [],
        ["a", ""],
        5,
        {"text": "a"},
        ["a", 1],
        [True],
        [1.5],
        [["a"]],
        [100],
        [10**30],
    ],
    "n": [0, 2],
    "max_tokens": [0, "9", 2.5, True, -2],
    "max_completion_tokens": [0, -2, "-1"],
    "temperature": [-1, "1", [1], 10**400],
    "top_p": [0, 1.5],
    "top_k": [-2, True, 2**31],
    "seed": [-2, -1.0, 2**63],
    "stop": ["", [5], {}, ["b"] * 17, "b" * 501],
    "suppress_tokens": [[5] * 10_001],
    "stop_token_ids": ["5", [True], [{"a": 1}]],
    "logit_bias": [
        {str(i): 1 for i in range(1001)},
        {"x": 1},
        {"-1": 1},
        {"5": "1"},
        {"5": 10**400},
        [[5, 1]],
    ],
    "bad_words": [["b"] * 101, ["b" * 501], [[5] * 501], [[1, "a"]], [5], [[]]],
    "repetition_penalty": [0],
    "no_repeat_ngram_size": [-1],
    "forced_tokens": [5],
    "speculative": [1],
    "speculative_t5": ["yes"],
    "stream": ["yes"],
    "stream_options": [1],
    "model": [5],
    "echo": [True],
    "suffix": ["b"],
    "best_of": [2],
    "presence_penalty": [0.5],
    "frequency_penalty": [-1],
    "logprobs": [-1, 6, True, 1.0, "2"],
    "num_beams": [4],
}


SENTENCES_TOGETHER: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": ["a"] * 9}, None),
    ({"prompt": ["a"] * 5, "n": 2, "temperature": 1}, None),
    ({"prompt": "a", "n": 10**9, "temperature": 1}, None),
    ({"prompt": "a", "best_of": 3, "n": 2, "temperature": 1}, "best_of"),
    ({"prompt": "a"} | {f"own_{i}": 1 for i in range(100)}, None),
    ({"prompt": "a", "temprature": 1}, None),
    ({"prompt": "a", "max_token": 1}, None),
]
CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [USER, {"content": "a"}]}, "messages[1].role"),
    ({"messages": [{"role": "me", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]},
     "messages[0].content"),
    ({"messages": [{"role": "system", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": " "}]}, "messages"),
    ({"messages": [USER], "logprobs": 1}, "logprobs"),
    ({"messages": [USER], "top_logprobs": 3}, "top_logprobs"),
    ({"messages": [USER], "logprobs": True, "top_logprobs": 6}, "top_logprobs"),
    ({"messages": [USER], "tools": [{"type": "function"}]}, "tools"),
    ({"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": [USER], "n": 2}, "n"),
]  # fmt: skip


def test_a_wrong_field_is_named(served: Served) -> None:
    for name, values in WRONG.items():
        for value in values:
            check_error(served.post(**{"prompt": "a", name: value}), 400, name)
    for fields, param in SENTENCES_TOGETHER:
        check_error(served.post(**fields), 400, param)
    for fields, param in CHATS:
        check_error(served.post(CHAT, **fields), 400, param)


def test_a_body_that_is_not_json_is_refused(served: Served) -> None:
    for body in (
        b"",
        b"{",
        b"[1]",
        b"5",
        b"null",
        b'"a"',
        b"{}{}",
        b'{"prompt": "a",}',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"temperature": NaN, "prompt": "a"}',
        b"[" * 16_000,
        b'{"prompt": ' + b"[" * 16_000 + b"]" * 16_000 + b"}",
        b"9" * 9_000,
        b"a=b&c=d",
    ):
        check_error(served.client.post("/v1/completions", content=body), 400)
    content = '{"prompt": "a", "seed": %s}' % ("9" * 5000)
    error = check_error(served.client.post("/v1/completions", content=content), 400)
    assert "5000 digits" in error["message"]


def test_half_of_a_surrogate_pair_is_refused(served: Served) -> None:
    for name in ("prompt", "model", "temperature", "temperatur\ud800"):
        body = json.dumps({"prompt": "a", name: "\ud800"})
        for content in (body, body.replace(r"\ud800", r"\uD800")):
            check_error(served.client.post("/v1/completions", content=content), 400)
    assert served.post(prompt="\U0001f600").json()["choices"][0]["text"] == "\U0001f600"


def test_what_nests_too_deeply_is_refused(served: Served) -> None:
    """Reading and writing JSON end at depths that Python's version and the stack decide."""
    for begin, end in (('{"a":', "}"), ("[", "]")):
        seen = set()
        for depth in (*range(100, 1100, 40), 16_000):
            inner = begin * depth + '"\\ud83d\\ude00"' + end * depth
            content = f'{{"prompt": "a", "own": {inner}}}'
            response = served.client.post("/v1/completions", content=content)
            seen.add(response.status_code)
            if response.status_code != 200:
                assert "nests too deeply" in check_error(response, 400)["message"]
        assert seen == {200, 400}


def test_other_models_paths_and_methods_get_an_error_object(served: Served) -> None:
    error = check_error(served.post(prompt="a", model="gpt-4"), 404, "model")
    assert error["code"] == "model_not_found" and "'gpt-4'" in error["message"]
    for path in ("/v1", "/v1/completion/", "/v1/embedding", "/docs", "/%00", "/../etc/passwd"):
        check_error(served.client.get(path), 404)
    response = served.client.get("/v1/completions")
    assert "use POST" in response.text
    check_error(response, 405)
    assert response.headers["allow"] == "POST"
    check_error(served.client.delete("/v1/models"), 405)
    assert served.client.head("/health").status_code == 200


def test_slashes_too_many_do_no_harm(served: Served) -> None:
    for path in ("//health", "/health/", "///health//"):
        assert served.client.get(f"{served.url}{path}").json() == {"status": "ready"}
    for path in ("/v1//completions", "/v1/completions/"):
        assert served.post(path, prompt="a b").json()["choices"][0]["text"] == "A B"
    assert served.client.get("/v1/models//tiny/").json()["id"] == "tiny"
    with serving(api_keys=["key"]) as guarded:
        assert guarded.client.get(f"{guarded.url}//health").status_code == 200
        check_error(guarded.client.get(f"{guarded.url}//v1/models"), 401)


def test_names_in_messages_are_short(served: Served) -> None:
    """What is not known may be of any length; of it, 60 characters are shown."""
    name = "x" * 5000
    for response in (
        served.post(prompt="a", model=name),
        served.client.get(f"/{name}"),
        served.client.request(name, "/health"),
        served.client.request(name, "/nothing"),
        served.client.get("/health", headers={"Host": name}),
        served.post(prompt="a", top_p=name),
        served.client.post("/v1/completions", headers={"Content-Encoding": name}, content=b"{}"),
        served.client.post("/v2/check", content=f"{name}=1&{name}=2"),
    ):
        assert 400 <= response.status_code < 500, response.text
        assert max(map(len, re.findall("x+", response.text)), default=0) <= 60, response.text


def test_a_limit_beyond_the_context_is_cut_and_none_is_none(served: Served) -> None:
    served.service.forget_calls()
    for fields, tokens in (
        ({"max_tokens": 10**400}, 4096),
        ({"max_tokens": 4097}, 4096),
        ({"max_tokens": -1}, 4096),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": None}, 256),
    ):
        assert served.post(prompt="a", **fields).status_code == 200
        assert served.service.last_call().options.max_tokens == tokens
    chat = {"messages": [USER], "max_completion_tokens": 5000, "max_tokens": -1}
    assert served.post(CHAT, **chat).status_code == 200
    assert served.service.last_call().options.max_tokens == 4096
    with serving(draw_seeds=True) as drawing:
        for seed in (-1, None, 5):
            assert drawing.post(prompt="a", seed=seed).status_code == 200
        first, second, third = (call.options.seed for call in drawing.service.calls)
        assert len({first, second, third}) == 3 and third == 5 and min(first, second) >= 0


@contextmanager
def asking(served: Served, rest: bytes) -> Iterator[socket.socket]:
    """A connection with a request by hand."""
    with socket.create_connection(("127.0.0.1", served.port), PATIENCE) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + rest)
        yield connection


def answer_to(served: Served, rest: bytes) -> tuple[int, str]:
    """The status and body of the answer to a request that does not come to its end."""
    with asking(served, rest) as connection:
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read().decode()


def test_a_large_body_is_refused_before_it_is_read(served: Served) -> None:
    assert answer_to(served, b"Content-Length: 100001\r\n\r\n")[0] == 413


def test_the_answer_to_a_large_body_reaches_clients_that_read_after_sending(served: Served) -> None:
    size = 2**20
    rest = b"Content-Length: %d\r\n\r\n%s" % (size, b" " * size)
    assert answer_to(served, rest)[0] == 413


def test_a_body_without_a_length_is_refused_before_it_is_read() -> None:
    def endless() -> Iterator[bytes]:
        while True:  # until the server closes the connection
            yield b" " * 10_000

    # The limit is above the parts in which uvicorn passes a body on.
    with serving(max_body=2**19) as served:
        check_error(served.client.post("/v1/completions", content=endless()), 413)


def test_a_compressed_body_is_inflated_only_so_far(served: Served) -> None:
    body = json.dumps({"prompt": "a b c"}).encode()
    for name, made in (
        ("gzip", gzip.compress(body)),
        ("X-GZIP", gzip.compress(body)),
        ("deflate", zlib.compress(body)),
        ("identity", body),
    ):
        headers = {"Content-Encoding": name}
        answer = served.client.post("/v1/completions", content=made, headers=headers)
        assert answer.json()["choices"][0]["text"] == "A B C"
    bomb = gzip.compress(b" " * 10**8)
    tracemalloc.start()
    with pytest.raises(Refused, match="more than 1,000 bytes"):
        inflated(bomb, 1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10**6, "it is inflated no further"
    for name, made, status, wrong in (
        ("gzip", bomb[:90_000], 413, "the body has more than 100,000 bytes"),
        ("gzip", body, 400, "the body cannot be inflated"),
        ("gzip", gzip.compress(body)[:-4], 400, "is not whole"),
        ("gzip", gzip.compress(body) + b"more", 400, "is not all"),
        ("br", body, 415, "Content-Encoding is 'br': send the body as gzip"),
        ("gzip, gzip", body, 415, "Content-Encoding is 'gzip, gzip'"),
        ("", gzip.compress(body), 415, "compressed by gzip: send it"),
    ):
        headers = {"Content-Encoding": name} if name else {}
        answer = served.client.post("/v1/completions", content=made, headers=headers)
        assert wrong in check_error(answer, status)["message"]


def test_a_slow_body_times_out() -> None:
    with serving(body_seconds=0.05) as served:
        for _ in range(20):  # uvloop's clock ticks in milliseconds: a timer may be early by one
            status, answer = answer_to(served, b"Content-Length: 50\r\n\r\n{")
            assert status == 408 and "did not arrive" in answer


def test_a_server_that_does_not_decode_is_503() -> None:
    with serving() as served:
        for state, seconds in (("loading", "5"), ("stopping", None), ("failed", None)):
            served.service.state = state  # type: ignore[assignment]
            for response in (served.post(prompt="a"), served.post(CHAT, messages=[USER])):
                check_error(response, 503)
                assert response.headers.get("retry-after") == seconds


def test_a_failure_in_decoding_is_500_unless_options_leave_no_token(served: Served) -> None:
    for word, status, wrong in (
        (FAIL, 500, "decoding has failed: send the request again"),
        (FORBIDDEN, 400, NOTHING_LEFT),
    ):
        served.service.forget_calls()
        assert check_error(served.post(prompt=["a", f"b c {word}"]), status)["message"] == wrong
        assert served.service.last_call().cancelled.wait(PATIENCE)
        *parts, last, done = served.events(prompt=f"b c {word}")
        assert json.loads(parts[0])["choices"][0]["text"] == "B C"
        assert json.loads(last)["error"]["message"] == wrong and done == "[DONE]"


def test_no_traceback_reaches_a_client(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as served:
        del served.service.calls  # the next request fails, and says so by an AttributeError
        response = served.post(prompt="a")
    check_error(response, 500)
    assert "calls" not in response.text and "Traceback" not in response.text
    assert "has no attribute 'calls'" in caplog.text  # the log has it


def test_a_key_is_needed_except_for_what_is_public() -> None:
    with serving(api_keys=["first-key", "second-key"], cors_origins=["https://a.org"]) as served:
        for path in ("/", "/health"):
            assert served.client.get(path).status_code == 200
        for path in ("/metrics", "/v1/models", "/nothing"):
            response = served.client.get(path)
            assert check_error(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        wrong = ["Bearer wrong", "Bearer", "Basic first-key", "first-key", "Bearer \xe9"]
        wrong += ["Bearer first-ke", "Bearer first-kez", "Bearer first-key2", "Bearer second-KEY"]
        for value in wrong:
            headers = [(b"authorization", value.encode("latin-1"))]
            check_error(served.client.get("/v1/models", headers=headers), 401)
        for value in ("Bearer first-key", "bearer second-key"):
            got = served.client.get("/v1/models", headers={"authorization": value})
            assert got.status_code == 200
        # A browser asks whether it may without a key.
        asking = {"origin": "https://a.org", "access-control-request-method": "POST",
                  "access-control-request-headers": "authorization"}  # fmt: skip
        allowed = served.client.options("/v1/completions", headers=asking)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.org"


def test_pages_of_other_sites_may_not_ask() -> None:
    names = "localhost localhost. 127.0.0.1:80 [::1]:8080 LOCALHOST:1 127.9.9.9".split()
    others = "evil.org localhost.evil.org 127.0.0.1.evil.org:80 user@evil.org 0.0.0.0 [ [::1"
    with serving() as served:
        for host in names:
            assert served.client.get("/health", headers={"host": host}).status_code == 200
        for host in (*others.split(), ""):
            error = check_error(served.client.get("/health", headers={"host": host}), 403)
            assert repr(host) in error["message"]
        cross = {"sec-fetch-site": "cross-site", "origin": "https://evil.org"}
        unsaid = {"origin": "https://evil.org"}  # of a browser that does not say cross-site
        neighbour = {"sec-fetch-site": "same-site", "origin": "https://evil.org"}  # another port
        for headers in (cross, unsaid, neighbour):
            refused = served.client.post("/v1/completions", headers=headers, json={"prompt": "a"})
            assert "https://evil.org" in check_error(refused, 403)["message"]
        own = {"origin": served.url}
        for headers in (own, own | {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
            allowed = served.client.post("/v1/completions", headers=headers, json={"prompt": "a"})
            assert allowed.is_success
        assert served.client.get("/", headers=cross).status_code == 200  # somebody followed a link
    with serving(local=False, cors_origins=["https://evil.org"]) as served:
        assert served.client.get("/health", headers={"host": "evil.org"}).status_code == 200
        allowed = served.client.post("/v1/completions", headers=cross, json={"prompt": "a"})
        assert allowed.headers["access-control-allow-origin"] == "https://evil.org"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_rows(served: Served, stream: bool) -> None:
    served.service.forget_calls()
    body = json.dumps({"prompt": ["a", f"b c {STALL}"], "stream": stream}).encode()
    with asking(served, b"Content-Length: %d\r\n\r\n%s" % (len(body), body)):
        call = served.service.last_call()
        assert call.stalled.wait(PATIENCE)
        assert not call.cancelled.is_set()
    assert call.cancelled.wait(PATIENCE)
    assert served.post(prompt="a").status_code == 200


def test_a_server_that_stops_while_it_loads_waits_for_no_outputs() -> None:
    with serving(FakeService(state="loading")) as served:
        pass
    assert served.service.stopped == [0]


def check_refusal(function: Callable[..., object], *arguments: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        function(*arguments)
    check_message(str(error.value))


def test_keys_are_read_from_a_file_and_origins_are_what_browsers_send(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\n  abc-1 \nabc-2\n")
    assert read_keys(path) == ["abc-1", "abc-2"]
    wrong = {b"# none\n": "has no API key", b"a b\n": "line 1 of", b"\n\xc3\xa9\n": "line 2 of",
             b"\xff": "not UTF-8"}  # fmt: skip
    for content, expected in wrong.items():
        path.write_bytes(content)
        check_refusal(read_keys, path, says=expected)
    check_origins(["*", "https://a.org", "http://localhost:3000"])
    for origin in ("a.org", "https://a.org/", "https://", "", "https://a.org/path"):
        check_refusal(check_origins, [origin], says="--cors-origin must be")


def test_sockets_are_what_clients_expect() -> None:
    """All try this address of localhost, and parts of a response do not wait for each other."""
    with (
        bind("localhost", 0) as listening,
        socket.create_connection(listening.getsockname(), PATIENCE),
        listening.accept()[0] as accepted,
    ):
        assert listening.getsockname()[0] == "127.0.0.1"
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        port = listening.getsockname()[1]
        check_refusal(bind, "127.0.0.1", port, says="used by another program")
    check_refusal(bind, "no host", 0, says="--host must be")
    check_refusal(bind, "192.0.2.1", 0, says="cannot be listened on")
