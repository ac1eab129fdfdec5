"""A Hub on this machine: serves one folder as a model, and refuses in the ways in which the real one does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "org/tiny"

# name of a model: (HTTP status, headers of the answer), as the real Hub gives them
REFUSALS: dict[str, tuple[int, dict[str, str]]] = {
    "org/private": (401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."}),
    "org/no-login": (401, {}),
    "org/bad-login": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
    "org/gated": (403, {"X-Error-Code": "GatedRepo"}),
    "org/gated-logged-out": (401, {"X-Error-Code": "GatedRepo"}),
    "org/forbidden": (403, {"X-Error-Message": "your token may not read this"}),
    "org/missing": (404, {"X-Error-Code": "RepoNotFound"}),
    "org/disabled": (403, {"X-Error-Message": "Access to this resource is disabled."}),
    "org/broken": (501, {}),
}


class FakeHub(ThreadingHTTPServer):
    """Counts what it is asked."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.requests: list[str] = []
        self.refused_files: dict[str, tuple[int, dict[str, str]]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def fake_hub(folder: Path) -> Iterator[FakeHub]:
    """Serve `folder` as the model `org/tiny` until the block ends."""
    with FakeHub(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        name = next((name for name in REFUSALS if path.startswith((f"/api/models/{name}/", f"/{name}/"))), None)
        if name is not None or path in {f"/api/models/{name}" for name in REFUSALS}:
            return self._send(*REFUSALS[name or path.removeprefix("/api/models/")], b"{}", body)
        if path in (f"/api/models/{MODEL}", f"/api/models/{MODEL}/revision/main"):
            return self._send(200, {}, json.dumps({"id": MODEL, "sha": COMMIT, "siblings": []}).encode(), body)
        if path.startswith(f"/api/models/{MODEL}/revision/"):
            return self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"{}", body)
        if path == f"/api/models/{MODEL}/tree/{COMMIT}":
            return self._send(200, {}, json.dumps(self._tree()).encode(), body)
        revision, _, file = path.removeprefix(f"/{MODEL}/resolve/").partition("/")
        if path.startswith(f"/{MODEL}/") and revision not in {COMMIT, "main"}:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"{}", body)
        if file in self.server.refused_files:
            return self._send(*self.server.refused_files[file], b"{}", body)
        if file in {entry["path"] for entry in self._tree()}:
            content = (self.server.folder / file).read_bytes()
            headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}
            return self._send(200, headers, content, body)
        return self._send(404, {"X-Error-Code": "RepoNotFound"}, b"{}", body)

    def _tree(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "file",
                "path": file.name,
                "size": file.stat().st_size,
                "oid": _digest(file.read_bytes()),
            }
            for file in sorted(self.server.folder.iterdir())
        ]

    def _send(self, status: int, headers: dict[str, str], content: bytes, body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
