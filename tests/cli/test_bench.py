"""`stoker bench` in its smallest sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from stoker.cli._options import choose_recipes
from stoker.cli.root import root
from stoker.errors import ConfigError


def bench(*arguments: str) -> str:
    result = CliRunner().invoke(root, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_hits_follow_the_closed_forms_and_stay_below_the_bound() -> None:
    found = json.loads(bench("hits", "--samples", "3000", "--cache", "20%,60%", "--json"))
    assert len(found["rows"]) == 2 * len(choose_recipes("all", is_trained=False))
    for row in found["rows"]:
        assert 0 < row["byte_hit_ratio"] <= row["bound"] + 0.005, row
        if row["closed_form"] is not None:
            assert row["byte_hit_ratio"] == pytest.approx(row["closed_form"], abs=0.02), row


def test_the_oracle_hits_always_when_it_is_asked_for() -> None:
    found = json.loads(
        bench("hits", "--samples", "500", "--cache", "20%", "--recipes", "oracle", "--json")
    )
    assert [(row["hit_ratio"], row["closed_form"]) for row in found["rows"]] == [(1.0, 1.0)]


def test_hits_prints_a_table() -> None:
    output = bench("hits", "--samples", "500", "--cache", "50%", "--recipes", "lru,minio")
    assert "closed form" in output
    assert "minio" in output


def test_hits_needs_recipes_that_learn_from_no_training() -> None:
    assert choose_recipes("all", is_trained=False) == [
        *("base_cis", "belady", "fifo", "foresight", "lfu", "lru", "minio", "random"),
        *("s3fifo", "sieve"),
    ]
    for name in ("shade", "quiver", "ilfu"):
        with pytest.raises(ConfigError, match=f"'{name}' learns from training"):
            choose_recipes(name, is_trained=False)


def test_loader_compares_on_a_folder(few_digits: Path) -> None:
    found = json.loads(
        bench("loader", str(few_digits), "--workers", "0", "--rounds", "1", "--json")
    )
    assert [row["loader"] for row in found["rows"]] == ["stoker.Loader", "torch DataLoader"]
    assert found["rows"][1]["speedup"] == 1
    assert all(row["us_per_sample"] > 0 for row in found["rows"])
