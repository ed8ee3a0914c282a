import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.source.packed import Packed, gather, pick


def packed(samples):
    offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    return Packed(np.frombuffer(b"".join(samples), np.uint8), offsets)


def unpacked(samples):
    return [
        samples.data[a:b].tobytes()
        for a, b in zip(samples.offsets[:-1], samples.offsets[1:], strict=True)
    ]


@given(st.data())
def test_gather_picks_the_samples_asked_for(data):
    parts = data.draw(st.lists(st.lists(st.binary(max_size=4), min_size=1), min_size=1, max_size=3))
    choice = st.integers(0, len(parts) - 1).flatmap(
        lambda p: st.tuples(st.just(p), st.integers(0, len(parts[p]) - 1))
    )
    chosen = data.draw(st.lists(choice))
    part = np.array([p for p, _ in chosen], np.int64)
    index = np.array([i for _, i in chosen], np.int64)
    got = gather([packed(samples) for samples in parts], part, index)
    assert unpacked(got) == [parts[p][i] for p, i in chosen]
    assert got.offsets[0] == 0
    assert got.offsets[-1] == len(got.data)


def test_samples_that_lie_together_are_not_copied():
    source = packed([b"ab", b"", b"cde", b"f"])
    got = pick(source, np.array([1, 2, 3]))
    assert unpacked(got) == [b"", b"cde", b"f"]
    assert np.shares_memory(got.data, source.data)
