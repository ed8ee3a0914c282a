"""Storage that fails, seen through the Loader."""

from __future__ import annotations

import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from support.caches import gathered
from support.ranks import run_ranks
from torch import distributed

from stoker.errors import SampleCorrupt, SampleNotFound, SourceUnavailable
from stoker.pytorch import Failure, Loader, SampleDataset
from stoker.source import MemorySource
from stoker.testing import FaultySource
from stoker.types import Outcome

NUM = 120


def with_sum(number: int) -> bytes:
    raw = f"{number:08}".encode() + bytes(number % 5)
    return zlib.crc32(raw).to_bytes(4, "big") + raw


def checked(raw: bytes) -> int:
    """Sees short reads and flipped bits, as formats with checksums do."""
    if zlib.crc32(raw[4:]) != int.from_bytes(raw[:4], "big"):
        raise ValueError("the checksum is wrong")
    return int(raw[4:12])


def dataset_of(**faults: Any) -> SampleDataset:
    return SampleDataset(
        FaultySource(MemorySource([*map(with_sum, range(NUM))]), **faults), checked
    )


def loader_of(dataset: SampleDataset, **arguments: Any) -> Loader:
    options = {"batch_size": 8, "cache": "100%", "prefetch": 0, **arguments}
    return Loader(dataset, **gathered(options))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("fault", "error", "cause"),
    [
        ("unavailable", SourceUnavailable, "did not answer"),
        ("not_found", SampleNotFound, "not there"),
        ("corrupt", SampleCorrupt, "cannot be used"),
        ("short", SampleCorrupt, "bytes came, not "),
        ("flip", SampleCorrupt, "ValueError for .* bytes: the checksum is wrong"),
    ],
)
def test_errors_name_the_sample_and_the_cause(
    fault: str, error: type[Exception], cause: str, workers: int
) -> None:
    dataset = dataset_of(always={77: fault})
    with (
        loader_of(dataset, num_workers=workers) as loader,
        pytest.raises(error, match=f"77.*{cause}") as caught,
    ):
        list(loader)
    if workers == 0:  # torch makes an error of a worker anew, of its text
        assert caught.value.ids == [77]  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [False, True])
def test_skipping_keeps_lengths_and_lists_what_failed(workers: int, prefetch: bool) -> None:
    always = {3: "unavailable", 50: "not_found", 51: "short", 52: "flip", 119: "corrupt"}
    dataset = dataset_of(always=always, rates={"stall": 0.02}, stall=0.01)
    options = {"num_workers": workers, "prefetch": "1MiB" if prefetch else 0}
    with loader_of(dataset, on_error="skip", return_meta=True, **options) as loader:
        for _ in range(2):
            served, substituted = [], 0
            for batch, meta in loader:
                assert batch.tolist() == meta.ids.tolist()
                served.append(batch.tolist())
                substituted += int((meta.outcomes == Outcome.SUBSTITUTED).sum())
            assert list(map(len, served)) == [8] * 15
            assert not always.keys() & {i for batch in served for i in batch}
            assert substituted == len(always)
        failures = {failure.id: failure for failure in loader.quarantine}
    assert failures.keys() == always.keys()
    assert all(str(i) in failure.name for i, failure in failures.items())
    assert "not there" in failures[50].reason and "bytes came" in failures[51].reason
    assert "checksum" in failures[52].reason


def test_a_function_is_told_and_may_end_it() -> None:
    told: list[Failure] = []
    dataset = dataset_of(always={3: "unavailable", 50: "flip"})
    with loader_of(dataset, on_error=told.append) as loader:
        list(loader)
        assert sorted(failure.id for failure in told) == [3, 50]
        assert sorted(loader.quarantine) == sorted(told)

    def refuse(failure: Failure) -> None:
        raise KeyError(failure.id)

    with loader_of(dataset, on_error=refuse) as loader, pytest.raises(KeyError):
        list(loader)


@pytest.mark.parametrize("fault", ["flip", "short"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_damage_of_one_read_does_not_stay_in_the_cache(fault: str, prefetch: bool) -> None:
    """A read that fails may succeed when it is repeated; the cache must not keep the failure."""
    # What the prefetch process could not read is read again, and has to fail twice.
    dataset = dataset_of(rates={fault: 0.35 if prefetch else 0.15})
    options = {"on_error": "skip", "prefetch": "1MiB" if prefetch else 0}
    with loader_of(dataset, **options) as loader:
        for _ in range(7):
            served = {int(i) for batch in loader for i in batch}
        assert len(loader.quarantine) > 5
        assert len(served) == NUM


def test_stalls_cost_time_and_nothing_else() -> None:
    dataset = dataset_of(always={10: "stall"}, stall=0.4)
    with loader_of(dataset, num_workers=2) as loader:
        begin = time.perf_counter()
        assert sorted(int(i) for batch in loader for i in batch) == list(range(NUM))
        assert time.perf_counter() - begin > 0.4
        assert loader.stats.source_seconds > 0.4
        assert loader.stats.accesses == loader.stats.fetched == NUM


def test_when_everything_fails_it_says_so() -> None:
    dataset = dataset_of(rates={"unavailable": 1.0})
    with (
        loader_of(dataset, on_error="skip") as loader,
        pytest.raises(SourceUnavailable, match="did not answer"),
    ):
        list(loader)


def walk(rank: int) -> dict[str, Any]:
    """Two epochs in which samples fail for good and by chance."""
    rates = {"unavailable": 0.05, "flip": 0.05, "short": 0.02}
    dataset = dataset_of(rates=rates, always={7: "not_found", 8: "flip"}, seed=rank)
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
    with loader_of(dataset, on_error="skip", cache="50%", **options) as loader:
        lengths, served = [], []
        for _ in range(2):
            for batch in loader:
                lengths.append(len(batch))
                served += batch.tolist()
                distributed.barrier()  # hangs if a rank has fewer batches
        quarantined = [failure.id for failure in loader.quarantine]
        return {"lengths": lengths, "served": served, "quarantined": quarantined}


def test_ranks_stay_equal_when_samples_are_skipped(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path, walk)
    assert ranks[0]["lengths"] == ranks[1]["lengths"]
    assert sum(ranks[0]["lengths"]) == NUM
    served = {i for result in ranks for i in result["served"]}
    assert not served & {7, 8}
    assert {7, 8} <= {i for result in ranks for i in result["quarantined"]}


def uneven(sample: int) -> bytes:
    return bytes([sample]) * (20 + sample)


@pytest.mark.parametrize("stage", ["encoded", "decoded"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [0, "1MiB"])
def test_what_lacks_its_end_is_never_served_though_it_decodes(
    stage: str, workers: int, prefetch: object
) -> None:
    rate = 0.4 if prefetch else 0.2  # what is prefetched has to fail twice
    source = FaultySource(MemorySource([*map(uneven, range(100))]), rates={"short": rate})
    dataset = SampleDataset(source, bytes)
    options = {"num_workers": workers, "prefetch": prefetch, "stage": stage}
    with loader_of(dataset, on_error="skip", collate_fn=list, **options) as loader:
        for _ in range(4):
            for batch in loader:
                assert all(sample == uneven(sample[0]) for sample in batch)
        assert source.faults["short"]
        assert loader.quarantine and all("bytes came" in bad.reason for bad in loader.quarantine)
