"""Connections: those that are no HTTP, offers of other protocols, and more than there are files."""

import socket
from contextlib import ExitStack
from pathlib import Path

from conftest import REPOSITORY
from serving import PATIENCE, is_there, serving, started, wait_until


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), PATIENCE)
    connection.sendall(sent)
    return connection


def test_what_is_no_http_is_refused() -> None:
    with serving() as served:
        with connect(served.port, b"no HTTP\r\n\r\n") as connection:
            assert connection.recv(2**16).startswith(b"HTTP/1.1 400 ")
            while connection.recv(2**16):
                pass
        assert served.client.get("/health").status_code == 200


def test_an_offer_of_another_protocol_is_declined() -> None:
    """Java's client offers HTTP/2 in each of its first requests."""
    with serving() as served:
        for offer in ("h2c", "websocket", "h2c"):
            headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": offer}
            response = served.client.post(
                "/v1/completions", json={"prompt": "a b c"}, headers=headers
            )
            assert response.json()["choices"][0]["text"] == "A B C"


def test_more_connections_than_files_do_no_harm_once_they_have_left(tmp_path: Path) -> None:
    small = str(REPOSITORY / "weights" / "correct-small")
    change = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))"
    with started(tmp_path, "--model", small, change=change) as (process, client):
        with ExitStack() as leaving:
            for _ in range(200):
                leaving.enter_context(connect(client.base_url.port or 0))
        wait_until(lambda: is_there(client))
        process.terminate()
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
