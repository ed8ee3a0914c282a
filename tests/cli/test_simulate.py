"""`stoker simulate` in its smallest sizes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import stoker
from stoker import recipes
from stoker.cli.root import root
from stoker.sim import limits
from stoker.source.held import MemorySource


def simulate(*arguments: str) -> str:
    result = CliRunner().invoke(root, ["simulate", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_recipe_stays_below_its_limit() -> None:
    found = json.loads(simulate("--samples", "500", "--epochs", "6", "--cache", "0.4", "--json"))
    names = [row["recipe"] for row in found["rows"]]
    assert set(names) == set(recipes.names()) - {"oracle"}
    for row in found["rows"]:
        assert 0 < row["hit_ratio"] <= row["limit"] + 0.01, row
        assert row["below_limit"] == pytest.approx(row["limit"] - row["hit_ratio"])
        assert 0 < row["ess"] <= row["coverage"] <= 1


def test_sizes_move_the_limit() -> None:
    def found_limits(*more: str) -> list[float]:
        found = json.loads(
            simulate("--samples", "300", "--epochs", "2", "--recipes", "minio", "--json", *more)
        )
        return [row["limit"] for row in found["rows"]]

    equal = found_limits("--cache", "0.1,20%,0.4")
    assert equal == pytest.approx([0.1, 0.2, 0.4], abs=0.005)
    unequal = found_limits("--sizes", "lognormal:110000,0.8")
    assert all(a > b for a, b in zip(unequal, equal, strict=True))


def test_the_table() -> None:
    output = simulate("--samples", "300", "--epochs", "2", "--recipes", "lru,minio")
    assert "below" in output
    assert "minio" in output


@pytest.mark.parametrize("cache", ["2", "-0.1", "much", "120%", "nan"])
def test_what_is_no_share_is_refused(cache: str) -> None:
    result = CliRunner().invoke(root, ["simulate", "--cache", cache])
    assert result.exit_code == 1
    assert "is not a share" in result.output


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recorded training of three epochs over 300 samples."""
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    dataset = stoker.SampleDataset(MemorySource([b"x" * (i + 1) for i in range(300)]), decode=len)
    with stoker.Loader(dataset, batch_size=20, cache="20%", recipe="lru", trace=path) as loader:
        for _ in range(3):
            for lengths in loader:
                loader.observe(lengths.double() / 300 + torch.rand(len(lengths)))
    return path


def rows(*arguments: str) -> dict[str, dict[str, float]]:
    found = json.loads(simulate("--cache", "0.3", "--json", *arguments))
    return {row["recipe"]: row for row in found["rows"]}


def test_a_trace_is_replayed_as_it_was(trace: Path) -> None:
    found = rows("--trace", str(trace), "--recipes", "lru,minio,shade")
    sizes = np.arange(1, 301)
    assert found["minio"]["byte_hit_ratio"] == pytest.approx(0.3, abs=0.03)
    assert found["lru"]["hit_ratio"] < found["minio"]["hit_ratio"]
    assert found["shade"]["coverage"] == 1  # its visits, not the sampler's
    held = limits.smallest_first(sizes, 0.3 * sizes.sum())
    assert found["minio"]["limit"] == pytest.approx(held)


def test_losses_of_a_trace(trace: Path) -> None:
    recorded = rows("--losses", f"recorded:{trace}", "--recipes", "shade", "--epochs", "4")
    fitted = rows("--losses", f"fitted:{trace}", "--recipes", "shade", "--samples", "1000")
    for found in (recorded, fitted):
        assert 0 < found["shade"]["coverage"] < 1
        assert 0.1 < found["shade"]["hit_ratio"] < 1


def test_time_is_added_where_it_can_be_computed() -> None:
    arguments = ("--samples", "600", "--epochs", "4", "--recipes", "lru,minio")
    assert "epoch_seconds" not in rows(*arguments)["lru"]
    found = rows(*arguments, "--compute-rate", "1000", "--iops", "500", "--latency", "1ms")
    assert found["minio"]["epoch_seconds"] == pytest.approx(600 * 0.7 / 500, rel=0.1)
    assert found["lru"]["epoch_seconds"] > found["minio"]["epoch_seconds"]
    assert 0.5 < found["minio"]["utilisation"] < 1
    table = simulate(*arguments, "--compute-rate", "1000", "--iops", "500")
    assert "stall s" in table


def test_jobs_that_share_a_cache_hit_what_others_read() -> None:
    arguments = ("--samples", "600", "--epochs", "4", "--recipes", "belady")
    alone, both = rows(*arguments), rows(*arguments, "--jobs", "2")
    assert alone["belady"]["hit_ratio"] + 0.05 < both["belady"]["hit_ratio"]
    assert both["belady"]["hit_ratio"] <= both["belady"]["limit"]


def test_a_page_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    simulate(
        *("--samples", "300", "--epochs", "2", "--recipes", "lru,minio"),
        *("--html", str(tmp_path / "r.html"), "--plot", str(tmp_path / "p.png")),
    )
    assert "minio" in (tmp_path / "r.html").read_text()
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--trace", "TRACE", "--samples", "200"), "300"),
        (("--trace", "TRACE", "--epochs", "4"), "3"),
        (("--trace", "TRACE", "--jobs", "2"), "--jobs"),
        (("--trace", __file__), "no trace"),
        (("--losses", "guessed:TRACE"), "fitted:TRACE"),
        (("--losses", "fitted:nothing"), "a file"),
        (("--losses", "recorded:TRACE", "--samples", "200"), "300"),
        (("--compute-rate", "10", "--bandwidth", "much"), "--bandwidth"),
        (("--compute-rate", "10", "--latency", "soon"), "not a time"),
        (("--plot", "nothing.there"), "--plot"),
        (("--compute-rate", "10", "--jobs", "2"), "--jobs"),
    ],
)
def test_what_makes_no_sense_is_refused(
    trace: Path, arguments: tuple[str, ...], match: str
) -> None:
    given = [part.replace("TRACE", str(trace)) for part in arguments]
    result = CliRunner().invoke(root, ["simulate", "--recipes", "lru", "--cache", "0.3", *given])
    assert result.exit_code != 0
    assert match in result.output


def test_sizes_come_from_a_file(tmp_path: Path) -> None:
    as_text, as_array = tmp_path / "sizes.txt", tmp_path / "sizes.npy"
    sizes = [100, 200, 50_000] * 100
    as_text.write_text("\n".join(map(str, sizes)))
    np.save(as_array, np.array(sizes))
    found = [
        json.loads(
            simulate("--samples", "300", "--recipes", "minio", "--sizes", str(path), "--json")
        )["rows"]
        for path in (as_text, as_array)
    ]
    assert found[0] == found[1]
    assert found[0][0]["limit"] > 0.6  # the small ones, which are two of three, all fit


@pytest.mark.parametrize("sizes", ["lognormal:0,1", "lognormal:5", "nowhere.npy", "normal:1,1"])
def test_sizes_that_say_nothing_are_refused(sizes: str) -> None:
    result = CliRunner().invoke(root, ["simulate", "--sizes", sizes])
    assert result.exit_code == 1
    assert "is invalid" in result.output


def test_cached_sizes_are_a_factor_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cached.npy"
    np.save(path, np.full(300, 33_000))
    common = ("--samples", "300", "--recipes", "minio", "--cache", "0.2", "--json")
    plain = json.loads(simulate(*common))
    by_factor = json.loads(simulate(*common, "--cached-sizes", "0.3"))
    by_size = json.loads(simulate(*common, "--cached-sizes", str(path)))
    assert "cached_factor" not in plain and by_factor["cached_factor"] == 0.3
    assert by_factor["rows"] == by_size["rows"]
    row = by_factor["rows"][0]
    assert row["cache"] == 0.2
    for name in ("hit_ratio", "limit", "closed_form"):
        assert row[name] == pytest.approx(2 / 3, abs=0.01)


@pytest.mark.parametrize("given", ["0", "-1", "nowhere.npy", "nan"])
def test_cached_sizes_that_say_nothing_are_refused(given: str) -> None:
    result = CliRunner().invoke(root, ["simulate", "--samples", "300", "--cached-sizes", given])
    assert result.exit_code == 1
    assert "give a" in result.output


def test_limits_in_pictures_are_those_of_cached_sizes(tmp_path: Path) -> None:
    pages = []
    for factor in ("1", "0.5"):
        page = tmp_path / f"{factor}.html"
        common = ("--samples", "300", "--recipes", "minio", "--cache", "0.2")
        simulate(*common, "--cached-sizes", factor, "--html", str(page))
        pages.append(page.read_text())
    assert pages[0] != pages[1]
