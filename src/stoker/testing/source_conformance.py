"""The tests that every source has to pass."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.source.base import Source
from stoker.source.packed import unpack


def _fill_queue(source: Source, ids: list[int], answers: SimpleQueue[list[bytes]]) -> None:
    """Read in a child process and send back what was read."""
    answers.put(source.read(ids))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
class SourceConformance:
    """Subclass it, define :meth:`make`, and pytest runs every test of the protocol.

    ::

        class TestMySource(SourceConformance):
            def make(self, samples, tmp_path):
                return MySource(samples)

    Sample 3 is empty, and no two of the others are the same.
    """

    SAMPLES = tuple(bytes([i]) * (i * 37 % 101) if i != 3 else b"" for i in range(1, 41))
    """What :meth:`make` is asked to serve; between 0 and 100 bytes each."""

    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        """Return a source of these samples; ``tmp_path`` is an empty directory for it."""
        raise NotImplementedError("a subclass of SourceConformance has to define make")

    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        """The source under test."""
        return self.make(list(self.SAMPLES), tmp_path)

    def test_length_and_sizes_are_those_of_the_samples(self, source: Source) -> None:
        """Sizes are int64 and cannot be written; they are exact, or estimates that say so."""
        assert len(source) == len(self.SAMPLES)
        assert source.sizes.dtype == np.int64
        sizes = [len(sample) for sample in self.SAMPLES]
        if source.sizes_are_exact:
            assert source.sizes.tolist() == sizes
        else:
            assert source.sizes.min() >= 0
            assert sum(sizes) / 2 <= source.sizes.sum() <= 2 * sum(sizes) + 64 * len(sizes)
        with pytest.raises(ValueError, match="read-only"):
            source.sizes[0] = 1

    def test_read_returns_the_samples_in_the_order_asked_for(self, source: Source) -> None:
        """Any order, with repetitions, from any kind of integer sequence."""
        for ids in ([5], [7, 3, 7, 7, 0], np.arange(len(self.SAMPLES))[::-1], (1, 2)):
            assert source.read(ids) == [self.SAMPLES[int(i)] for i in ids]
        assert source.read(np.array([4], np.uint32)) == [self.SAMPLES[4]]

    def test_reading_nothing_returns_nothing(self, source: Source) -> None:
        """An empty batch is not an error."""
        assert source.read([]) == []
        assert source.read_each([]) == ([], {})
        data, offsets, errors = source.read_packed([])
        assert (len(data), offsets.tolist(), errors) == (0, [0], {})

    def test_the_ways_to_read_agree(self, source: Source) -> None:
        """The packed, the tolerant and the single form return what read returns."""
        ids = [9, 3, 0, 9, 20]
        data, offsets, errors = source.read_packed(ids)
        assert data.dtype == np.uint8
        assert offsets.dtype == np.int64
        assert errors == {}
        assert unpack(data, offsets) == source.read(ids)
        assert source.read_each(ids) == (source.read(ids), {})
        assert [bytes(source.read_one(i)) for i in ids] == source.read(ids)
        assert source.lanes >= 0

    def test_an_id_out_of_range_is_refused(self, source: Source) -> None:
        """By all ways to read, with the value in the message."""
        for bad in (-1, len(self.SAMPLES), 1 << 40):
            for read in (source.read, source.read_each, source.read_packed):
                with pytest.raises(ConfigError, match=str(bad)):
                    read([0, bad])
            with pytest.raises(ConfigError, match=str(bad)):
                source.read_one(bad)

    def test_ids_that_are_not_integers_are_refused(self, source: Source) -> None:
        """Floats and tables are mistakes, not ids."""
        for bad in ([0.5], [[0, 1], [2, 3]], ["a"]):
            with pytest.raises(ConfigError, match="integers"):
                source.read(bad)

    def test_fingerprint_tells_data_sets_apart(self, tmp_path: Path) -> None:
        """It is stable, and differs when a sample, the order or the number of samples does."""
        samples = list(self.SAMPLES)
        variants = [samples, [*samples[1:], samples[0]], samples[:-1], [b"other", *samples[1:]]]
        seen = set()
        for number, variant in enumerate(variants):
            home = tmp_path / str(number)
            home.mkdir()
            source = self.make(variant, home)
            assert source.fingerprint == source.fingerprint != ""
            seen.add(source.fingerprint)
        assert len(seen) == len(variants)

    def test_every_sample_has_a_name(self, source: Source) -> None:
        """For messages; different samples have different names."""
        names = [source.name(i) for i in range(len(source))]
        assert len(set(names)) == len(names)

    def test_threads_read_at_once(self, source: Source) -> None:
        """Batches of several threads do not mix."""
        batches = [np.random.default_rng(i).integers(0, len(source), 30) for i in range(40)]
        with ThreadPoolExecutor(8) as threads:
            for ids, found in zip(batches, threads.map(source.read, batches), strict=True):
                assert found == [self.SAMPLES[i] for i in ids]

    @pytest.mark.parametrize("method", ("fork", "spawn", "forkserver"))
    def test_child_processes_read(self, source: Source, method: str) -> None:
        """After the parent has read, children of every start method read the same."""
        ids = [8, 3, 1]
        expected = source.read(ids)
        context: Any = multiprocessing.get_context(method)
        answers: SimpleQueue[list[bytes]] = context.SimpleQueue()
        child = context.Process(target=_fill_queue, args=(source, ids, answers))
        child.start()
        assert answers.get() == expected
        child.join()
        assert child.exitcode == 0

    def test_a_closed_source_says_so(self, source: Source) -> None:
        """Closing twice is fine; reading afterwards is an error."""
        source.close()
        source.close()
        for read in (source.read, source.read_each, source.read_packed):
            with pytest.raises(ConfigError, match="closed"):
                read([0])
        with pytest.raises(ConfigError, match="closed"):
            source.read_one(0)
