"""Metrics of the service for Prometheus, and their HTTP server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stoker.errors import ConfigError, StokerError

_CACHES = {
    "capacity_bytes": ("gauge", "Payload bytes that fit."),
    "payload_bytes": ("gauge", "Payload bytes that are cached."),
    "entries": ("gauge", "Samples that are cached."),
    "hits": ("counter", "Look-ups that found a sample."),
    "misses": ("counter", "Look-ups that found none."),
    "evictions": ("counter", "Samples that had to leave."),
}
_JOBS = {
    "accesses": ("counter", "Samples served."),
    "hits": ("counter", "Samples served from the cache without a read of the source."),
    "fetched": ("counter", "Samples for which the source was read."),
    "bytes_from_source": ("counter", "Bytes read from the source."),
    "rate": ("gauge", "Samples per second."),
    "share": ("gauge", "Share of the samples per second of all jobs at this cache."),
    "benefit": ("gauge", "Time of a batch without the cache / time with it."),
    "eligible": ("gauge", "1 if the job's scores count."),
    "fetch_seconds": ("gauge", "Seconds that reading a whole batch would take."),
    "compute_seconds": ("gauge", "Seconds that a batch takes without waiting."),
}
_LIMITS = {
    "memory_bytes": "Bytes of memory that caches have.",
    "memory_limit_bytes": "Bytes of memory that caches may have.",
    "disk_bytes": "Bytes of disk that caches have.",
    "disk_limit_bytes": "Bytes of disk that caches may have.",
}
_MOST = 8  # requests at the same time; every user of the machine may ask
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(caches: Sequence[Mapping[str, Any]], limits: Mapping[str, Any]) -> str:
    """Return the text for ``caches``, CacheInfo as dictionaries, and the service's ``limits``.

    A limit that is None is left out.
    """
    lines: list[str] = []
    for name, (kind, text) in _CACHES.items():
        found = [
            (
                _labels(cache),
                {**cache["stats"], "capacity_bytes": cache["capacity_bytes"]}.get(name),
            )
            for cache in caches
        ]
        lines += _family(f"stoker_cache_{name}", kind, text, found)
    for name, (kind, text) in _JOBS.items():
        found = [(_labels(cache, job), job.get(name)) for cache in caches for job in cache["jobs"]]
        lines += _family(f"stoker_job_{name}", kind, text, found)
    for name, text in _LIMITS.items():
        lines += _family(f"stoker_service_{name}", "gauge", text, [("", limits.get(name))])
    return "".join(f"{line}\n" for line in lines)


def _family(name: str, kind: str, text: str, samples: Sequence[tuple[str, Any]]) -> Iterator[str]:
    known = [(labels, value) for labels, value in samples if value is not None]
    if not known:
        return
    suffix = "_total" if kind == "counter" else ""
    yield f"# HELP {name}{suffix} {text}"
    yield f"# TYPE {name}{suffix} {kind}"
    for labels, value in known:
        yield (
            f"{name}{suffix}{labels} {float(value):g}"
            if isinstance(value, float)
            else (f"{name}{suffix}{labels} {int(value)}")
        )


def _labels(cache: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> str:
    key = str(cache["key"])
    labels = {"cache": _short(str(cache["description"])) or key, "key": key}
    if job is not None:
        labels |= {"job": str(job["name"]), "pid": str(job["pid"])}
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}"


def _short(description: str) -> str:
    """Return the description without folders and hosts: any user of this machine may read it.

    ``"ImageFolder s3://bucket/sets/train"`` becomes ``"ImageFolder train"``.
    """
    before, slash, _ = description.partition("/")
    kind = before.rpartition(" ")[0]
    return f"{kind} {description.rstrip('/').rpartition('/')[2]}".strip() if slash else description


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class _Bounded(ThreadingHTTPServer):
    """Rejects clients when it has many, so that threads and descriptors do not run out."""

    daemon_threads = True

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self._slots = threading.BoundedSemaphore(_MOST)
        super().__init__(("127.0.0.1", port), handler)

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
    """Answers ``GET /metrics`` on 127.0.0.1 with what ``text`` returns, few at a time.

    ``port`` 0 is any free port. Raises :class:`~stoker.errors.ConfigError` if it is taken.
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
                """Do not log requests."""

        try:
            self._server = _Bounded(port, Handler)
        except OSError as error:
            raise ConfigError(f"metrics_port={port} cannot be had: {error}") from error
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
