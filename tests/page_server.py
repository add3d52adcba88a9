"""A server of scripted outputs that speaks what the page needs, and notes what it is asked."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from speculative_t5.serve.page import CSP, PAGE

Round = tuple[list[tuple[str, str]], str, tuple[int, int, int, int]]

# Tokens with their origins, text beyond theirs, and rounds, drafted, accepted and emitted so far.
SPECULATIVE: list[Round] = [
    ([("He", "accepted"), (" <b>is</b>", "accepted"), (" &", "recovered")], "", (1, 5, 2, 3)),
    ([(" here", "accepted"), ("", "accepted"), (" \u2603", "bonus")], "", (2, 7, 4, 6)),
    ([("\n<img src=x onerror=alert(1)>", "accepted")], ".", (3, 8, 5, 8)),
]
TEXT = "".join("".join(text for text, _ in tokens) + rest for tokens, rest, _ in SPECULATIVE)
PLAIN: list[Round] = [
    ([(text, "regular")], rest, (n, 0, 0, n))
    for n, (text, rest) in enumerate(
        [("He <b>is</b>", ""), (" & here \u2603", ""), ("\n<img src=x onerror=alert(1)>", ".")], 1
    )
]
REFUSAL = "max_tokens must be at least 1, got 0"
FAILURE = "decoding failed: generate it again"


class PageServer:
    """Serves the page on loopback.

    A text says what happens: "refuse", "fail" within the stream, "break" the connection off, "wait"
    after the first round until the client has `gone`. Any other one is decoded.
    """

    def __init__(self) -> None:
        self.key = ""
        self.model = "some-model"
        self.requests: list[dict[str, Any]] = []
        self.waiting, self.gone = threading.Event(), threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/":
                    fake.send(self, 200, "text/html; charset=utf-8", PAGE.encode(), CSP)
                elif self.path == "/v1/models" and fake.admits(self):
                    models = {"object": "list", "data": [{"id": fake.model, "object": "model"}]}
                    fake.send(self, 200, "application/json", json.dumps(models).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/v1/completions" and fake.admits(self):
                    fake.requests.append(body)
                    fake.complete(self, body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def send(
        self, request: BaseHTTPRequestHandler, status: int, kind: str, body: bytes, policy: str = ""
    ) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        if policy:
            request.send_header("Content-Security-Policy", policy)
        request.end_headers()
        request.wfile.write(body)

    def admits(self, request: BaseHTTPRequestHandler) -> bool:
        """Refuse a request without the key."""
        if self.key and request.headers["Authorization"] != f"Bearer {self.key}":
            self.refuse(request, 401, "the API key is wrong: give one of this server's keys")
            return False
        return True

    def refuse(self, request: BaseHTTPRequestHandler, status: int, message: str) -> None:
        error = {"error": {"message": message, "type": "invalid_request_error"}}
        self.send(request, status, "application/json", json.dumps(error).encode())

    def complete(self, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if body["prompt"] == "refuse":
            return self.refuse(request, 400, REFUSAL)
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream")
        request.end_headers()  # the end of the connection ends the stream
        rounds = SPECULATIVE if body["speculative"] else PLAIN
        for number, (tokens, rest, stats) in enumerate(rounds, 1):
            self.event(request, as_choice(tokens, rest, stats))
            if body["prompt"] == "fail":
                return self.event(request, {"error": {"message": FAILURE, "type": "server_error"}})
            if body["prompt"] == "break":
                return None
            if body["prompt"] == "wait" and number == 1:
                self.waiting.set()
                if request.connection.recv(1) == b"":
                    self.gone.set()
                return None
        self.event(request, {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
        request.wfile.write(b": ping\n\ndata: [DONE]\n\n")

    def event(self, request: BaseHTTPRequestHandler, data: dict[str, Any]) -> None:
        request.wfile.write(f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode())


def as_choice(
    tokens: list[tuple[str, str]], rest: str, stats: tuple[int, int, int, int]
) -> dict[str, Any]:
    """Return the event of one round; each round takes a quarter of a second."""
    counts = dict(zip(("rounds", "drafted", "accepted", "emitted"), stats, strict=True))
    extra = {
        "tokens": [{"text": text, "origin": origin} for text, origin in tokens],
        "stats": counts | {"seconds": stats[0] / 4},
    }
    text = "".join(text for text, _ in tokens) + rest
    choice = {"index": 0, "text": text, "finish_reason": None, "speculative_t5": extra}
    return {"choices": [choice]}
