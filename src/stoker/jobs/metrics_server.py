"""The HTTP server that Prometheus reads metrics from."""

from __future__ import annotations

from collections.abc import Callable

from stoker.errors import StokerError
from stoker.jobs.http_server import BoundedServer, Handler, listen_at

_MOST = 8  # requests at the same time; every user of the machine may ask
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer(BoundedServer):
    """Answers ``GET /metrics`` at the address ``host`` with what ``text`` returns, few at a time.

    ``port`` 0 is any free port. Raises :class:`~stoker.errors.ConfigError` if it is taken, or
    ``host`` is no address of this machine.
    """

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
        class Metrics(Handler):
            def answer(self) -> None:
                try:
                    found = text() if self.path == "/metrics" else None
                except (StokerError, OSError):
                    self.send_error(503)
                    return
                if found is None:
                    self.send_error(404, "the metrics are at /metrics")
                else:
                    self.send(found.encode(), _TYPE)

        listener = listen_at(port, host, name="metrics_port")
        super().__init__(listener, Metrics, _MOST)
        self.port: int = listener.getsockname()[1]
        """Where it listens."""
