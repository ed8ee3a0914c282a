"""The one list of metrics, how long the loop waited, and the text in which Prometheus reads both.

Names follow `Prometheus' conventions <https://prometheus.io/docs/practices/naming/>`_: base units,
``_total`` at the end of counters. Jobs publish the fields of :data:`PUBLISHED`, which are those of
:class:`~stoker.epoch.stats.Stats`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """One value of a family; those of one family differ in their label only."""

    field: str
    """What holds the value."""
    family: str
    """Name without the prefix of its kind, and without ``_total``."""
    kind: str
    """``"counter"`` or ``"gauge"``."""
    help: str
    """What it is, with its unit."""
    label: tuple[str, str] | None = None
    """Name and value."""
    of_node: bool = False
    """Whether the ranks of a job on one machine count it together, so that it is not added up."""


def _labelled(
    family: str, kind: str, text: str, label: str, fields: Mapping[str, str], **more: bool
) -> tuple[Metric, ...]:
    return tuple(
        Metric(field, family, kind, text, (label, value), **more) for value, field in fields.items()
    )


COUNTS = (
    Metric("accesses", "accesses", "counter", "Samples served."),
    Metric(
        "hits", "hits", "counter", "Samples served from the cache without a read of the source."
    ),
    Metric("fetched", "fetched", "counter", "Samples for which the source was read."),
    Metric("direct", "direct", "counter", "Of these, samples read past the cache."),
    Metric("substituted", "substituted", "counter", "Samples in whose place another was served."),
    Metric("packaged", "packaged", "counter", "Samples that came with a package."),
    Metric("rescored", "rescored", "counter", "Samples read only to rescore them."),
    *_labelled(
        "tier_hits",
        "counter",
        "Samples that came up from a tier below memory.",
        "tier",
        {"disk": "disk_hits", "pool": "pool_hits"},
    ),
    *_labelled(
        "bytes",
        "counter",
        "Bytes of samples, by where they came from.",
        "tier",
        {
            "cache": "bytes_from_cache",
            "source": "bytes_from_source",
            "disk": "bytes_from_disk",
            "pool": "bytes_from_pool",
        },
    ),
    *_labelled(
        "source_reads",
        "counter",
        "Samples read from the source.",
        "by",
        {"worker": "read", "prefetch": "read_ahead"},
    ),
    *_labelled(
        "errors",
        "counter",
        "Failures by class, none of which stopped training.",
        "class",
        {
            "source": "failed",
            "cache": "bypassed",
            "disk": "disk_errors",
            "pool": "pool_errors",
            "pool_value": "pool_damaged",
            "loss": "non_finite",
        },
    ),
    Metric("evictions", "evictions", "counter", "Samples evicted by all users of the cache.",
           of_node=True),
    *_labelled(
        "pool_samples",
        "counter",
        "Samples for the pool, by what became of them.",
        "outcome",
        {"written": "pool_written", "dropped": "pool_dropped"},
    ),
    Metric("pool_open", "pool_open_breakers", "gauge", "Servers of the pool bypassed now.",
           of_node=True),
    *_labelled(
        "packages",
        "counter",
        "Packages of this machine, by event.",
        "event",
        {
            "built": "packages_built",
            "read": "package_reads",
            "lost": "packages_lost",
            "repacked": "repack_reads",
        },
        of_node=True,
    ),
    Metric("package_bytes", "package_bytes", "counter", "Bytes of samples read in packages.",
           of_node=True),
    Metric("rebuild_reads", "package_rebuild_reads", "counter",
           "Samples read from the source to build packages.", of_node=True),
    Metric("tokens", "tokens", "counter", "Tokens of the samples handed out in planned batches."),
    Metric("token_places", "token_places", "counter", "Tokens that these batches have room for."),
    Metric("epoch_seconds", "epoch_seconds", "counter", "Seconds of epochs up to the last batch."),
    Metric("stall_seconds", "stall_seconds", "counter",
           "Seconds that the training loop waited for batches."),
    Metric("start_seconds", "start_seconds", "counter",
           "Seconds from the beginning of each epoch to its first batch."),
    Metric("source_seconds", "source_seconds", "counter",
           "Seconds that workers spent reading the source, added up."),
    Metric("read_ahead_seconds", "read_ahead_seconds", "counter",
           "Seconds that reads ahead of the workers took, added up."),
    Metric("wait_seconds", "wait_seconds", "counter",
           "Seconds that workers waited for reads of other processes, added up."),
    Metric("scoring_seconds", "scoring_seconds", "counter", "Seconds spent in observe()."),
    Metric("rescoring_seconds", "rescoring_seconds", "counter",
           "Seconds between epochs in which samples were rescored."),
    Metric("cache_bytes", "cache_bytes", "gauge", "Payload bytes in the job's cache.",
           of_node=True),
    Metric("data_bytes", "data_bytes", "gauge", "Payload bytes of the samples that are visited.",
           of_node=True),
    Metric("workers", "workers", "gauge", "Processes or threads that make batches."),
)  # fmt: skip
"""What each job counts."""

PUBLISHED = tuple(metric.field for metric in COUNTS)
"""Fields that jobs publish, in the order of the table that they share."""

WAIT_SECONDS: tuple[float, ...] = tuple(1e-4 * 2**power for power in range(20))
"""Upper ends of the buckets, 0.1 ms to 52 s; one more bucket has what is longer."""


class Waits:
    """Counts of waits by length. Not thread-safe."""

    def __init__(self) -> None:
        self.counts = [0] * (len(WAIT_SECONDS) + 1)
        """Waits in each bucket."""

    def add(self, seconds: float) -> None:
        """Count a wait."""
        self.counts[bisect_left(WAIT_SECONDS, seconds)] += 1


def quantile(counts: Sequence[int], share: float) -> float:
    """Return the seconds that ``share`` (0 to 1) of the waits did not exceed; 0 without waits.

    Between the ends of a bucket it is interpolated, as Prometheus does; what is longer than the
    last bucket counts as its end.
    """
    left = share * sum(counts)
    low = 0.0
    for high, count in zip(WAIT_SECONDS, counts, strict=False):
        if left <= count and count:
            return low + (high - low) * left / count
        left, low = left - count, high
    return low if any(counts) else 0.0


_WAITS = Metric(
    "waits", "batch_wait_seconds", "histogram", "Seconds that the training loop waited for a batch."
)
_CACHES = (
    Metric("capacity_bytes", "capacity_bytes", "gauge", "Payload bytes that fit."),
    Metric("limit_bytes", "limit_bytes", "gauge",
           "Payload bytes that fit now; less than the capacity while others use the memory."),
    Metric("payload_bytes", "payload_bytes", "gauge", "Payload bytes that are cached."),
    Metric("entries", "entries", "gauge", "Samples that are cached."),
    Metric("hits", "hits", "counter", "Look-ups that found a sample."),
    Metric("misses", "misses", "counter", "Look-ups that found none."),
    Metric("evictions", "evictions", "counter", "Samples that had to leave."),
)  # fmt: skip
_JOBS = (
    Metric("processes", "processes", "gauge", "Ranks of the job on this machine."),
    Metric("rate", "rate", "gauge", "Samples per second."),
    Metric("share", "share", "gauge",
           "Share of the samples per second of all jobs at this cache."),
    Metric("benefit", "benefit", "gauge", "Time of a batch without the cache / time with it."),
    Metric("eligible", "eligible", "gauge", "1 if the job's scores count."),
    Metric("fetch_seconds", "fetch_seconds", "gauge",
           "Seconds that reading a whole batch would take."),
    Metric("compute_seconds", "compute_seconds", "gauge",
           "Seconds that a batch takes without waiting."),
)  # fmt: skip
_LIMITS = (
    Metric("memory_bytes", "memory_bytes", "gauge", "Bytes of memory that caches have."),
    Metric("memory_limit_bytes", "memory_limit_bytes", "gauge",
           "Bytes of memory that caches may have."),
    Metric("borrowed_bytes", "memory_borrowed_bytes", "gauge",
           "Bytes of memory that caches have beyond what is theirs."),
    Metric("disk_bytes", "disk_bytes", "gauge", "Bytes of disk that caches have."),
    Metric("disk_limit_bytes", "disk_limit_bytes", "gauge",
           "Bytes of disk that caches may have."),
    Metric("disk_borrowed_bytes", "disk_borrowed_bytes", "gauge",
           "Bytes of disk that caches have beyond what is theirs."),
)  # fmt: skip

Labels = dict[str, str]
_Found = Sequence[tuple[Labels, Mapping[str, Any]]]


def exposition(caches: Sequence[Mapping[str, Any]], limits: Mapping[str, Any]) -> str:
    """Return the text for ``caches``, CacheInfo as dictionaries, and the service's ``limits``.

    These may have ``quotas``, as :meth:`Holding.quotas` returns them. A value that is None or
    missing is left out, and so is a family without values.
    """
    of_caches: _Found = [
        (_labels(cache), {**cache["stats"], "capacity_bytes": cache["capacity_bytes"]})
        for cache in caches
    ]
    jobs = [(_labels(cache, job), job) for cache in caches for job in cache["jobs"]]
    counts: _Found = [(labels, job.get("counts", {})) for labels, job in jobs]
    quotas = [({"jobs": each["jobs"]}, each) for each in limits.get("quotas", ())]
    lines = [
        *_families("stoker_cache_", _CACHES, of_caches),
        *_families("stoker_job_", _JOBS, jobs),
        *_families("stoker_job_", COUNTS, counts),
        *_histogram([(labels, job) for labels, job in jobs if any(job.get("waits", ()))]),
        *_families("stoker_service_", _LIMITS, [({}, limits)]),
        *_families("stoker_quota_", _LIMITS, quotas),
    ]
    return "".join(f"{line}\n" for line in lines)


def _families(prefix: str, metrics: Iterable[Metric], found: _Found) -> Iterator[str]:
    latest = ""
    for metric in metrics:
        name = f"{prefix}{metric.family}" + ("_total" if metric.kind == "counter" else "")
        extra = {} if metric.label is None else dict((metric.label,))
        known = [
            (labels | extra, row[metric.field])
            for labels, row in found
            if row.get(metric.field) is not None
        ]
        if known and name != latest:
            yield from _head(name, metric)
            latest = name
        for labels, value in known:
            yield f"{name}{_written(labels)} {_number(value)}"


def _histogram(found: _Found) -> Iterator[str]:
    """Yield the histograms of batch waits; their sums are the seconds that jobs stalled."""
    name = f"stoker_job_{_WAITS.family}"
    if found:
        yield from _head(name, _WAITS)
    for labels, job in found:
        total = 0
        for edge, count in zip((*map(str, WAIT_SECONDS), "+Inf"), job["waits"], strict=True):
            total += count
            yield f"{name}_bucket{_written(labels | {'le': edge})} {total}"
        yield f"{name}_sum{_written(labels)} {_number(job['counts']['stall_seconds'])}"
        yield f"{name}_count{_written(labels)} {total}"


def _head(name: str, metric: Metric) -> Iterator[str]:
    yield f"# HELP {name} {metric.help}"
    yield f"# TYPE {name} {metric.kind}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _labels(cache: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> Labels:
    key = str(cache["key"])
    labels = {"cache": _short(str(cache["description"])) or key, "key": key}
    return labels if job is None else labels | {"job": str(job["name"]), "pid": str(job["pid"])}


def _written(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _short(description: str) -> str:
    """Return the description without folders and hosts: any user of this machine may read it.

    ``"ImageFolder s3://bucket/sets/train"`` becomes ``"ImageFolder train"``.
    """
    before, slash, _ = description.partition("/")
    kind = before.rpartition(" ")[0]
    return f"{kind} {description.rstrip('/').rpartition('/')[2]}".strip() if slash else description


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
