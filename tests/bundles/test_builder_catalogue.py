"""The catalogue against a dictionary."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.bundles.builder import Catalogue

NUM = 12
packages = st.lists(st.integers(0, NUM - 1), max_size=6, unique=True)
steps = st.lists(st.one_of(packages, st.sets(st.integers(0, 9))), max_size=20)


@given(steps, st.sets(st.integers(0, NUM - 1)))
def test_like_a_dictionary(steps: list[list[int] | set[int]], low: set[int]) -> None:
    catalogue = Catalogue(NUM)
    there: dict[int, list[int]] = {}
    made = 0
    home: dict[int, int] = {}
    for step in steps:
        if isinstance(step, list):
            number = catalogue.add(f"p{made}", np.array(step, np.uint32))
            assert number == made
            there[made] = step
            home.update(dict.fromkeys(step, made))
            made += 1
        else:
            gone = sorted(step & there.keys())
            assert sorted(catalogue.remove(sorted(step))) == sorted(f"p{n}" for n in gone)
            for number in gone:
                del there[number]
            home = {sample: at for sample, at in home.items() if at not in step}
        assert catalogue.numbers() == list(there)
        every = np.arange(NUM, dtype=np.uint32)
        assert catalogue.home(every).tolist() == [home.get(n, -1) + 1 for n in range(NUM)]
        at_home = [[n for n in ids if home.get(n) == at] for at, ids in there.items()]
        assert catalogue.homes.tolist() == catalogue.home(every).tolist()
        mask = np.isin(every, list(low))
        useless = [at for at, ids in zip(there, at_home, strict=True) if not low & set(ids)]
        assert catalogue.useless(mask, range(made + 1)) == useless
        for number in range(made + 1):
            assert catalogue.ids(number).tolist() == there.get(number, [])
            assert catalogue.name(number) == (f"p{number}" if number in there else None)


def test_one_sample_of_many_makes_a_package_useful() -> None:
    catalogue = Catalogue(1000)
    ids = np.arange(1000, dtype=np.uint32)
    first = catalogue.add("a", ids[:500])
    low = np.zeros(1000, np.bool_)
    low[[3, 499]] = True
    assert catalogue.useless(low, [first]) == []
    catalogue.add("b", ids[:499])  # where all of them but the last are at home from now on
    assert catalogue.useless(low, [first]) == []
    low[499] = False
    assert catalogue.useless(low, [first]) == [first]
