"""Connections: those that send nothing, or too slowly, or are too many; and offers of others."""

import inspect
import logging
import resource
import select
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from speculative_t5.serve import server as module
from speculative_t5.serve.server import (
    FILES,
    LEAST,
    RESERVE,
    Connection,
    raise_file_limit,
)

import pytest
from conftest import REPOSITORY
from serving import PATIENCE, STALL, is_there, serving, started, wait_until
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

SHORT = 0.3  # seconds to wait for a head; nothing here depends on how long it is
HEAD = b"Host: localhost\r\n"
HALF = b"GET /health HTTP/1.1\r\n" + HEAD
BODY = b'{"prompt": "a b %s", "stream": true}' % STALL.encode()
ASK = b"POST /v1/completions HTTP/1.1\r\n" + HEAD
STREAM = ASK + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
UNREAD = HEAD + b"Content-Length: 1000000\r\n\r\n"  # the end of a head whose body is not read


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), PATIENCE)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed a connection; reads what it has sent."""
    try:
        while select.select([connection], [], [], 0)[0]:
            if not connection.recv(2**16):
                return True
    except ConnectionError:
        return True
    return False


def is_closed_while_sending(connection: socket.socket) -> bool:
    """Send one more byte; whether the server has closed the connection."""
    try:
        connection.sendall(b"a")
    except ConnectionError:
        return True
    return is_closed(connection)


def test_what_is_private_to_uvicorn_is_there() -> None:
    """Without these, connections would not be closed, and nobody would notice."""
    source = inspect.getsource(H11Protocol)
    used = ["self.loop = ", "self.transport = ", "self.connections = server_state.connections"]
    for each in [*used, "self.cycle: RequestResponseCycle = None"]:
        assert each in source, f"uvicorn has changed: it lacks {each!r}"
    assert "self.response_complete = False" in inspect.getsource(RequestResponseCycle.__init__)
    assert "if self._should_upgrade():" in inspect.getsource(H11Protocol.handle_events)
    overridden = ("connection_made", "data_received", "connection_lost", "send_400_response")
    for name in (*overridden, "_should_upgrade"):
        own, theirs = getattr(Connection, name), getattr(H11Protocol, name)
        assert list(inspect.signature(own).parameters) == list(inspect.signature(theirs).parameters)


def test_what_is_no_http_is_answered_once(caplog: pytest.LogCaptureFixture) -> None:
    cases = [
        (b"no HTTP\r\n\r\n", 400, b""),
        (ASK + CHUNKED + b"no chunk\r\n", 400, b""),
        (b"POST /nothing HTTP/1.1\r\n" + HEAD + CHUNKED, 404, b"no chunk\r\n"),
    ]
    with serving() as served:
        for number, (sent, status, then) in enumerate(cases, 1):
            with connect(served.port, sent) as connection:
                assert connection.recv(2**16).startswith(b"HTTP/1.1 %d " % status)
                connection.sendall(then)
                wait_until(lambda each=connection: is_closed(each))
            assert [record.exc_info for record in caplog.records] == [None] * number


@pytest.mark.parametrize("keys", [[], ["key"]])
def test_a_connection_that_drips_is_closed(
    monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    """Also while it sends the body of a request that was answered or refused: 401, 403, 404."""
    monkeypatch.setattr(module, "HEAD_SECONDS", SHORT)
    begun = [
        b"",
        b"GET /health HTTP/1.1\r\nX: ",
        b"POST /nothing HTTP/1.1\r\n" + UNREAD,
        b"POST /nothing HTTP/1.1\r\n" + UNREAD.replace(b"localhost", b"example.org"),
        b"GET /health HTTP/1.1\r\n" + UNREAD,
        b"GET /health HTTP/1.1\r\n%s\r\nGET /health HTTP/1.1\r\nX: " % HEAD,
    ]
    with serving(api_keys=keys) as served, ExitStack() as open_ones:
        dripping = [open_ones.enter_context(connect(served.port, each)) for each in begun]
        silent = open_ones.enter_context(connect(served.port))
        wait_until(lambda: all([is_closed_while_sending(each) for each in dripping]), SHORT / 5)
        wait_until(lambda: is_closed(silent))


def test_what_is_used_stays_open_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that waits and an idle connection outlive a later one that is silent."""
    monkeypatch.setattr(module, "HEAD_SECONDS", 5 * SHORT)  # the time to send one, too
    with (
        serving() as served,
        connect(served.port, STREAM) as stream,
        connect(served.port, HALF + b"\r\n") as idle,
    ):
        assert idle.recv(12) == b"HTTP/1.1 200"
        assert served.service.last_call().stalled.wait(PATIENCE)
        with connect(served.port) as silent:
            wait_until(lambda: is_closed(silent))
        assert not is_closed(idle)
        idle.sendall(HALF + b"\r\n")
        assert idle.recv(12) == b"HTTP/1.1 200"
        served.service.let_go()
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            assert (part := stream.recv(2**16))
            received += part
        assert b"[DONE]" in received


def test_an_upgrade_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """Java's client offers HTTP/2 in each of its first requests."""
    with caplog.at_level(logging.WARNING), serving() as served:
        for offer in ("h2c", "websocket", "h2c"):
            headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": offer}
            response = served.client.post(
                "/v1/completions", json={"prompt": "a b c"}, headers=headers
            )
            assert response.json()["choices"][0]["text"] == "A B C"
        assert served.client.get("/health").status_code == 200
    assert not caplog.records


INFINITE = resource.RLIM_INFINITY


def test_the_maximum_follows_from_the_files_that_may_be_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a limit of macOS below the hard one, that of 300 cannot be raised."""
    now: list[tuple[int, int]] = []

    def set_limit(kind: int, new: tuple[int, int]) -> None:
        if now[0][0] == 300:
            raise ValueError("current limit exceeds maximum limit")
        now.append(new)

    monkeypatch.setattr(resource, "getrlimit", lambda kind: now[-1])
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    for limits, wanted, most in (
        ((1024, 2**20), FILES, FILES - RESERVE),
        ((256, INFINITE), FILES, FILES - RESERVE),
        ((300, INFINITE), None, 300 - RESERVE),
        ((120, 120), None, 120 - RESERVE),
        ((100, 200), 200, 200 - RESERVE),
        ((2**20, 2**20), None, 2**20 - RESERVE),
        ((INFINITE, INFINITE), None, FILES - RESERVE),
        ((70, 70), None, LEAST),
    ):
        now[:] = [limits]
        assert raise_file_limit() == most
        assert now[1:] == ([] if wanted is None else [(wanted, limits[1])])


def test_more_connections_than_files_do_no_harm(tmp_path: Path) -> None:
    files, small = 120, str(REPOSITORY / "weights" / "correct-small")
    change = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))"
    with started(tmp_path, "--model", small, change=change) as (process, client):
        port, most = client.base_url.port or 0, files - RESERVE
        for _ in range(2):  # they are counted down as well
            with ExitStack() as leaving:
                heads = [leaving.enter_context(connect(port)) for _ in range(200)]
                for each in heads:
                    with suppress(ConnectionError):  # it has been refused
                        each.sendall(HALF)
                wait_until(lambda heads=heads: sum(map(is_closed, heads)) >= len(heads) - most)
                answers = 0
                for each in heads:
                    with suppress(ConnectionError):
                        each.sendall(b"\r\n")
                        answers += each.recv(12) == b"HTTP/1.1 200"
                assert most / 2 < answers <= most
            wait_until(lambda: is_there(client))
        process.terminate()
        _, log = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0 and log.count(b"\n") < 10
