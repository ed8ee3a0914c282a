"""Two machines that tests may part."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.machines import Machine, Unavailable, two_machines


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    try:
        with two_machines() as pair:
            yield pair
    except Unavailable as why:
        pytest.skip(str(why))
