"""Workers forked from a process that has read from the cloud itself."""

from __future__ import annotations

import pytest

from stoker import Cache
from stoker.pytorch import Loader, SampleDataset
from stoker.source import ObjectSource

from .s3_server import S3Server
from .samples import number_of, sample, walk

NUM = 96


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("prefetch", [0, "1MiB"])
def test_the_parent_reads_before_and_between(s3: S3Server, prefetch: int | str) -> None:
    bucket = s3.bucket(NUM)
    source = ObjectSource(bucket.url, storage_options=bucket.options())
    assert source.read(range(NUM)) == [sample(number) for number in range(NUM)]
    with Loader(
        SampleDataset(source, number_of),
        8,
        cache=Cache("30%", prefetch=prefetch),
        num_workers=2,
        multiprocessing_context="fork",
        return_meta=True,
    ) as loader:
        for _ in range(3):
            assert walk(loader) == list(range(NUM))
            assert source.read([3]) == [sample(3)]
    source.close()
    bucket.close()
