"""Metrics over HTTP, on this machine only."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from stoker.errors import ConfigError, StokerError

_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer:
    """Answers ``GET /metrics`` on 127.0.0.1 with what ``text`` returns, each in a thread.

    ``port`` 0 is any that is free. Raises :class:`~stoker.errors.ConfigError` if it is taken.
    """

    def __init__(self, port: int, text: Callable[[], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0  # seconds for a client that says nothing

            def do_GET(self) -> None:
                try:
                    found = text() if self.path == "/metrics" else None
                except (StokerError, OSError):
                    self.send_error(503)
                    return
                if found is None:
                    self.send_error(404, "the metrics are at /metrics")
                    return
                body = found.encode()
                self.send_response(200)
                self.send_header("Content-Type", _TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                """Say nothing of each request."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise ConfigError(f"metrics_port={port} cannot be had: {error}") from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        """Where it listens."""
        self._runs = False

    def run(self) -> None:
        """Serve until :meth:`close`."""
        self._runs = True
        self._server.serve_forever(0.1)

    def close(self) -> None:
        """Listen no longer."""
        if self._runs:
            self._server.shutdown()
        self._server.server_close()
