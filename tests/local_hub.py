"""A local server that speaks the few endpoints of the Hugging Face Hub that are used."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves folders as the Hub serves repositories; `requests` are the paths asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests: list[str] = []
        self.wrong_digest: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.split("?")[0]
        self.requests.append(f"{request.command} {path}")
        api = re.fullmatch(r"/api/models/(\w[^/]*/[^/]+)/(revision|tree)/([^/]+)", path)
        file = re.fullmatch(r"/(\w[^/]*/[^/]+)/(resolve)/([^/]+)/(.+)", path)
        found = api or file
        if not found or not (self.root / found[1]).is_dir():
            self.refuse(request, "RepoNotFound")
        elif found[3] not in ("main", COMMIT):
            self.refuse(request, "RevisionNotFound")
        elif api:
            body = self.tree(api[1]) if api[2] == "tree" else self.info(api[1])
            self.send(request, json.dumps(body).encode(), {"Content-Type": "application/json"})
        elif file and (self.root / file[1] / file[4]).is_file():
            stored = (self.root / file[1] / file[4]).read_bytes()
            headers = {"ETag": f'"{self.digest(file[4], stored)}"', "X-Repo-Commit": COMMIT}
            self.send(request, stored, headers)
        else:
            self.refuse(request, "EntryNotFound")

    def digest(self, name: str, stored: bytes) -> str:
        return "0" * 64 if name in self.wrong_digest else hashlib.sha256(stored).hexdigest()

    def files(self, name: str) -> list[Path]:
        return sorted((self.root / name).iterdir())

    def info(self, name: str) -> dict[str, Any]:
        files = [{"rfilename": file.name} for file in self.files(name)]
        return {"id": name, "modelId": name, "sha": COMMIT, "siblings": files, "tags": []}

    def tree(self, name: str) -> list[dict[str, Any]]:
        entries = []
        for file in self.files(name):
            stored = file.read_bytes()
            lfs = {"oid": self.digest(file.name, stored), "size": len(stored), "pointerSize": 1}
            entry = {"type": "file", "path": file.name, "size": len(stored), "oid": "0" * 40}
            entries.append(entry | {"lfs": lfs})
        return entries

    def refuse(self, request: BaseHTTPRequestHandler, code: str) -> None:
        self.send(request, b"", {"X-Error-Code": code, "X-Error-Message": "no"}, status=404)

    def send(
        self, request: BaseHTTPRequestHandler, body: bytes, headers: dict[str, str],
        status: int = 200,
    ) -> None:  # fmt: skip
        request.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)

    def downloads(self) -> list[str]:
        """Return the names of the files that were sent."""
        return sorted(r.rsplit("/", 1)[-1] for r in self.requests if r.startswith("GET /some"))
