"""A stand-in for the Hugging Face Hub: one data set, of which ranges are read and counted."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

REPO = "someone/things"


class Hub:
    """Serves ``files``, by path in the repository ``REPO``."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.bytes = 0
        """Bytes of files in answers so far."""
        self.requests = 0
        """Answers so far."""
        self._mutex = threading.Lock()

        class Handler(_Handler):
            hub = self

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        return f"hf://datasets/{REPO}"

    def count(self, requests: int = 0, num_bytes: int = 0) -> None:
        with self._mutex:
            self.requests += requests
            self.bytes += num_bytes

    def entry(self, path: str) -> dict[str, Any]:
        data = self.files[path]
        return {
            "type": "file",
            "oid": hashlib.sha1(data).hexdigest(),
            "size": len(data),
            "path": path,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path, files = self.path.partition("?")[0], self.hub.files
        if (found := re.fullmatch(f"/datasets/{REPO}/resolve/main/(.*)", path)) is not None:
            self._range(files[found[1]]) if found[1] in files else self._json({}, 404)
        elif re.fullmatch(f"/api/datasets/{REPO}(/revision/main)?", path):
            self._json({"id": REPO, "sha": "0" * 40, "private": False, "tags": [], "siblings": []})
        elif (found := re.fullmatch(f"/api/datasets/{REPO}/tree/main/?(.*)", path)) is not None:
            self._json([self.hub.entry(name) for name in files if name.startswith(found[1])])
        else:
            self._json({"error": path}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        wanted = [
            name for name in self.hub.files if name in body or name.replace("/", "%2F") in body
        ]
        self._json([self.hub.entry(name) for name in wanted])

    def _range(self, data: bytes) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        piece = data[int(wanted[1]) : int(wanted[2]) + 1] if wanted else data
        self.hub.count(num_bytes=len(piece))
        self._answer(piece, 206 if wanted else 200, "application/octet-stream")

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(json.dumps(value).encode(), status, "application/json")

    def _answer(self, body: bytes, status: int, kind: str) -> None:
        self.hub.count(requests=1)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""
