"""Data sets in other formats, against the libraries that they come from.

Parts (``--part``, several allowed; all by default):

- slow: Parquet of 1 million rows of 1 to 4 KB in 100 row groups, shuffled, from a folder behind 10
  ms a read and 100 MB/s, and ``datasets``' Arrow file there, wrapped, against shuffled rows of
  ``datasets``. To open that file, which is not counted, reads three quarters of it into the page
  cache. Of data larger than memory nothing would be there, so these pages are dropped before rows
  are read, but for one of the figures.
- cached: the same rows from a cache that holds them all, against pyarrow's scan of the files. Both
  deliver 1,024 rows at a time as one array of bytes and one of offsets: pyarrow in the order of the
  files, as a RecordBatch, Stoker in a new random order each epoch, as a Packed.
- s3: bytes that leave an S3 server in an epoch with a cache of 20 % that is warm.
- mds: an epoch of MDS shards, against StreamingDataset's where mosaicml-streaming is installed, and
  the reads that it makes of local shards; and behind 60 MB/s, where it fetches each shard once an
  epoch if its cache does not hold all: against that at 60 MB/s by the clock, and as two threads get
  them there, in turns.
- tokens: windows of 4 and 64 KB at random from a file of 4 GB in the page cache, against copying as
  many windows out of 512 MB of memory, at random, and against the system calls alone, into memory
  that stays; by processor time, which is one thread's.
- packing: how full rows of 2,048 tokens are, of texts whose lengths are log-normal.

Rows are random bytes, which do not compress, in files that pyarrow writes by default but for the
size of row groups. ``--rows`` and ``--gigabytes`` make it smaller. ``cpu_us`` is the processor time
of all processes, per row.
"""

from __future__ import annotations

import argparse
import os
import struct
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from feed_process import cpu_seconds
from feed_servers import Unavailable, s3, slow_folder
from harness import Report, interleave, paired_ratio, parser, show

import stoker
from stoker import _core
from stoker.source import MDSSource, NumpySource, ParquetSource, Source

GROUPS, FILES = 100, 10
COLUMN = "x"
BATCH = 256


def main() -> None:
    """Parse the arguments, run the parts, print a report for each."""
    arguments = parser(__doc__)
    arguments.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    arguments.add_argument("--rows", type=int, default=1_000_000, help="of the Parquet files")
    arguments.add_argument("--gigabytes", type=float, default=4.0, help="of the token file")
    args = arguments.parse_args()
    if args.smoke:
        args.rows, args.gigabytes, args.rounds = 4_000, 0.02, 1
    for name in args.part:
        with tempfile.TemporaryDirectory(prefix="stoker-formats-") as folder:
            os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
            report = Report(f"Formats: {name}", args.smoke)
            try:
                PARTS[name](report, args, Path(folder))
            except Unavailable as reason:
                report.remarks.append(f"left out: {reason}")
            show(args, report, part=name)


# ---- Parquet ----


def slow(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Shuffled rows from slow storage: epochs of ours, and some rows of ``datasets``."""
    import datasets

    near = folder / "near"
    write_parquet(near, args.rows)
    arrow = write_arrow(near, folder).name
    some = 50 if args.smoke else 500
    with slow_folder(near, 10, 10, 100, 0) as far:

        def by_datasets(drops: bool) -> float:
            table = opened().shuffle(seed=int(time.time()), keep_in_memory=True)
            if drops:
                drop_pages()
            began = time.perf_counter()
            for row in range(some):
                table[row]
            return (time.perf_counter() - began) / some

        def opened() -> datasets.Dataset:
            return datasets.Dataset.from_file(str(far / arrow))

        def drop_pages() -> None:
            (far / arrow).open("rb").close()  # the kernel keeps no data from one open to the next

        def by_stoker() -> float:
            source = ParquetSource(str(far / "*.parquet"), columns=COLUMN)
            with feed_of(source, cache="20%") as feed:
                return epoch(feed) / args.rows

        def by_wrap() -> float:
            data = stoker.wrap(opened())
            how = {"cache": "20%", "recipe": f"foresight:block={min(1000, args.rows // 20)}"}
            with stoker.Loader(data, BATCH, num_workers=2, **how) as loader:
                drop_pages()
                first = epoch(loader) / args.rows
                report.row(reader="Stoker, wrap(Dataset), first epoch", us_a_row=1e6 * first)
                drop_pages()
                return epoch(loader) / args.rows

        contestants = {  # with the rows that their processor time is of
            "datasets, as opening leaves the page cache": (lambda: by_datasets(False), some),
            "datasets": (lambda: by_datasets(True), some),
            "Stoker, Parquet": (by_stoker, args.rows),
            "Stoker, wrap(Dataset), second epoch": (by_wrap, 2 * args.rows),
        }
        results = measured(
            report,
            {name: run for name, (run, _) in contestants.items()},
            1 if args.smoke else min(args.rounds, 3),
            {name: rows for name, (_, rows) in contestants.items()},
        )
    with_pages, without, parquet, wrapped = results.values()
    name = "shuffled rows of Parquet from slow storage, speed to datasets"
    report.target(f"{name}, pages kept", paired_ratio(with_pages, parquet), 20, at_least=True)
    report.target(name, paired_ratio(without, parquet), 20, at_least=True)
    name = "rows of a wrapped Dataset from slow storage, speed to shuffled access"
    report.target(f"{name}, pages kept", paired_ratio(with_pages, wrapped), 100, at_least=True)
    report.target(name, paired_ratio(without, wrapped), 100, at_least=True)


def cached(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Rows of a cache that holds all, against a scan of files in the page cache."""
    import pyarrow.parquet as pq

    near = folder / "near"
    write_parquet(near, args.rows)
    files = sorted(near.glob("*.parquet"))

    def by_pyarrow() -> float:
        began, rows = time.perf_counter(), 0
        for file in files:
            for batch in pq.ParquetFile(file).iter_batches(_LARGE, columns=[COLUMN]):
                rows += batch.num_rows
        return (time.perf_counter() - began) / rows

    source = ParquetSource(near, columns=COLUMN)
    how = {"cache": "100%", "recipe": "oracle", "decode": "packed"}  # which loads all before
    with stoker.Feed(source, _LARGE, decode_threads=1, **how) as feed:
        began = time.perf_counter()
        epoch(feed)
        loading = 1e6 * (time.perf_counter() - began) / args.rows
        report.row(reader="Stoker, loading and the first epoch", us_a_row=loading)
        results = measured(
            report,
            {"pyarrow's scan": by_pyarrow, "Stoker, shuffled": lambda: epoch(feed) / args.rows},
            1 if args.smoke else min(args.rounds, 5),
            dict.fromkeys(("pyarrow's scan", "Stoker, shuffled"), args.rows),
        )
        report.row(reader="Stoker, shuffled", hits=round(feed.stats.hit_ratio, 3))
    ratio = paired_ratio(results["pyarrow's scan"], results["Stoker, shuffled"])
    report.target("all rows cached, speed to pyarrow's scan", ratio, 0.9, at_least=True)


_LARGE = 1024  # rows of a batch, where what a batch costs is to be small beside its rows


def from_s3(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Bytes that leave a server in an epoch, of those that a cache of 20 % cannot have."""
    near = folder / "near"
    write_parquet(near, args.rows)
    with s3(7, 60) as bucket:
        total = 0
        for file in sorted(near.glob("*.parquet")):
            bucket.put(f"train/{file.name}", file.read_bytes())
            total += file.stat().st_size
        where = f"{bucket.url}/train/*.parquet"
        source = ParquetSource(where, columns=COLUMN, storage_options=bucket.options())
        with feed_of(source, cache="20%") as feed:
            epoch(feed)  # warms it
            for _ in range(1 if args.smoke else 2):
                bucket.clock.reset()
                seconds = epoch(feed)
                needed = 0.8 * total
                report.row(
                    reader="Stoker",
                    MB=bucket.clock.answered / 1e6,
                    MB_needed=needed / 1e6,
                    seconds=seconds,
                    MB_per_s=bucket.clock.answered / 1e6 / seconds,
                )
            ratio = bucket.clock.answered / needed
    report.target("bytes read of the bytes needed, c = 20 %, warm", ratio, 1.3)


def feed_of(source: Source, cache: str) -> stoker.Feed:
    """Return a feed of raw samples, in blocks that are as large as what is read at once.

    Such a block is a page here, of 1,024 rows or so. Batches are in one piece, as Arrow's are.
    """
    runs = np.diff(source.breaks, prepend=0, append=len(source))
    block = min(int(runs.max()), len(source) // 20)
    recipe = f"foresight:block={block}"
    return stoker.Feed(source, BATCH, decode_threads=2, cache=cache, recipe=recipe, decode="packed")


def epoch(feed: stoker.Feed | stoker.Loader) -> float:
    """Return the seconds that an epoch takes."""
    began = time.perf_counter()
    for batch in feed:
        assert len(batch)
    return time.perf_counter() - began


def write_parquet(folder: Path, rows: int) -> None:
    """Write random rows of 1 to 4 KB, GROUPS row groups in FILES files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    rng = np.random.default_rng(0)
    in_group = rows // GROUPS
    for number in range(FILES):
        with pq.ParquetWriter(
            folder / f"{number}.parquet", pa.schema([(COLUMN, pa.binary())])
        ) as to:
            for _ in range(GROUPS // FILES):
                to.write_table(random_table(rng, in_group), row_group_size=in_group)


def random_table(rng: np.random.Generator, rows: int) -> Any:
    """Return a table of random bytes."""
    import pyarrow as pa

    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(rng.integers(1000, 4000, rows), out=offsets[1:])
    data = rng.bytes(int(offsets[-1]))
    column = pa.Array.from_buffers(
        pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    return pa.table({COLUMN: column})


def write_arrow(folder: Path, scratch: Path) -> Path:
    """Return the Arrow file that ``datasets`` makes of the Parquet files, beside them."""
    import datasets

    datasets.disable_progress_bars()
    files = [str(path) for path in sorted(folder.glob("*.parquet"))]
    made = datasets.Dataset.from_parquet(files, cache_dir=str(scratch / "datasets"))
    path = folder / "rows.arrow"
    table = made.data.table
    import pyarrow as pa

    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)  # as datasets writes it
    return path


# ---- MDS ----


def mds(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """An epoch of plain shards in the page cache, and behind a narrow line."""
    near = folder / "near"
    rows = args.rows // 10
    num_bytes = write_mds(near, rows)
    source = MDSSource(near)
    order = np.random.default_rng(1).permutation(rows)

    def as_streaming() -> float:
        began = time.perf_counter()
        for row in order.tolist():
            read_as_streaming(near, row)
        return (time.perf_counter() - began) / rows

    contestants = {"StreamingDataset's reads": as_streaming}
    try:
        contestants["StreamingDataset"] = streaming_epoch(near, rows)
    except ImportError as error:
        report.remarks.append(f"StreamingDataset itself left out: {error}")
    with stoker.Feed(source, BATCH, decode_threads=2, cache="20%", decode=source.decode) as feed:
        contestants["Stoker"] = lambda: epoch(feed) / rows
        rounds = 1 if args.smoke else min(args.rounds, 5)
        results = measured(report, contestants, rounds, dict.fromkeys(contestants, rows))
    if "StreamingDataset" in results:
        ratio = paired_ratio(results["StreamingDataset"], results["Stoker"])
        name = "epoch of local MDS shards, speed to StreamingDataset"
        report.target(name, ratio, 1, at_least=True)
    with slow_folder(near, 2, 2, 60, 0) as far:

        def each_shard_once() -> float:
            began = time.perf_counter()
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(Path.read_bytes, sorted(far.glob("*.mds"))))
            return (time.perf_counter() - began) / rows

        recipe = f"foresight:block={max(16, rows // 40)}"
        far_source = MDSSource(far)
        with stoker.Feed(far_source, BATCH, decode_threads=2, cache="40%", recipe=recipe) as feed:
            epoch(feed)
            name = "Stoker, cache of 40 %"
            contestants = {"each shard once": each_shard_once, name: lambda: epoch(feed) / rows}
            results = measured(report, contestants, rounds, dict.fromkeys(contestants, rows))
    at_line_rate = num_bytes / 60e6 / rows
    report.row(reader="each shard once, at 60 MB/s by the clock", us_a_row=1e6 * at_line_rate)
    ratio = at_line_rate / float(np.median(results[name]))
    report.target("MDS behind 60 MB/s, speed to each shard once", ratio, 1.3, at_least=True)
    ratio = paired_ratio(results["each shard once"], results[name])
    report.target("the same, to reading it there in turns", ratio, 1.3, at_least=True)


def streaming_epoch(folder: Path, rows: int) -> Callable[[], float]:
    """Return what reads an epoch with the library itself; raises ImportError without it."""
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)

    def run() -> float:
        began = time.perf_counter()
        seen = sum(1 for _ in dataset)
        assert seen == rows
        return (time.perf_counter() - began) / rows

    return run


_SHARD = 64 << 20  # bytes, as MosaicML's writer makes them


def write_mds(folder: Path, rows: int) -> int:
    """Write rows of random bytes and a number as MDS shards; return their bytes."""
    import json

    folder.mkdir()
    rng = np.random.default_rng(0)
    shards, row, total = [], 0, 0
    while row < rows:
        records: list[bytes] = []
        size = 0
        while row < rows and size < _SHARD:
            value = rng.bytes(int(rng.integers(1000, 4000)))
            records.append(struct.pack("<Iq", len(value), row) + value)
            size += len(records[-1])
            row += 1
        bounds = np.cumsum([4 * (len(records) + 2), *map(len, records)]).astype("<u4")
        data = struct.pack("<I", len(records)) + bounds.tobytes() + b"".join(records)
        name = f"shard.{len(shards):05d}.mds"
        (folder / name).write_bytes(data)
        total += len(data)
        shards.append(
            {
                "column_encodings": ["int", "bytes"],
                "column_names": ["n", "x"],
                "column_sizes": [8, None],
                "compression": None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(records),
                "size_limit": _SHARD,
                "version": 2,
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    _FIRSTS[folder] = np.cumsum([0, *(shard["samples"] for shard in shards)])
    return total


_FIRSTS: dict[Path, np.ndarray] = {}


def read_as_streaming(folder: Path, row: int) -> dict[str, Any]:
    """Return a sample by the reads that its reader makes: a file opened, two reads, all columns."""
    firsts = _FIRSTS[folder]
    shard = int(np.searchsorted(firsts, row, "right")) - 1
    with (folder / f"shard.{shard:05d}.mds").open("rb", 0) as file:
        file.seek(4 * (1 + row - int(firsts[shard])))
        begin, end = np.frombuffer(file.read(8), "<u4").tolist()
        file.seek(begin)
        data = file.read(end - begin)
    (length,) = np.frombuffer(data[:4], "<u4").tolist()
    return {"n": np.frombuffer(data[4:12], np.int64)[0], "x": data[12 : 12 + length]}


# ---- tokens ----

_IN_MEMORY = 512 << 20  # bytes, many times what processors cache


def tokens(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Windows at random from the page cache, against copying them in memory."""
    path = folder / "tokens.bin"
    chunk = np.random.default_rng(0).integers(0, 1 << 16, 4 << 20, dtype=np.uint16)
    with path.open("wb") as file:
        for _ in range(max(1, int(args.gigabytes * 1e9) // chunk.nbytes)):
            file.write(chunk.tobytes())
    memory = np.fromfile(path, np.uint8, _IN_MEMORY)
    for kilobytes in (4, 64):
        window = kilobytes << 10
        source = NumpySource(path, dtype=np.uint16, shape=(window // 2,))
        count = max(1, len(source) // (kilobytes * 8))
        order = np.random.default_rng(1).permutation(len(source))[:count].astype(np.uint32)
        batches = np.array_split(order, max(1, count // BATCH))
        rows = memory[: len(memory) // window * window].reshape(-1, window)
        of_memory = [batch % len(rows) for batch in batches]

        def by_stoker(source: NumpySource = source, batches: Any = batches) -> float:
            began = time.process_time()
            for batch in batches:
                source.read_packed(batch)
            return time.process_time() - began

        def by_copy(rows: np.ndarray = rows, batches: Any = of_memory) -> float:
            began = time.process_time()
            for batch in batches:
                rows[batch]
            return time.process_time() - began

        def by_calls(window: int = window, batches: Any = batches) -> float:
            bounds = window * np.arange(1 + max(map(len, batches)))
            into, done = np.empty(bounds[-1], np.uint8), np.zeros(len(bounds) - 1, np.bool_)
            places = [
                (np.zeros(len(batch), np.int64), window * batch.astype(np.int64))
                for batch in batches
            ]
            with path.open("rb", 0) as file:
                began = time.process_time()
                for files, starts in places:
                    n = len(files)
                    room, ends = into[: bounds[n]], bounds[: n + 1]
                    _core.read_cached(file.fileno(), 0, files, starts, ends, room, done[:n])
                    assert done[:n].all(), "the page cache does not hold the file"
                return time.process_time() - began

        results = interleave(
            {"copies in memory": by_copy, "system calls": by_calls, "NumpySource": by_stoker},
            1 if args.smoke else min(args.rounds, 5),
        )
        for name, seconds in results.items():
            speed = count * window / float(np.median(seconds)) / 1e9
            report.row(window=f"{kilobytes} KB", reader=name, GB_per_cpu_s=speed)
            if name == "NumpySource":
                unit = "GB a processor second"
                report.target(f"windows of {kilobytes} KB", speed, 2, unit, at_least=True)


def packing(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """How full rows are, by how long most texts are and whether they may be cut."""
    rng = np.random.default_rng(0)
    count = 2_000 if args.smoke else 200_000
    worst = 1.0
    for median in (100, 250, 500, 900):
        lengths = rng.lognormal(np.log(median), 1, count).astype(np.int64) + 1
        lengths = np.minimum(lengths, _ROW)
        for cut in (False, True):
            method = stoker.Packing(_ROW, rows=8, cut=cut)
            began = time.process_time()
            _, bounds = method.group(lengths, rng)
            seconds = time.process_time() - began
            full = lengths.sum() / ((len(bounds) - 1) * method.places)
            worst = min(worst, full)
            report.row(median=median, cut=cut, full=f"{full:.2%}", cpu_us=1e6 * seconds / count)
    report.target("packing, the least full", worst, 0.97, at_least=True)


_ROW = 2048  # tokens


# ---- common ----


def measured(
    report: Report,
    contestants: dict[str, Callable[[], float]],
    rounds: int,
    rows: dict[str, int],
) -> dict[str, list[float]]:
    """Run contestants that return seconds a row; add them to the report, and return the figures."""
    spent: dict[str, list[float]] = {name: [] for name in contestants}

    def timed(name: str) -> Callable[[], float]:
        def run() -> float:
            before = cpu_seconds()
            figure = contestants[name]()
            spent[name].append((cpu_seconds() - before) / rows[name])
            return figure

        return run

    results = interleave({name: timed(name) for name in contestants}, rounds, warm_up=rounds > 1)
    for name, seconds in results.items():
        report.row(
            reader=name,
            us_a_row=1e6 * float(np.median(seconds)),
            cpu_us=1e6 * float(np.median(spent[name])),
        )
    return results


PARTS: dict[str, Callable[[Report, argparse.Namespace, Path], None]] = {
    "slow": slow,
    "cached": cached,
    "s3": from_s3,
    "mds": mds,
    "tokens": tokens,
    "packing": packing,
}


if __name__ == "__main__":
    main()
