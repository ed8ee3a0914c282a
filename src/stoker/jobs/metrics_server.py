"""The HTTP server that Prometheus reads metrics from."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stoker.errors import ConfigError, StokerError

_MOST = 8  # requests at the same time; every user of the machine may ask
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Bounded(ThreadingHTTPServer):
    """Rejects clients when it has many, so that threads and descriptors do not run out."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self._slots = threading.BoundedSemaphore(_MOST)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client in a thread of its own, if there is one left."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a client."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()


class MetricsServer:
    """Answers ``GET /metrics`` at the address ``host`` with what ``text`` returns, few at a time.

    ``port`` 0 is any free port. Raises :class:`~stoker.errors.ConfigError` if it is taken, or
    ``host`` is no address of this machine.
    """

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
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
                """Do not log requests."""

        try:
            self._server = _Bounded(host, port, Handler)
        except OSError as error:
            raise ConfigError(
                f"no metrics at {host} with metrics_port={port} ({error}): give an address of "
                "this machine, and a free port"
            ) from error
        self.port = int(self._server.server_address[1])
        """Where it listens."""
        self._runs = False

    def run(self) -> None:
        """Serve until :meth:`close`."""
        self._runs = True
        self._server.serve_forever(0.1)

    def close(self) -> None:
        """Stop listening."""
        if self._runs:
            self._server.shutdown()
        self._server.server_close()
