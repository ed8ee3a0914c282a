"""Storage that refuses, breaks off, and forgets who we are, below the Loader with prefetch."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from support.waiting import train_step

from stoker.errors import ConfigError
from stoker.pytorch import Loader, SampleDataset
from stoker.source import ObjectSource, Pace, Retry

from .conftest import BadStorage
from .credentials import Credentials, signed_at
from .samples import number_of, walk

NUM = 200
KEYS = [f"{number:04d}" for number in range(NUM)]
QUICK = Retry(deadline=30.0, first=0.005, longest=0.1)
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def loader_of(source: ObjectSource, **more: Any) -> Loader:
    options = {"cache": "30%", "num_workers": 2, "multiprocessing_context": "fork", **more}
    return Loader(SampleDataset(source, number_of), 8, return_meta=True, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", ["503", "cut"])
def test_a_fifth_of_the_requests_fails(bad_storage: BadStorage, fault: str, workers: int) -> None:
    options = {"allow_http": True}
    pace = Pace(retry=QUICK, concurrency=16)
    source = ObjectSource(bad_storage.url, KEYS, storage_options=options, pace=pace)
    draw = random.Random(0)
    bad_storage.plan = lambda key, turn, head: fault if draw.random() < 0.2 else None
    more = {"multiprocessing_context": None} if workers == 0 else {}
    with loader_of(source, num_workers=workers, recipe="lru", **more) as loader:
        for _ in range(2):
            assert walk(loader) == list(range(NUM))
        stats = loader.stats
        assert stats.failed == 0
        assert stats.accesses == 2 * NUM == stats.hits + stats.fetched
    # Some are read again, because of the faults; but there is no storm.
    assert sum(bad_storage.asked.values()) < 2 * NUM * 1.7
    source.close()


class Bucket(BadStorage):
    """The same below a bucket, for requests that are signed."""

    def body(self, key: str) -> bytes:
        return super().body(key.rpartition("/")[2])


def source_in(bucket: Bucket) -> ObjectSource:
    options = {
        "endpoint": bucket.url,
        "region": "r",
        "allow_http": True,
        "virtual_hosted_style_request": False,
        "credential_provider": Credentials(),
    }
    pace = Pace(retry=QUICK, concurrency=8)
    return ObjectSource("s3://bucket", KEYS, storage_options=options, pace=pace)


def test_credentials_that_expire_are_asked_for_anew() -> None:
    with Bucket() as bucket:
        source = source_in(bucket)
        refused = 0
        expired = 0.0

        def plan(key: str, turn: int, head: str) -> str | None:
            nonlocal refused
            if signed_at(head) > expired:
                return None
            refused += 1
            return "403"

        bucket.plan = plan
        with loader_of(source) as loader:
            seen = []
            for step, (batch, _) in enumerate(loader):
                seen += batch.tolist()
                train_step(0.02)
                if step == 5:
                    expired = time.time()
            assert sorted(seen) == list(range(NUM))
            assert refused > 0
            assert loader.stats.failed == 0
        # Each process that reads is refused once, by as many requests as it had under way.
        assert refused <= 3 * 8
        source.close()


def test_credentials_that_stay_refused_end_it_with_a_clear_error() -> None:
    with Bucket() as bucket:
        source = source_in(bucket)
        with loader_of(source) as loader:
            begin = time.monotonic()
            with pytest.raises(ConfigError, match=r"refuses to give s3://bucket/.*credentials"):
                for step, _ in enumerate(loader):
                    if step == 5:
                        bucket.plan = lambda key, turn, head: "403"
                        begin = time.monotonic()
            assert time.monotonic() - begin < 15
        source.close()
