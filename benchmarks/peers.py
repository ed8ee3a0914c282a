"""The stores that Stoker's arena is compared with: plain memcpy, LMDB on /dev/shm, Redis.

Each peer holds ``count`` samples of ``size`` bytes and reads a batch of them by index, as fast as
its usual Python client does. A peer that is not there returns a reason instead.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from stoker.shared import SharedArray

Reader = Callable[[np.ndarray], object]


class Unavailable(Exception):
    """A peer that cannot take part; the message says why."""


@contextlib.contextmanager
def memcpy(samples: np.ndarray) -> Iterator[Reader]:
    """Copy rows of u8[count, size] into one buffer that was touched before.

    ``np.take`` along the first axis is one memcpy a row; ``mode="clip"`` keeps it from buffering.
    """
    out: dict[int, np.ndarray] = {}

    def read(index: np.ndarray) -> object:
        if len(index) not in out:
            out[len(index)] = np.zeros((len(index), samples.shape[1]), np.uint8)
        return np.take(samples, index, axis=0, out=out[len(index)], mode="clip")

    yield read


@contextlib.contextmanager
def memcpy_fresh(samples: np.ndarray) -> Iterator[Reader]:
    """Copy rows of u8[count, size] into memory allocated for the batch, as any reader must."""
    yield lambda index: np.take(samples, index, axis=0, mode="clip")


@contextlib.contextmanager
def memcpy_shared(samples: np.ndarray) -> Iterator[Reader]:
    """Copy rows that lie in shared memory, as a cache that processes share must.

    The kernel gives private memory pages of 2 MiB, and shared memory pages of 4 KiB unless its
    administrator says otherwise: the misses of the address cache show in samples of 110 KB.
    """
    shared = SharedArray.copy_of(samples)
    yield lambda index: np.take(shared.array, index, axis=0, mode="clip")


@contextlib.contextmanager
def lmdb_shm(samples: np.ndarray) -> Iterator[Reader]:
    """LMDB in /dev/shm, one read transaction a batch, each value copied out as ``bytes``."""
    try:
        import lmdb
    except ImportError as error:
        raise Unavailable(f"LMDB left out: {error}") from error
    if shutil.disk_usage("/dev/shm").free < 2 * samples.nbytes:
        raise Unavailable("LMDB left out: /dev/shm is too small for the set")
    folder = tempfile.mkdtemp(prefix="stoker-bench-", dir="/dev/shm")
    try:
        env = lmdb.open(
            folder, map_size=3 * samples.nbytes + (64 << 20), sync=False, metasync=False, lock=False
        )
        with env.begin(write=True) as transaction:
            for number, sample in enumerate(samples):
                transaction.put(number.to_bytes(4, "big"), sample.tobytes(), append=True)

        def read(index: np.ndarray) -> object:
            with env.begin(buffers=False) as transaction:
                return [transaction.get(number.to_bytes(4, "big")) for number in index.tolist()]

        yield read
        env.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def redis_pipeline(samples: np.ndarray) -> Iterator[Reader]:
    """A Redis server of its own on a Unix socket, one pipeline of GETs a batch."""
    try:
        import redis
    except ImportError as error:
        raise Unavailable(f"Redis left out: {error}") from error
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        raise Unavailable("Redis left out: no redis-server or valkey-server on PATH")
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        socket = str(Path(folder) / "redis.sock")
        options = ["--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no"]
        process = subprocess.Popen(
            [server, *options, "--dir", folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            client = redis.Redis(unix_socket_path=socket)
            _await(client)
            for start in range(0, len(samples), 256):
                part = samples[start : start + 256]
                client.mset({start + i: sample.tobytes() for i, sample in enumerate(part)})

            def read(index: np.ndarray) -> object:
                pipeline = client.pipeline(transaction=False)
                for number in index.tolist():
                    pipeline.get(number)
                return pipeline.execute()

            yield read
            client.close()
        finally:
            process.terminate()
            process.wait(10)


def _await(client: object) -> None:
    """Wait until the server answers; raises Unavailable after ten seconds."""
    import redis

    for _ in range(200):
        with contextlib.suppress(redis.ConnectionError):
            client.ping()  # type: ignore[attr-defined]
            return
        time.sleep(0.05)
    raise Unavailable("Redis left out: its server did not answer within 10 s")
