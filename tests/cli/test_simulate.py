"""`stoker simulate` in its smallest sizes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from stoker import recipes
from stoker.cli.root import root


def simulate(*arguments: str) -> str:
    result = CliRunner().invoke(root, ["simulate", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_recipe_stays_below_its_limit() -> None:
    found = json.loads(simulate("--samples", "500", "--epochs", "6", "--cache", "0.4", "--json"))
    names = [row["recipe"] for row in found["rows"]]
    assert set(names) == set(recipes.names()) - {"oracle", "spidercache"}
    for row in found["rows"]:
        assert 0 < row["hit_ratio"] <= row["limit"] + 0.01, row
        assert row["below_limit"] == pytest.approx(row["limit"] - row["hit_ratio"])
        assert 0 < row["ess"] <= row["coverage"] <= 1


def test_sizes_move_the_limit() -> None:
    def limits(*more: str) -> list[float]:
        found = json.loads(
            simulate("--samples", "300", "--epochs", "2", "--recipes", "minio", "--json", *more)
        )
        return [row["limit"] for row in found["rows"]]

    equal = limits("--cache", "0.1,20%,0.4")
    assert equal == pytest.approx([0.1, 0.2, 0.4], abs=0.005)
    assert all(a > b for a, b in zip(limits("--spread", "0.8"), equal, strict=True))


def test_the_table() -> None:
    output = simulate("--samples", "300", "--epochs", "2", "--recipes", "lru,minio")
    assert "below" in output
    assert "minio" in output


@pytest.mark.parametrize("cache", ["2", "-0.1", "much", "120%", "nan"])
def test_what_is_no_share_is_refused(cache: str) -> None:
    result = CliRunner().invoke(root, ["simulate", "--cache", cache])
    assert result.exit_code == 1
    assert "is not a share" in result.output
