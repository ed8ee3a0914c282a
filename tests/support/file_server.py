"""A web server for the files of a folder that answers ranges, and counts what is asked for."""

from __future__ import annotations

import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self


class FileServer:
    """Serves ``folder``; each answer takes ``latency`` seconds."""

    def __init__(self, folder: Path, latency: float = 0.0) -> None:
        self.requests = 0
        """Answers with content so far."""
        self.bytes = 0
        """Bytes in them."""
        self._mutex = threading.Lock()
        outer = self

        class Handler(_Handler):
            server_of = outer

        self.folder, self.latency = folder, latency
        self._server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def count(self, num_bytes: int) -> None:
        with self._mutex:
            self.requests += 1
            self.bytes += num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: FileServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.server_of.folder / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        size = path.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, size)
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{path.name}-{size}"')
        self.send_header("Last-Modified", self.date_time_string(int(path.stat().st_mtime)))
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if not with_body:
            return
        time.sleep(self.server_of.latency)
        with path.open("rb") as file:
            file.seek(begin)
            self.wfile.write(file.read(end - begin))
        self.server_of.count(end - begin)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""
