"""Caches and jobs in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
