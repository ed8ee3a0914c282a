"""Other loaders on the storage of part s3: litData's raw streaming, and webdataset's shards."""

from __future__ import annotations

import argparse
import contextlib
import io
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from feed_loaders import Objects, Run, tensor_of, through_stoker, train
from feed_process import run_alone
from feed_s3 import LARGE, MB_PER_S, SHARE, add_epochs, far_bucket
from feed_servers import Bucket
from harness import Report
from torch.utils.data import DataLoader

_IN_A_SHARD = 250


def peers(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Two epochs each; a peer that is not installed is named with the reason."""
    count = 300 if args.smoke else 6_000
    with far_bucket() as bucket:
        bucket.fill("large", count, LARGE)
        shards = _fill_shards(bucket, count)
        place = Objects(bucket, "large")
        run = Run(2, 64, 4, 2_000, {"cache": f"{SHARE:.0%}"})
        contestants = {
            "Stoker, cache 20 %": (through_stoker, place, run),
            "litData, raw streaming": (through_litdata, place, run),
            "webdataset, tar shards": (through_webdataset, bucket, shards, run),
        }
        rounds = 1 if args.smoke else min(args.rounds, 3)
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name, (work, *what) in contestants.items():
                results[name].append(run_alone(work, *what))
        for name, found in results.items():
            if "left_out" in found[0]:
                report.remarks.append(f"{name} left out: {found[0]['left_out']}")
            else:
                add_epochs(report, name, found, count * LARGE / MB_PER_S / 1e6)


def through_litdata(place: Objects, run: Run) -> dict[str, Any]:
    """Train on the objects through litData's StreamingRawDataset, which keeps nothing."""
    warnings.simplefilter("ignore")
    try:
        from litdata import StreamingRawDataset
        from litdata.raw.indexer import BaseIndexer, FileMetadata
        from litdata.streaming import downloader
    except ImportError as error:
        return {"left_out": str(error)}
    # Its obstore client speaks HTTPS only, for which it offers no option.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    source = place.open()
    files = [FileMetadata(path=source.name(i), size=LARGE) for i in range(len(source))]
    source.close()

    class Listed(BaseIndexer):
        """Gives what is listed already: litData's own listing needs s3fs."""

        def discover_files(self, *_: Any, **__: Any) -> Any:
            return files

        def build_or_load_index(self, *_: Any, **__: Any) -> Any:
            return files

    options = {
        "endpoint_url": place.bucket.endpoint,
        "aws_access_key_id": "any",
        "aws_secret_access_key": "any",
        "region_name": "us-east-1",
    }
    dataset = StreamingRawDataset(
        f"{place.bucket.url}/{place.prefix}", indexer=Listed(), storage_options=options
    )
    loader: DataLoader[Any] = DataLoader(
        dataset,
        run.batch_size,
        shuffle=True,
        num_workers=run.workers,
        collate_fn=tensor_of,
        persistent_workers=True,
    )
    place.bucket.clock.reset()
    return train(run, lambda epoch: loader, place.bucket.clock)


def through_webdataset(bucket: Bucket, shards: list[str], run: Run) -> dict[str, Any]:
    """Train on tar shards of the same objects: read in order, shuffled in a buffer."""
    warnings.simplefilter("ignore")
    try:
        import webdataset
    except ImportError as error:
        return {"left_out": str(error)}
    urls = [f"pipe:curl -s -f {bucket.endpoint}/{bucket.name}/{key}" for key in shards]
    dataset = webdataset.WebDataset(urls, shardshuffle=len(urls), seed=0, empty_check=False)
    dataset = dataset.shuffle(1_000).to_tuple("bin")
    loader: DataLoader[Any] = DataLoader(
        dataset,
        run.batch_size,
        num_workers=run.workers,
        collate_fn=_first_of_each,
        persistent_workers=True,
    )
    bucket.clock.reset()
    return train(run, lambda epoch: loader, bucket.clock)


def _first_of_each(samples: list[tuple[bytes]]) -> Any:
    return tensor_of([sample[0] for sample in samples])


def _fill_shards(bucket: Bucket, count: int) -> list[str]:
    """Store the samples once more as tar files; return their keys."""
    keys = []
    for begin in range(0, count, _IN_A_SHARD):
        packed = io.BytesIO()
        with contextlib.closing(tarfile.open(fileobj=packed, mode="w")) as tar:
            for number in range(begin, min(begin + _IN_A_SHARD, count)):
                member = tarfile.TarInfo(f"{number:06d}.bin")
                member.size = LARGE
                tar.addfile(member, io.BytesIO(np.random.default_rng((0, number)).bytes(LARGE)))
        keys.append(f"shards/{begin:06d}.tar")
        bucket.put(keys[-1], packed.getvalue())
    return keys
