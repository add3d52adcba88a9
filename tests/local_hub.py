"""A local server that speaks the few endpoints of the Hugging Face Hub that are used."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves folders as the Hub serves repositories; `requests` are the paths asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests: list[str] = []
        self.cards: list[str] = []  # that were checked
        self.sizes: dict[str, int] = {}  # that the Hub claims, by names of files
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                hub.take(self, self.rfile.read(length))

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
        api = re.fullmatch(r"/api/models/(\w[^/]*/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/(\w[^/]*/[^/]+)/(resolve)/([^/]+)/(.+)", path)
        found = api or file
        if not found or not (self.root / found[1]).is_dir():
            self.send(request, code="RepoNotFound")
        elif found[3] not in (None, "main", COMMIT):
            self.send(request, code="RevisionNotFound")
        elif api:
            body = self.tree(api[1]) if api[2] == "tree" else self.info(api[1])
            self.send(request, json.dumps(body).encode())
        elif file and (self.root / file[1] / file[4]).is_file():
            stored = (self.root / file[1] / file[4]).read_bytes()
            self.send(request, stored, tag=hashlib.sha256(stored).hexdigest())
        else:
            self.send(request, code="EntryNotFound")

    def take(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        """Create a repository, or write the files of a commit into it, whatever their size."""
        path = request.path.split("?")[0]
        self.requests.append(f"POST {path}")
        step = re.fullmatch(r"/api/models/(\w[^/]*/[^/]+)/(preupload|commit)/main", path)
        if path == "/api/repos/create":
            if "Authorization" not in request.headers:
                self.send(request, status=401)
                return
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            (self.root / name).mkdir(parents=True, exist_ok=True)
            answer: dict[str, Any] = {"url": f"{self.endpoint}/{name}", "id": name}
        elif path == "/api/validate-yaml":
            self.cards.append(json.loads(body)["content"])
            answer = {"warnings": [], "errors": []}
        elif step and step[2] == "preupload":
            names = [each["path"] for each in json.loads(body)["files"]]
            kept = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            answer = {"files": [{"path": name} | kept for name in names]}
        else:
            assert step, path
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    (self.root / step[1] / line["value"]["path"]).write_bytes(content)
            url = f"{self.endpoint}/{step[1]}/commit/{COMMIT}"
            answer = {"success": True, "commitOid": COMMIT, "commitUrl": url}
        self.send(request, json.dumps(answer).encode())

    def info(self, name: str) -> dict[str, Any]:
        files = [
            {"rfilename": path, "size": self.sizes.get(file.name, file.stat().st_size)}
            for path, file in self.files(name)
        ]
        return {"id": name, "modelId": name, "sha": COMMIT, "siblings": files, "tags": []}

    def files(self, name: str) -> list[tuple[str, Path]]:
        """All files of a repository, with their paths in it."""
        place = self.root / name
        found = [path for path in sorted(place.rglob("*")) if path.is_file()]
        return [(path.relative_to(place).as_posix(), path) for path in found]

    def tree(self, name: str) -> list[dict[str, Any]]:
        entries = []
        for path, file in self.files(name):
            stored = file.read_bytes()
            lfs = {"oid": hashlib.sha256(stored).hexdigest(), "size": len(stored), "pointerSize": 1}
            entry = {"type": "file", "path": path, "size": len(stored), "oid": "0" * 40}
            entries.append(entry | {"lfs": lfs})
        return entries

    def send(
        self,
        request: BaseHTTPRequestHandler,
        body: bytes = b"",
        *,
        tag: str = "",
        code: str = "",
        status: int = 200,
    ) -> None:
        """Send a body with its digest as the tag, or else an error of the Hub's by its code."""
        request.send_response(404 if code else status)
        error = {"X-Error-Code": code, "X-Error-Message": "no"} if code else {}
        headers = {"Content-Length": str(len(body)), "ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}
        for name, value in (headers | error).items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def downloads(self) -> list[str]:
        """Return the names of the files that were sent."""
        return sorted(r.rsplit("/", 1)[-1] for r in self.requests if r.startswith("GET /some"))


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str, *, cache: Path | None = None) -> None:
    """Let this process use a server as the Hub, with a cache of its own."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    if cache:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
