"""Reads from the pool: what a sample costs over the loopback, and how much of a link is used.

Samples of 3 KB in batches of 256 from one server and from a cluster of three, beside what redis-py
does alone with the same keys. Samples of 110 KB in batches of 64 over a pair of veth devices, one
of them in a network namespace of its own, limited to 1 Gbit/s by htb; that needs root, `ip` and
`tc`. Values that the pool brings are checked and packed into one buffer; the others are left as
redis-py returns them. cpu_us is the processor time of the reading thread: it varies less than the
time that passes, where servers and readers share few cores.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
from harness import Report, interleave, paired_ratio, parser, show

from stoker.pool.pool_address import PoolAddress
from stoker.pool.pool_tier import PoolTier
from stoker.source.packed import Packed

SMALL, SMALL_BATCH = 3 * 1024, 256
LARGE, LARGE_BATCH = 110 * 1024, 64
LINK = 125e6  # bytes a second of 1 Gbit/s
SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
CLI = shutil.which("valkey-cli") or shutil.which("redis-cli")

Reader = Callable[[np.ndarray], object]


class Unavailable(Exception):
    """A part that cannot be run here; the message says why."""


def main() -> None:
    """Parse the arguments, run all parts, print the report."""
    args = parser(__doc__).parse_args()
    rounds = 2 if args.smoke else args.rounds
    report = Report("Reads from a pool", args.smoke)
    count = 2_000 if args.smoke else 20_000
    parts: list[Callable[[], None]] = [
        lambda: small(report, "one server", 1, count, rounds),
        lambda: small(report, "cluster of 3", 3, count, rounds),
        lambda: large(report, 200 if args.smoke else 2_000, rounds),
    ]
    for part in parts:
        try:
            part()
        except Unavailable as reason:
            report.remarks.append(str(reason))
    show(args, report)


def small(report: Report, name: str, servers: int, count: int, rounds: int) -> None:
    """Measure 3 KB samples over the loopback."""
    with running(servers) as ports:
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        tier, samples = filled(f"valkey://{hosts}", count, SMALL)
        readers: dict[str, Reader] = {"pool": tier.get_many}
        readers |= peers(tier, ports) if servers == 1 else cluster_peers(tier, ports)
        batches = max(1, min(40, count // SMALL_BATCH))
        results, cpu = measured(readers, samples, SMALL_BATCH, batches, rounds)
        tier.close()
    for contestant, figures in results.items():
        report.row(
            where=f"loopback, {name}",
            size="3 KB",
            batch=SMALL_BATCH,
            contestant=contestant,
            us_per_sample=1e6 * float(np.median(figures)),
            cpu_us=1e6 * float(np.median(cpu[contestant])),
            to_pool=paired_ratio(figures, results["pool"]),
        )
    report.target(f"3 KB, {name}", 1e6 * float(np.median(results["pool"])), 12, "µs a sample")


def large(report: Report, count: int, rounds: int) -> None:
    """Measure 110 KB samples over a link of 1 Gbit/s."""
    with link() as (namespace, address), running(1, namespace, address) as ports:
        tier, samples = filled(f"valkey://{address}:{ports[0]}?timeout=2", count, LARGE)
        readers: dict[str, Reader] = {"pool": tier.get_many} | peers(tier, ports, address)
        batches = max(1, min(6, count // LARGE_BATCH))
        results, cpu = measured(readers, samples, LARGE_BATCH, batches, rounds)
        tier.close()
    for contestant, figures in results.items():
        seconds = float(np.median(figures))
        report.row(
            where="link of 1 Gbit/s",
            size="110 KB",
            batch=LARGE_BATCH,
            contestant=contestant,
            us_per_sample=1e6 * seconds,
            cpu_us=1e6 * float(np.median(cpu[contestant])),
            to_pool=paired_ratio(figures, results["pool"]),
            share_of_link=LARGE / seconds / LINK,
        )
    share = LARGE / float(np.median(results["pool"])) / LINK
    report.target("110 KB, share of the link", share, 0.8, at_least=True)


def filled(url: str, count: int, size: int) -> tuple[PoolTier, np.ndarray]:
    """Return a pool with ``count`` samples u8[count, size], and these."""
    tier = PoolTier(PoolAddress.parse(url), "benchmark", count, count * size)
    samples = np.random.default_rng(0).integers(0, 256, (count, size), dtype=np.uint8)
    for start in range(0, count, 256):
        ids = np.arange(start, min(start + 256, count), dtype=np.uint32)
        data = samples[ids].reshape(-1)
        if not tier.put_many(ids, Packed(data, np.arange(len(ids) + 1) * size)).all():
            raise SystemExit("the servers did not take the samples")
    return tier, samples


def peers(tier: PoolTier, ports: list[int], host: str = "127.0.0.1") -> dict[str, Reader]:
    """Return what redis-py does with one server."""
    import redis

    client = redis.Redis(host=host, port=ports[0])

    def pipeline(ids: np.ndarray) -> object:
        pipe = client.pipeline(transaction=False)
        for name in tier.keys.names(ids):
            pipe.get(name)
        return pipe.execute()

    return {
        "redis-py, MGET": lambda ids: client.mget(tier.keys.names(ids)),
        "redis-py, pipeline": pipeline,
    }


def cluster_peers(tier: PoolTier, ports: list[int]) -> dict[str, Reader]:
    """Return what redis-py does with a cluster."""
    from redis.cluster import RedisCluster

    client = RedisCluster(host="127.0.0.1", port=ports[0])

    def pipeline(ids: np.ndarray) -> object:
        pipe = client.pipeline()
        for name in tier.keys.names(ids):
            pipe.get(name)
        return pipe.execute()

    return {
        "redis-py, mget_nonatomic": lambda ids: client.mget_nonatomic(tier.keys.names(ids)),
        "redis-py, pipeline": pipeline,
    }


def measured(
    readers: dict[str, Reader], samples: np.ndarray, batch: int, batches: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds a sample by contestant and round, that passed and of this thread.

    Checks once what the pool brings.
    """
    random = np.random.default_rng(1)
    cpu: dict[str, list[float]] = {name: [] for name in readers}

    def timed(name: str) -> float:
        order = random.integers(0, len(samples), (batches, batch), dtype=np.uint32)
        begin, began = time.perf_counter(), time.thread_time()
        for ids in order:
            readers[name](ids)
        cpu[name].append((time.thread_time() - began) / order.size)
        return (time.perf_counter() - begin) / order.size

    results = interleave({name: lambda n=name: timed(n) for name in readers}, rounds)
    ids = random.integers(0, len(samples), batch, dtype=np.uint32)
    packed, found = readers["pool"](ids)  # type: ignore[misc]
    if not (found.all() and (packed.data.reshape(batch, -1) == samples[ids]).all()):
        raise SystemExit("the pool lost samples that nothing evicted")
    return results, cpu


# --- servers and links ---


@contextlib.contextmanager
def running(servers: int, namespace: str = "", host: str = "127.0.0.1") -> Iterator[list[int]]:
    """Run servers, a cluster if there is more than one; yield their ports."""
    if SERVER is None or CLI is None:
        raise Unavailable("left out: neither valkey-server nor redis-server is on PATH")
    prefix = ["ip", "netns", "exec", namespace] if namespace else []
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(servers):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-bench-"))
            port = free_port()
            options = ["--port", str(port), "--bind", host, "--protected-mode", "no"]
            options += ["--save", "", "--maxmemory", "1gb", "--maxmemory-policy", "volatile-ttl"]
            options += ["--cluster-enabled", "yes"] if servers > 1 else []
            process = subprocess.Popen(
                [*prefix, SERVER, *options, "--dir", folder],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(lambda p=process: (p.kill(), p.wait()))
            ports.append(port)
        for port in ports:
            wait_for(host, port)
        if servers > 1:
            nodes = [f"{host}:{port}" for port in ports]
            command = [CLI, "--cluster", "create", *nodes, "--cluster-yes"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            wait_for_cluster(host, ports)
        yield ports


@contextlib.contextmanager
def link() -> Iterator[tuple[str, str]]:
    """Make a link of 1 Gbit/s to a namespace of its own; yield its name and address."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise Unavailable("the link is left out: it needs root, and ip and tc on PATH")
    name = f"stk{os.getpid()}"
    here, there = f"{name}a", f"{name}b"
    limit = "root handle 1: htb default 10"
    rate = "parent 1: classid 1:10 htb rate 1gbit burst 256k cburst 256k"
    commands = [
        f"ip netns add {name}",
        f"ip link add {here} type veth peer name {there} netns {name}",
        f"ip addr add 10.213.77.1/30 dev {here}",
        f"ip link set {here} up",
        f"ip netns exec {name} ip addr add 10.213.77.2/30 dev {there}",
        f"ip netns exec {name} ip link set {there} up",
        f"ip netns exec {name} ip link set lo up",
        f"tc qdisc add dev {here} {limit}",
        f"tc class add dev {here} {rate}",
        f"ip netns exec {name} tc qdisc add dev {there} {limit}",
        f"ip netns exec {name} tc class add dev {there} {rate}",
    ]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                raise Unavailable(f"the link is left out: {command}: {done.stderr.strip()}")
        yield name, "10.213.77.2"
    finally:
        for command in (f"ip link del {here}", f"ip netns del {name}"):
            subprocess.run(command.split(), capture_output=True, check=False)


def free_port() -> int:
    """Return a port that is free, as is the one ten thousand above it, a cluster's bus."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                bus.bind(("127.0.0.1", port + 10_000))
                return port


def wait_for(host: str, port: int) -> None:
    """Wait until a server listens."""
    for _ in range(400):
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
            return
        time.sleep(0.025)
    raise Unavailable(f"left out: no server came up at {host}:{port}")


def wait_for_cluster(host: str, ports: list[int]) -> None:
    """Wait until all servers say that their cluster is complete."""
    import redis

    for port in ports:
        with redis.Redis(host=host, port=port) as client:
            for _ in range(400):
                if client.cluster("info")["cluster_state"] == "ok":
                    break
                time.sleep(0.025)


if __name__ == "__main__":
    main()
