"""How large packages are."""

from __future__ import annotations

import pytest

from stoker import recipes
from stoker.bundles import Packaging


def test_newcomer_3_only_the_usual_size_shrinks() -> None:
    usual = Packaging.of(None)
    assert usual.min_bytes == 1 << 20
    assert usual.fitted(1 << 30).min_bytes == 1 << 20
    assert usual.fitted(1_000_000).min_bytes == 50_000
    assert usual.fitted(3).min_bytes == 1
    assert Packaging.of(1 << 20).fitted(1_000_000).min_bytes == 1 << 20


@pytest.mark.parametrize("name", ["icache", "impact"])
def test_newcomer_3_a_size_that_is_given_stays(name: str) -> None:
    given = getattr(recipes, name)(package_bytes=300).packaging
    assert given == Packaging(300)
