"""Feeding: from far storage to the training loop, against what that storage can give.

Parts (``--part``, several allowed; all by default):

- s3: 6,000 objects of 110 KB on a SeaweedFS server, 7 ms away each way, 60 MB/s; cache 20 %. The
  first epoch against bytes / bandwidth, later ones against (1 - c) of that; then with a disk cache.
- small: 10,000 objects of 3 KB, against a bare client with 64 requests under way.
- posix: files behind FUSE, late and narrow, against torch's DataLoader with 4 workers; against a
  bare reader of 32 threads.
- stall: the wait for batches from such files where the limit formula says that there need not be
  any, and what torch takes to hand over batches from memory.
- compute: files in the page cache and a slower model, against training from memory.
- flight: reads of the storage against misses, with ranks, workers and jobs that share a cache.
- belady: hits by next use through the Loader, by bytes and by number.
- peers: litData's raw streaming and webdataset from the storage of part s3.

The accelerator sleeps unless a row says otherwise. A contestant runs in a process of its own;
``cpu_s`` is all that it and its children used, after its imports.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from feed_servers import Unavailable
from harness import Report, parser, show

PARTS = ("s3", "small", "posix", "stall", "compute", "flight", "belady", "peers")


def main() -> None:
    """Parse the arguments, run the parts, print a report for each."""
    arguments = parser(__doc__)
    arguments.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    arguments.add_argument("--data", type=Path, help="folder of class folders of JPEG files")
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-feed-") as folder:
        # Caches, processes and listings of this run only.
        os.environ["STOKER_RUNTIME_DIR"] = str(Path(folder) / "run")
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        for name in args.part:
            report = Report(f"Feeding: {name}", args.smoke)
            try:
                _part(name)(report, args, Path(folder))
            except Unavailable as reason:
                report.remarks.append(f"left out: {reason}")
            show(args, report, part=name)


def _part(name: str):
    import feed_local
    import feed_peers
    import feed_posix
    import feed_s3

    return {
        "s3": feed_s3.large,
        "small": feed_s3.small,
        "posix": feed_posix.posix,
        "stall": feed_posix.stall,
        "compute": feed_local.compute,
        "flight": feed_local.flight,
        "belady": feed_local.belady,
        "peers": feed_peers.peers,
    }[name]


if __name__ == "__main__":
    main()
