"""Connections: how many, how long each may keep the server waiting, and what is no HTTP."""

import asyncio
import errno
import json
import logging
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speculative_t5.serve import connections
from speculative_t5.serve.connections import Gate, Limits, Quiet, most_connections

import connection_attacks
import pytest
from conftest import REPOSITORY
from messages import check_message
from serving import PATIENCE, STALL, is_there, serving, started, wait_until

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(autouse=True)
def _sweeping_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SWEEP_SECONDS", 0.02)
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.1)


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), PATIENCE)
    connection.sendall(sent)
    return connection


def answer_on(connection: socket.socket) -> HTTPResponse:
    """The next answer, whose body has been read."""
    answer = HTTPResponse(connection)
    answer.begin()
    answer.body = answer.read()  # type: ignore[attr-defined]
    return answer


def is_closed(connection: socket.socket) -> bool:
    """Wait for what comes, and say whether that is the end."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def ends_while_sending(connection: socket.socket, part: bytes, pause: float = 0.0) -> int:
    """Send until the connection is closed; return how many bytes that took."""
    sent, end = 0, time.monotonic() + PATIENCE
    try:
        while time.monotonic() < end:
            connection.sendall(part)
            sent += len(part)
            time.sleep(pause)
    except (ConnectionResetError, BrokenPipeError):
        return sent
    raise AssertionError("it is never closed")


def test_what_is_no_http_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    chunked = GET + b"Transfer-Encoding: chunked\r\n\r\n"
    with serving() as served:
        with connect(served.port, b"no HTTP\r\n\r\n") as connection:
            assert connection.recv(2**16).startswith(b"HTTP/1.1 400 ")
            while connection.recv(2**16):
                pass
        with connect(served.port, chunked) as connection:  # what comes behind the answer is none
            assert answer_on(connection).status == 200
            connection.sendall(b"no HTTP\r\n")
            assert is_closed(connection)
        assert served.client.get("/health").status_code == 200
    assert not caplog.records


def test_an_offer_of_another_protocol_is_declined() -> None:
    """Java's client offers HTTP/2 in each of its first requests."""
    with serving() as served:
        for offer in ("h2c", "websocket", "h2c"):
            headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": offer}
            response = served.client.post(
                "/v1/completions", json={"prompt": "a b c"}, headers=headers
            )
            assert response.json()["choices"][0]["text"] == "A B C"


def test_silent_connections_end_and_idle_ones_stay() -> None:
    with (
        serving(limits=Limits(head=0.5)) as served,
        connect(served.port, GET + b"\r\n") as idle,
        connect(served.port) as silent,
        connect(served.port, GET) as half,
    ):
        assert answer_on(idle).status == 200
        assert is_closed(silent)
        late = answer_on(half)
        assert (late.status, late.getheader("connection")) == (408, "close")
        error = json.loads(late.body)["error"]  # type: ignore[attr-defined]
        assert "the head did not arrive in 0.5 seconds" in error["message"]
        check_message(error["message"])
        idle.sendall(GET + b"\r\n" + GET)  # a whole head, and a part of the next one
        assert answer_on(idle).status == 200 and answer_on(idle).status == 408


def test_a_head_byte_by_byte_has_no_more_time() -> None:
    with serving(limits=Limits(head=0.2)) as served, connect(served.port, GET) as connection:
        assert ends_while_sending(connection, b"x", pause=0.01) < 10_000


def test_a_body_has_to_make_progress() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
    for settings, wrong in (
        ({"body_pause": 0.1}, "no more of the body has come for 0.1 seconds"),
        ({"body_seconds": 0.1}, "the body did not arrive in 0.1 seconds"),
    ):
        with serving(**settings) as served, connect(served.port, head) as connection:
            answer = answer_on(connection)
            error = json.loads(answer.body)["error"]  # type: ignore[attr-defined]
            assert answer.status == 408 and wrong in error["message"]


def test_bodies_that_do_not_end_are_not_all_held() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n"
    with serving(all_bodies=450_000) as served, ExitStack() as leaving:
        for _ in range(4):
            leaving.enter_context(connect(served.port, head + b" " * 100_000))
        wait_until(lambda: len(served.server.server_state.tasks) == 4)
        with connect(served.port, head + b" " * 100_000) as connection:
            refused = answer_on(connection)
            assert (refused.status, refused.getheader("retry-after")) == (503, "5")
            error = json.loads(refused.body)["error"]  # type: ignore[attr-defined]
            check_message(error["message"])
        assert served.post(prompt="a b").status_code == 200, "small ones are read"
    with serving(all_bodies=450_000) as served:
        for _ in range(9):  # what has been read is held no more
            assert served.post(prompt="a " * 90_000, max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("part", "limits"),
    [(b" " * 2**14, Limits(rest=PATIENCE)), (b" ", Limits(rest=0.2))],
    ids=["fast", "slow"],
)
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_little_of_a_body_that_nobody_wants_is_read(
    part: bytes, limits: Limits, method: bytes
) -> None:
    head = GET.replace(b"GET", method) + b"Content-Length: 100000000000\r\n\r\n"
    with serving(limits=limits) as served, connect(served.port, head) as connection:
        assert answer_on(connection).status == (200 if method == b"GET" else 405)
        # The systems of both sides keep a few megabytes, too.
        assert ends_while_sending(connection, part, pause=0.001) < 2**24


def test_connections_that_read_no_answer_end(caplog: pytest.LogCaptureFixture) -> None:
    page = GET.replace(b"/health", b"/") + b"\r\n"
    with serving(limits=Limits(unread=0.2)) as served, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", served.port))
        connection.sendall(page * 400)
        state = served.server.server_state
        wait_until(lambda: state.total_requests > 0)
        wait_until(lambda: not state.connections)
        wait_until(lambda: not state.tasks)
    assert not caplog.records


def test_the_newest_of_too_many_connections_is_refused() -> None:
    body = json.dumps({"prompt": f"a b {STALL}"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    request = head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    with serving(limits=Limits(connections=3)) as served, ExitStack() as leaving:
        some = [leaving.enter_context(connect(served.port, request)) for _ in range(3)]
        for _ in some:  # they are answered, and so none of them makes room
            assert served.service.last_call().stalled.wait(PATIENCE)
        for number in range(40):  # of which some stay until they have asked
            newest = leaving.enter_context(connect(served.port))
            if number % 2:
                newest.sendall(GET + b"\r\n")
            refused = answer_on(newest)
            assert (refused.status, refused.getheader("retry-after")) == (503, "1")
            error = json.loads(refused.body)["error"]  # type: ignore[attr-defined]
            assert error["code"] == "too_many_connections"
            check_message(error["message"])
            assert is_closed(newest)
        assert served.server.gate.refused == 40
        some.pop().close()
        wait_until(lambda: len(served.server.server_state.connections) == 2)
        with connect(served.port, GET + b"\r\n") as connection:
            assert answer_on(connection).status == 200


def test_a_server_stops_whatever_its_connections_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "LINGER_SECONDS", PATIENCE)
    body = GET.replace(b"GET", b"POST") + b"Content-Length: 9\r\n\r\n{"
    most = Limits(connections=5, patience=PATIENCE)
    with ExitStack() as leaving, serving(limits=most) as served:
        for sent in (b"", GET, body, (GET + b"\r\n") * 50, GET + b"Content-Length: 9\r\n\r\n"):
            leaving.enter_context(connect(served.port, sent))
        assert answer_on(leaving.enter_context(connect(served.port))).status == 503
    assert not caplog.records


def test_a_connection_has_a_moment_to_ask() -> None:
    with serving(limits=Limits(connections=3, patience=PATIENCE)) as served, ExitStack() as leaving:
        some = [leaving.enter_context(connect(served.port)) for _ in range(3)]
        with connect(served.port) as newest:
            assert answer_on(newest).status == 503
        for each in some:
            each.sendall(GET + b"\r\n")
            assert answer_on(each).status == 200


def test_the_longest_silent_connection_makes_room() -> None:
    with serving(limits=Limits(connections=3, patience=0.0)) as served, ExitStack() as leaving:
        first, second, third = (
            leaving.enter_context(connect(served.port, sent)) for sent in (b"", GET, GET + b"\r\n")
        )
        assert answer_on(third).status == 200
        for oldest in (first, second, third):
            newest = leaving.enter_context(connect(served.port, GET + b"\r\n"))
            assert answer_on(newest).status == 200 and is_closed(oldest)
        assert served.server.gate.refused == 0


def test_pipelined_requests_are_all_answered_in_turn() -> None:
    with serving() as served, connect(served.port) as connection:
        connection.sendall((GET + b"\r\n") * 60)
        file = connection.makefile("rb")
        for _ in range(60):
            assert file.readline() == b"HTTP/1.1 200 OK\r\n"
            length = 0
            while (line := file.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            assert json.loads(file.read(length)) == {"status": "ready"}


def test_one_turn_is_given_in_each_pass_of_the_loop() -> None:
    passes: list[int] = []

    async def give() -> None:
        loop, gate, number = asyncio.get_running_loop(), Gate(Limits()), 0
        for _ in range(5):
            own: Any = SimpleNamespace(loop=loop, go_on=lambda: passes.append(number))
            gate.take_turn(own)
        while len(passes) < 5:
            number += 1
            await asyncio.sleep(0)

    asyncio.run(give())
    assert len({*passes}) == 5


def test_a_share_of_the_files_is_for_connections() -> None:
    assert [most_connections(files) for files in (10, 120, 256, 8192)] == [16, 40, 176, 6144]
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); "
        "from speculative_t5.serve.connections import raise_file_limit as up; print(up(), up()); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.split("\n") == ["300 300", "(300, 300)", ""]


def test_that_there_are_no_files_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def report() -> None:
        loop, quiet = asyncio.get_running_loop(), Quiet()
        for number in (errno.EMFILE, errno.ENFILE) * 500:
            quiet(loop, {"message": "accept", "exception": OSError(number, "no files")})
        closed = "Exception in callback BaseSelectorEventLoop._start_serving(<function ...>)"
        quiet(loop, {"message": closed, "exception": ValueError("Invalid file descriptor: -1")})
        with caplog.at_level(logging.CRITICAL, "asyncio"):
            quiet(loop, {"message": "accept", "exception": OSError(errno.EBADF, "another")})
        quiet(loop, {"message": "another error"})

    asyncio.run(report())
    assert [record.name for record in caplog.records] == [connections.__name__, "asyncio"]
    check_message(caplog.records[0].getMessage())


def test_more_connections_than_files_do_no_harm(tmp_path: Path) -> None:
    small = str(REPOSITORY / "weights" / "correct-small")
    change = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))"
    with started(tmp_path, "--model", small, change=change) as (process, client):
        with ExitStack() as leaving:
            for _ in range(200):
                leaving.enter_context(connect(client.base_url.port or 0))
            wait_until(lambda: is_there(client))
        process.terminate()
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0 and said == b""


def test_attacks_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """A small sample of what scripts/checks/connection_attacks.py does."""
    sizes: Any = {"files": 120, "seconds": 1.0, "share": 0.4, "most": 0.0}
    with pytest.raises(SystemExit, match="head byte by byte: the client waited for"):
        connection_attacks.main(**sizes, only="head byte")
    title, columns, row = capsys.readouterr().out.splitlines()
    assert "120 open files" in title and columns.startswith("attack")
    clients, answered, refused, lost = map(int, row.split()[4:8])
    assert clients == 100 and answered + refused + lost > 0
