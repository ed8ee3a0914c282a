"""A short run of each fuzz target, and all that longer ones have found (``make fuzz``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.harness import Target, check, corpus, damaged
from fuzz.targets import TARGETS


@pytest.fixture(params=TARGETS)
def fuzzed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Target]]:
    target = TARGETS[request.param](tmp_path)
    yield request.param, target
    target.close()


def test_good_inputs_are_read(fuzzed: tuple[str, Target]) -> None:
    for seed in fuzzed[1].seeds:
        fuzzed[1].parse(seed)


def test_what_was_found_stays_mended(fuzzed: tuple[str, Target]) -> None:
    name, target = fuzzed
    for path in corpus(name):
        check(target, path.read_bytes())


@settings(
    max_examples=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(random=st.randoms(use_true_random=True))
def test_damaged_inputs_are_refused_or_read(fuzzed: tuple[str, Target], random: Random) -> None:
    check(fuzzed[1], damaged(*fuzzed)(random))
