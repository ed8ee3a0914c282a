"""What the cache gains a job, from blocks of batches whose cause is known."""

from __future__ import annotations

import pytest

from stoker.jobs.gain import Block, PassiveGain, Probe


def block(compute: float, fetch: float, misses: float, readers: int = 2) -> Block:
    """Twenty batches of 100 samples of a job that takes max(compute, misses x fetch) each."""
    seconds = max(compute, misses * fetch)
    fetched = round(2000 * misses)
    reading = fetch * readers / 100 * fetched  # so long do the readers of one sample take
    return Block(20, 20 * seconds, 20 * (seconds - compute), 2000, fetched, reading, readers)


@pytest.mark.parametrize(
    ("compute", "fetch", "misses", "gain"),
    [
        (0.1, 1.0, 0.5, 2.0),  # bound by the storage
        (0.1, 1.0, 0.05, 10.0),  # was, and the cache makes up for it: reads are short enough
        (1.0, 0.5, 0.5, 1.0),  # bound by computing whatever the cache does
        (0.1, 1.0, 1.0, 1.0),  # the cache is cold
    ],
)
def test_the_estimate_is_right_where_the_model_holds(
    compute: float, fetch: float, misses: float, gain: float
) -> None:
    passive = PassiveGain()
    for _ in range(30):
        passive.add(block(compute, fetch, misses))
    assert passive.gain == pytest.approx(gain, rel=0.01)
    assert passive.fetch_seconds == pytest.approx(fetch, rel=0.01)
    assert passive.compute_seconds == pytest.approx(compute, abs=1e-9)


def test_it_follows_a_cache_that_fills() -> None:
    passive = PassiveGain()
    gains = []
    for misses in (1.0, 0.8, 0.6, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4):
        passive.add(block(0.1, 1.0, misses))
        gains.append(passive.gain)
    assert gains == sorted(gains)
    assert gains[-1] == pytest.approx(2.5, rel=0.1)


def test_without_misses_nothing_is_known_and_nothing_is_claimed() -> None:
    passive = PassiveGain()
    passive.add(Block(20, 2.0, 0.0, 2000, 0, 0.0, 1))
    passive.add(Block(0, 0.0, 0.0, 0, 0, 0.0, 1))
    assert passive.gain == 1.0


def test_a_probe_compares_batches_without_and_with_the_cache() -> None:
    probe = Probe(3)
    for _ in range(2):  # in each epoch anew
        probe.begin()
        times = [0.0, 4.0, 8.0, 9.0, 10.0, 11.0]  # 4 s a batch without, 1 s with it
        assert [probe.add(at) for at in times] == [None] * 5 + [4.0]
        assert probe.is_over
        assert probe.add(12.0) is None
    assert Probe(0).is_over
