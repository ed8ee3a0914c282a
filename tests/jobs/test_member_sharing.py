"""What a job may ask for."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.errors import ConfigError
from stoker.jobs import Sharing


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "x" * 65},
        {"name": "ä" * 33},
        {"name": 3},
        {"probe": -1},
        {"probe": 1},
        {"probe": True},
        {"probe": 2.5},
        {"eligible_from": 0.5},
        {"eligible_from": float("nan")},
        {"eligible_from": float("inf")},
    ],
)
def test_what_makes_no_sense_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sharing(**wrong)


def test_the_defaults_are_those_of_the_paper() -> None:
    assert Sharing().eligible_from == 1.5
    assert Sharing().probe == 0
