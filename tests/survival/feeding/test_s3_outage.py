"""An S3 server that goes away in the middle of an epoch, and comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from stoker.pytorch import Loader, SampleDataset
from stoker.source import ObjectSource

from .s3_server import S3Server
from .samples import number_of, served, walk

NUM = 160
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def freeze(server: S3Server, seconds: float) -> None:
    server.freeze()
    try:
        time.sleep(seconds)
    finally:
        server.thaw()


def restart(server: S3Server, seconds: float) -> None:
    server.kill()
    time.sleep(seconds)
    server.start()


@pytest.mark.parametrize("outage", [freeze, restart])
def test_the_epoch_goes_on(
    s3: S3Server, outage: Callable[[S3Server, float], None], soak: float
) -> None:
    bucket = s3.bucket(NUM)
    source = ObjectSource(bucket.url, storage_options=bucket.options())
    away = threading.Thread(target=outage, args=(s3, 10.0 if soak else 3.0))
    with Loader(
        SampleDataset(source, number_of),
        8,
        cache="30%",
        num_workers=2,
        multiprocessing_context="fork",
        return_meta=True,
    ) as loader:
        seen = []
        for step, batch in enumerate(loader):
            seen += served(batch)
            if step == 3:
                away.start()
        away.join()
        assert sorted(seen) == list(range(NUM))
        assert walk(loader) == list(range(NUM))
        assert loader.stats.failed == 0
        assert loader.stats.accesses == 2 * NUM
    source.close()
    bucket.close()
