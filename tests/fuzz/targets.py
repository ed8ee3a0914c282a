"""The parsers of bytes that come from outside of the process, and good inputs of each.

Not here: what is unpickled from a private channel between a process and its own child (see
tests/test_no_unpickling.py), and the parsers in C++ (see fuzz).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import socket
import struct
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from fuzz.harness import Target
from stoker import _core
from stoker.bundles import package
from stoker.epoch.codec import decode, encode
from stoker.epoch.trace_file import Kind, TraceReader, TraceWriter
from stoker.errors import ConfigError, SampleCorrupt, SegmentError, SourceError, StateMismatch
from stoker.images import Train, decode_image
from stoker.jobs import protocol
from stoker.jobs.service import Service
from stoker.node import messages, rendezvous
from stoker.node.messages import Channel
from stoker.node.supervised import Members
from stoker.policy.baselines import LRU
from stoker.pool import values as pool_frame
from stoker.pool.pool_address import PoolAddress
from stoker.prefetch.prefetcher import Job
from stoker.prefetch.process import Rank
from stoker.sim.trace import Trace
from stoker.source import (
    ArrowSource,
    MDSSource,
    NumpySource,
    ParquetSource,
    Source,
    TFRecordSource,
    row_source,
)
from stoker.source.held import MemorySource
from stoker.source.image_folder import FolderCache, list_folder
from stoker.source.listing import ListingCache
from stoker.source.packed import Packed, join_parts, split_parts
from stoker.source.shard_index import ShardIndex, index_of, members
from stoker.source.shards import expand
from stoker.store.arena import Arena
from stoker.store.disk import MARKER, CacheDir, DiskMeta
from stoker.store.memory_tier import MemoryTier
from stoker.tiering.config import read_config, read_order
from stoker.types import parse_bytes

# ---- archives, parts, images ----


def tar(folder: Path) -> Target:
    def parse(data: bytes) -> None:
        def read(start: int, length: int) -> memoryview:
            return memoryview(data)[start : start + length]

        found = list(members(read, len(data), 1 << 16))
        known = _by_tarfile(data)
        if known is not None:
            assert [(m.start, m.size) for m in found][: len(known)] == known[: len(found)]
        index = index_of([found], str)
        again = ShardIndex.from_arrays(index.as_arrays())
        assert again.fingerprint == index.fingerprint
        assert again.extensions == index.extensions
        assert ((index.starts >= 0) & (index.starts + index.sizes <= len(data))).all()
        assert again.framed_sizes().min() >= 0

    seeds = [
        _tar(form, names)
        for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
        for names in (["a.jpg", "a.cls", "b.jpg"], ["f" * 120 + "/ü.x"])
    ]
    return Target(parse, (SampleCorrupt, ConfigError), seeds, _with_tar_sums)


def _tar(form: int, names: list[str]) -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w", format=form) as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 10
            archive.addfile(info, io.BytesIO(b"0123456789"))
    return into.getvalue()[:8192]


def _by_tarfile(data: bytes) -> list[tuple[int, int]] | None:
    """Return what the standard library finds; None if it cannot read it."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            return [(m.offset_data, m.size) for m in archive if m.isreg()]
    except Exception:
        return None


def _with_tar_sums(data: bytes) -> bytes:
    blocks = bytearray(data)
    for at in range(0, len(blocks) - 511, 512):
        if blocks[at + 257 : at + 262] == b"ustar":
            blocks[at + 148 : at + 156] = b" " * 8
            blocks[at + 148 : at + 156] = b"%06o\0 " % sum(blocks[at : at + 512])
    return bytes(blocks)


def parts(folder: Path) -> Target:
    def parse(data: bytes) -> None:
        found = split_parts(data)
        assert sum(map(len, found.values())) <= len(data)

    return Target(parse, (SampleCorrupt,), [join_parts({"jpg": b"123", "cls": b"4"}), b""])


def image(folder: Path) -> Target:
    train = Train(8, (0.08, 0.2), max_pixels=10_000)

    def parse(data: bytes) -> None:
        pixels = decode_image(data, 10_000)
        assert pixels.dtype == np.uint8 and pixels.size <= 30_000
        upper = train(data, np.random.default_rng(len(data)))  # some of its rows, of a JPEG
        assert upper.shape == (3, 8, 8)

    seeds = []
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"):
        into = io.BytesIO()
        Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3)).save(into, kind)
        seeds.append(into.getvalue())
    into = io.BytesIO()
    Image.fromarray(np.arange(4800, dtype=np.uint8).reshape(80, 20, 3)).save(into, "JPEG")
    return Target(parse, (SampleCorrupt,), [*seeds, into.getvalue()])


# ---- what lies in a pool, in a package, in a cache ----


def sample(folder: Path) -> Target:
    def parse(data: bytes) -> None:
        assert type(encode(decode(memoryview(data)))) is bytes

    values: list[Any] = [
        (np.arange(12, dtype=np.uint8).reshape(2, 2, 3), 3),
        {"x": torch.arange(4.0).reshape(2, 2).t(), 1: [None, True, 2**70, 1j, b"raw", "text"]},
        [np.array(["a", "bc"]), np.float32(2), np.arange(2).view("M8[s]"), np.array([True])],
        Image.new("P", (4, 4), 1),
    ]
    return Target(parse, (SampleCorrupt,), [encode(value) for value in values], made=_message)


_NAMES = ["<i4", "|u1", "<f8", "|b1", "|O", "<U1", "S2", "M8[s]", "|V4", "float32", "bool", "RGB"]
_LEAVES = [None, True, 0.5, b"1234", b"", "", "P", "I;16", "9" * 40, *_NAMES]
_NUMBERS = [0, 1, 2, 3, 4, 8, 12, -1, 1 << 31, 1 << 62]


def _message(random: Random) -> bytes:
    """Return a message of our own kinds with arguments as they should not be."""
    head = msgspec.msgpack.encode(_tree(random, 4))
    return struct.pack("<BI", 2, len(head)) + head + random.randbytes(random.randint(0, 48))


def _tree(random: Random, depth: int) -> Any:
    kind = random.randint(0, 3 if depth else 2)
    if kind == 0:
        return random.choice(_LEAVES)
    if kind == 1:
        return random.choice(_NUMBERS)
    if kind == 2:
        return [random.choice(_NUMBERS) for _ in range(random.randint(0, 3))]
    rest = [_tree(random, depth - 1) for _ in range(random.randint(0, 5))]
    if random.randint(0, 1) and rest:  # as arrays, tensors and scalars begin
        rest[0] = random.choice(_NAMES)
    return [random.randint(0, 9), *rest]


def pool_value(folder: Path) -> Target:
    owner = b"o" * pool_frame.OWNER_BYTES
    ids = np.array([5], np.uint32)

    def parse(data: bytes) -> None:
        found, there, refused = pool_frame.unseal(ids, [data], owner)
        assert there.sum() + refused == 1
        if there[0]:
            decode(found.data.data[found.offsets[0] : found.offsets[1]])

    def mend(data: bytes) -> bytes:
        body = np.frombuffer(bytearray(data[pool_frame.HEAD_BYTES :]), np.uint8)
        return pool_frame.seal(ids, Packed(body, np.array([0, len(body)])), owner)[0]

    seeds = [mend(b"?" * pool_frame.HEAD_BYTES + encode((np.arange(5), "label")))]
    return Target(parse, (SampleCorrupt,), seeds, mend)


def stored_package(folder: Path) -> Target:
    stamp = package.stamp_of("data", 100)
    fixed = struct.Struct("<8sII16sQII")

    def parse(data: bytes) -> None:
        with suppress(SegmentError):
            package.head_bytes(data)
        found = package.decode(data, stamp, 100)
        assert package.decode_ids(data, stamp, 100).tolist() == found.ids.tolist()
        assert (found.ids < 100).all() and found.samples.offsets[-1] == len(found.samples.data)

    def mend(data: bytes) -> bytes:
        """Make all sums right, whatever the head says of its length."""
        if len(data) < fixed.size:
            return data
        magic, version, count, _, _, _, _ = fixed.unpack_from(data)
        length = min(len(data), fixed.size + 12 * count + 8)
        payload = data[length:]
        crc = _core.crc32c(np.frombuffer(payload, np.uint8))
        head = bytearray(fixed.pack(magic, version, count, stamp, len(payload), crc, 0))
        head += data[fixed.size : length]
        struct.pack_into("<I", head, fixed.size - 4, _core.crc32c(np.frombuffer(head, np.uint8)))
        return bytes(head) + payload

    good = package.Package(
        np.array([3, 50, 7], np.uint32),
        Packed(np.arange(9, dtype=np.uint8), np.array([0, 2, 2, 9])),
    )
    seeds = [b"".join(package.encode(good, stamp))]
    return Target(parse, (SegmentError,), seeds, mend)


def disk_description(folder: Path) -> Target:
    place = folder / "cache"
    place.mkdir()
    (place / MARKER).touch()
    (place / "samples.stoker").write_bytes(b"not empty")
    wanted = DiskMeta("key", 10, 1000, 100)

    def parse(data: bytes) -> None:
        (place / "meta.json").write_bytes(data)
        assert CacheDir(place).check(wanted).num_ids == 10

    seeds = [json.dumps(vars(wanted)).encode()]
    return Target(parse, (ConfigError, StateMismatch), seeds, is_json=True)


# ---- messages ----


def announcement(folder: Path) -> Target:
    """What a process that holds a cache says to one that looks for it."""
    path = folder / "s"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def parse(data: bytes) -> None:
        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            said, _, _ = rendezvous.inquire(path, timeout=5)
            json.dumps(vars(said))
        finally:
            thread.join()

    said = rendezvous.Announcement(
        "key", "t" * 32, "data", 100, [{"name": "all"}], {"n": 1}, {}, "arena"
    )
    seeds = [json.dumps({"stoker": 2, **vars(said)}).encode() + b"\n"]
    return Target(parse, (OSError,), seeds, is_json=True, close=listener.close)


def service_request(folder: Path) -> Target:
    """What anybody of the group may say to ``stoker serve``."""
    with _environment(XDG_RUNTIME_DIR=folder):
        service = Service()

    def parse(data: bytes) -> None:
        with _environment(XDG_RUNTIME_DIR=folder):
            for is_owner in (False, True, True):  # twice: an answer may leave something behind
                answer = service.answer(messages.parse(data, protocol.VERSION), is_owner=is_owner)
                assert json.dumps(answer, default=str)

    region = {"name": "all", "share": 1.0}
    seeds = [
        json.dumps({"stoker": 1, "ask": question, **values}).encode() + b"\n"
        for question, values in [
            ("list", {}),
            ("look", {}),
            ("metrics", {}),
            ("admit", {"name": "a", "memory": 1, "capacity": 1, "regions": [region]}),
            ("admit_disk", {"path": "/x", "size": 5}),
        ]
    ]
    allowed = (ConfigError, ConnectionError)
    return Target(parse, allowed, seeds, is_json=True, close=service.close)


def prefetch_order(folder: Path) -> Target:
    """What a rank says to the prefetch process, which outlives whatever it is."""
    path = folder / "p"
    listener = Channel.listen(path)
    source = MemorySource([b"0123"] * 10)
    arena = Arena(10, 100, 4)
    arena.configure(LRU().regions())
    job = Job(source, MemoryTier(arena, next(iter(arena.stats()["regions"]))))
    ranks = Members(listener, lambda channel: Rank(channel, job, None))

    def parse(data: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(str(path))
            fds = [_memory(40) for _ in range(3)]
            socket.send_fds(connection, [data[: 1 << 16] or b" "], fds)
            for fd in fds:
                os.close(fd)
            for _ in range(3):  # it is let in, heard, and gone
                ranks.attend(0)
        while ranks.all:
            ranks.attend(0)

    orders = [
        {"order": "join", "window_bytes": 10},
        {"order": "segment", "length": 3, "epoch": 1, "generation": 0},
        {"order": "reset"},
    ]

    def close() -> None:
        listener.close()
        arena.close()

    seeds = [json.dumps(order).encode() for order in orders]
    return Target(parse, (), seeds, is_json=True, close=close)


def _memory(size: int) -> int:
    fd = os.memfd_create("fuzz")
    os.truncate(fd, size)
    return fd


# ---- files ----


def trace(folder: Path) -> Target:
    path = folder / "trace"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        with TraceReader(path) as reader:
            for block in reader.blocks:
                reader.read(block)
        with Trace(path) as whole:
            assert len(list(whole)) == len(whole)
            assert len(whole.sizes) >= 0 and isinstance(whole.about, dict)

    return Target(parse, (ConfigError,), [_trace(folder / "good")], _with_trace_sums)


def _trace(path: Path) -> bytes:
    """Return the trace of an epoch of two batches."""
    about = {"dataset": "d", "num_samples": 4, "visited": 4, "recipe": "lru", "seed": 0}
    run = {"batch_size": 2, "world_size": 1, "consumed": 0}
    writer = TraceWriter(path, about, np.array([5, 6, 7, 8]))
    begin = np.frombuffer(json.dumps(run).encode(), np.uint8)
    writer.append(Kind.BEGIN, 0, {"begin": begin})
    rows = {
        "batch_size": np.array([2, 2], np.uint32),
        "position": np.array([0, 2], np.int64),
        "ids": np.array([1, 0, 3, 2], np.uint32),
        "outcomes": np.array([2, 2, 2, 0], np.int8),
        "time": np.array([0.1, 0.2]),
        "stall": np.array([0.0, 0.1]),
    }
    writer.append(Kind.ROWS, 0, rows)
    writer.close()
    return path.read_bytes()


def _with_trace_sums(data: bytes) -> bytes:
    """Make each block's sum right, and the sizes that it states, where it is compressed well."""
    head = struct.Struct("<BIIII")
    out, at = bytearray(data[:8]), 8
    while at + head.size <= len(data):
        kind, epoch, stored, raw, _ = head.unpack_from(data, at)
        body = data[at + head.size : at + head.size + stored]
        check = zlib.crc32(body, zlib.crc32(head.pack(kind, epoch, len(body), raw, 0)))
        out += head.pack(kind, epoch, len(body), raw, check) + body
        at += head.size + len(body)
    return bytes(out)


def listing(folder: Path) -> Target:
    """A stored listing: whatever is in the file, it is used or as good as none."""
    images = folder / "images"
    (images / "c").mkdir(parents=True)
    (images / "c" / "a.jpg").write_bytes(b"1")
    with _environment(XDG_CACHE_HOME=folder):
        cache = ListingCache("question")
        folders = FolderCache(os.fsencode(f"{images}/"), (".jpg",), False)

    def parse(data: bytes) -> None:
        cache.path.write_bytes(data)
        found = cache.load(dict)
        assert found is None or all(isinstance(array, np.ndarray) for array in found.values())
        of_folder.write_bytes(data)
        folders.load(1)

    folders.store(list_folder(os.fsencode(f"{images}/"), (".jpg",), 1, False))
    (of_folder,) = cache.path.parent.iterdir()
    cache.store({"sizes": np.arange(5), "names": np.frombuffer(b"abc", np.uint8)})
    seeds = [path.read_bytes() for path in sorted(cache.path.parent.iterdir())]

    def mend(data: bytes) -> bytes:
        payload = data[49:]
        return data[:17] + hashlib.blake2b(payload, digest_size=32).digest() + payload

    return Target(parse, (), seeds, mend)


def config_toml(folder: Path) -> Target:
    seed = (
        f'source = "{folder}"\nthreads = 3\nrevalidate = 1.5\nsmall = "4MiB"\nfsync = true\n'
        '[[tier]]\npath = "/nvme"\nsize = "1GiB"\n[[tier]]\npath = "/shm"\nsize = 5\n'
    )
    return _config(folder / "c.toml", seed)


def config_yaml(folder: Path) -> Target:
    seed = (
        f"source: {folder}\nthreads: 3\nsmall: 4MiB\ntier:\n- path: /nvme\n  size: 1GiB\n"
        "- &a {path: /shm, size: 5}\n"
    )
    return _config(folder / "c.yaml", seed)


def _config(path: Path, seed: str) -> Target:
    def parse(data: bytes) -> None:
        path.write_bytes(data)
        found = read_config(path, {})
        assert found.tiers and found.threads >= 1 and found.revalidate > 0

    return Target(parse, (ConfigError,), [seed.encode()])


def warm_list(folder: Path) -> Target:
    return _order(folder / "list", [b"# first\na.jpg\n/source/b.jpg\n../c\n", b"a\0b\n\0"])


def importance_scores(folder: Path) -> Target:
    seeds = []
    for save in (np.savez, np.savez_compressed):
        into = io.BytesIO()
        save(into, paths=np.array([b"a", b"b"]), scores=np.array([1.0, np.nan]))
        seeds.append(into.getvalue())
    return _order(folder / "scores.npz", seeds)


def _order(path: Path, seeds: list[bytes]) -> Target:
    def parse(data: bytes) -> None:
        path.write_bytes(data)
        names, skipped = read_order(path, Path("/source"))
        assert skipped >= 0 and all(type(name) is bytes for name in names)

    return Target(parse, (ConfigError,), seeds)


# ---- data sets in other formats ----


def _rows(make: Callable[[], Source]) -> None:
    """Read and decode some samples; each is an error of its own or a value.

    A few bytes may stand for 2^32 nulls, as they should: not here, where memory is bounded.
    """
    with mock.patch.object(row_source, "_MOST_ROWS", 1 << 20):
        source = make()
    with closing(source):
        samples, errors = source.read_each(range(min(len(source), 50)))
        assert all(isinstance(error, SourceError) for error in errors.values())
        for sample in samples:
            if sample is not None:
                with suppress(SampleCorrupt):
                    source.decode(sample)  # type: ignore[attr-defined]


def _of_file(path: Path, make: Callable[[Path], Source], seeds: list[bytes]) -> Target:
    """Return the target of a format whose data sets are single files."""

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        _rows(lambda: make(path))

    return Target(parse, (ConfigError, SourceError), seeds)


def _table(rows: int = 12) -> pa.Table:
    image = pa.array(
        [{"bytes": bytes([i]) * i, "path": f"{i}.png"} for i in range(rows)],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    return pa.table(
        {
            "image": image,
            "label": list(range(rows)),
            "text": [None if i % 5 == 0 else "å" * i for i in range(rows)],
            "box": [[float(i)] * (i % 3) for i in range(rows)],
            "about": [{"words": ["w"] * (i % 3)} for i in range(rows)],
        }
    )


def parquet(folder: Path) -> Target:
    layouts: list[dict[str, Any]] = [
        {"data_page_size": 64, "write_batch_size": 3, "row_group_size": 7},
        {"use_dictionary": False, "compression": "none", "write_page_index": True},
        {"data_page_version": "2.0", "compression": "zstd", "write_page_checksum": True},
    ]
    seeds = []
    for layout in layouts:
        into = io.BytesIO()
        pq.write_table(_table(), into, **layout)
        seeds.append(into.getvalue())
    return _of_file(
        folder / "x.parquet", lambda path: ParquetSource(path, cache_index=False), seeds
    )


def arrow(folder: Path) -> Target:
    table, seeds = _table(), []
    for make, codec in ((pa.ipc.new_file, None), (pa.ipc.new_stream, "lz4")):
        into = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with make(into, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=5)
        seeds.append(into.getvalue())
    return _of_file(folder / "x.arrow", ArrowSource, seeds)


def npy(folder: Path) -> Target:
    seeds = []
    for array in (np.arange(24, dtype=np.float32).reshape(6, 2, 2), np.arange(5, dtype=np.int8)):
        into = io.BytesIO()
        np.save(into, array)
        seeds.append(into.getvalue())
    return _of_file(folder / "x.npy", NumpySource, seeds)


def tfrecord(folder: Path) -> Target:
    records = [b"", b"one", b"another" * 9]
    seed = b"".join(struct.pack("<QI", len(each), 7) + each + bytes(4) for each in records)
    return _of_file(
        folder / "x.tfrecord", lambda path: TFRecordSource(path, cache_index=False), [seed]
    )


_MDS_VALUES = [(b"image" * number, number, f"å{number}".encode()) for number in range(4)]


def _mds_shard() -> bytes:
    """Return a plain shard of the columns ``x: bytes, n: int64, t: str``."""
    samples = [
        struct.pack("<II", len(x), len(t)) + x + struct.pack("<q", n) + t for x, n, t in _MDS_VALUES
    ]
    head = 4 * (len(samples) + 2)
    bounds = np.cumsum([head, *map(len, samples)]).astype("<u4")
    return struct.pack("<I", len(samples)) + bounds.tobytes() + b"".join(samples)


def _mds_index(shard: bytes, packed: bytes | None = None) -> dict[str, Any]:
    raw = {"basename": "shard.00000.mds", "bytes": len(shard), "hashes": {}}
    zipped = None
    if packed is not None:
        zipped = {"basename": "shard.00000.mds.gz", "bytes": len(packed), "hashes": {}}
    about = {
        "column_encodings": ["bytes", "int64", "str"],
        "column_names": ["x", "n", "t"],
        "column_sizes": [None, 8, None],
        "compression": "gz" if zipped else None,
        "format": "mds",
        "hashes": [],
        "raw_data": raw,
        "samples": len(_MDS_VALUES),
        "size_limit": 1 << 20,
        "version": 2,
        "zip_data": zipped,
    }
    return {"version": 2, "shards": [about]}


def _mds_folder(folder: Path) -> tuple[Path, bytes, bytes]:
    shard = _mds_shard()
    packed = gzip.compress(shard, mtime=0)
    place = folder / "mds"
    place.mkdir()
    (place / "shard.00000.mds").write_bytes(shard)
    (place / "shard.00000.mds.gz").write_bytes(packed)
    return place, shard, packed


def mds_index(folder: Path) -> Target:
    """The list of shards, whatever it says of shards that are sound."""
    place, shard, packed = _mds_folder(folder)

    def parse(data: bytes) -> None:
        (place / "index.json").write_bytes(data)
        _rows(lambda: MDSSource(place, cache_index=False))

    seeds = [json.dumps(_mds_index(shard, each)).encode() for each in (None, packed)]
    return Target(parse, (ConfigError, SourceError), seeds, is_json=True)


def mds_shard(folder: Path) -> Target:
    """A shard that is not what a sound list says of it, plain, and packed."""
    place, shard, packed = _mds_folder(folder)

    def parse(data: bytes) -> None:
        for name, zipped in (("shard.00000.mds", None), ("shard.00000.mds.gz", data)):
            (place / name).write_bytes(data)
            (place / "index.json").write_text(json.dumps(_mds_index(shard, zipped)))
            with suppress(ConfigError, SourceError):
                _rows(lambda: MDSSource(place, cache_index=False))

    return Target(parse, (), [shard, packed])


# ---- text ----


def texts(folder: Path) -> Target:
    """Addresses and sizes as a user, or a file that he was given, writes them."""

    def parse(data: bytes) -> None:
        text = data.decode(errors="surrogateescape")
        for read in (PoolAddress.parse, parse_bytes):
            with suppress(ConfigError):
                read(text)
        if text.count("{") < 3:  # a range names many shards in few bytes, as it should
            with suppress(ConfigError):
                expand(re.sub("[0-9]{3,}", "99", text))

    seeds = [
        b"valkeys://u:p%40s@h1:7000,[::1]:7001?timeout=2&ca_certs=f",
        b"1.5 GiB",
        b"train-{000..099}-{a,b}.tar",
    ]
    return Target(parse, (), seeds)


@contextmanager
def _environment(**values: Path) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


TARGETS: dict[str, Callable[[Path], Target]] = {
    make.__name__: make
    for make in (
        tar,
        parts,
        image,
        sample,
        pool_value,
        stored_package,
        disk_description,
        announcement,
        service_request,
        prefetch_order,
        trace,
        listing,
        config_toml,
        config_yaml,
        warm_list,
        importance_scores,
        parquet,
        arrow,
        npy,
        tfrecord,
        mds_index,
        mds_shard,
        texts,
    )
}
