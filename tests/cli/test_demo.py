"""`stoker demo` on few images: every part of it, in seconds."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from stoker import recipes
from stoker.cli._options import choose_loaders, choose_recipes
from stoker.cli.root import root
from stoker.errors import ConfigError

QUICK = ["--epochs", "2", "--latency", "100us", "--workers", "0", "--batch-size", "32"]


def demo(*arguments: str, width: int = 200) -> Result:
    return CliRunner().invoke(root, ["demo", *arguments], terminal_width=width)


def test_json_accounts_for_every_access(few_digits: Path, tmp_path: Path) -> None:
    names = ["minio", "shade", "icache", "infobatch"]
    result = demo(
        "--data",
        str(few_digits),
        "--recipes",
        ",".join(names),
        "--json",
        "--output",
        str(tmp_path),
        *QUICK,
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [run["recipe"] for run in found["runs"]] == ["dataloader", *names]
    assert found["limit"]["seconds"] > 0
    for run in found["runs"]:
        first, second = (epoch["stats"] for epoch in run["epochs"])
        assert first["accesses"] == 250
        assert first["hits"] == 0
        outcomes = ("hits", "substituted", "packaged", "fetched")
        assert sum(second[name] for name in outcomes) == second["accesses"] <= 250
        assert 0 <= run["accuracy"] <= 1
        assert run["against_limit"] > 0
    plain = found["runs"][0]
    assert plain["predicted"] is None
    assert all(epoch["stats"]["fetched"] == 250 for epoch in plain["epochs"])
    static = next(run for run in found["runs"] if run["recipe"] == "minio")
    # What was read ahead and a worker had fetched meanwhile is there in the next epoch, too.
    assert 0.18 < static["byte_hit_ratio"] < 0.25
    assert static["predicted"] == pytest.approx(0.2, abs=0.001)


def test_the_dataloader_really_reads_each_sample_alone(few_digits: Path, tmp_path: Path) -> None:
    result = demo(
        *("--data", str(few_digits), "--recipes", "dataloader", "--json", *QUICK),
        *("--output", str(tmp_path), "--latency", "2ms", "--workers", "1"),
    )
    assert result.exit_code == 0, result.output
    [run] = json.loads(result.stdout)["runs"]
    assert run["recipe"] == "dataloader"
    for epoch in run["epochs"]:
        assert epoch["seconds"] > 250 * 0.002, "reads overlap, so it is not torch's plain loader"
        assert 0 < epoch["stats"]["stall_seconds"] <= epoch["seconds"]
        assert epoch["stats"]["bytes_from_source"] == run["epochs"][0]["stats"]["bytes_from_source"]


def test_the_dataloader_comes_first_unless_it_is_left_out() -> None:
    assert choose_loaders("lru,minio", with_dataloader=True) == ["dataloader", "lru", "minio"]
    assert choose_loaders("lru, dataloader", with_dataloader=True) == ["dataloader", "lru"]
    assert choose_loaders("dataloader", with_dataloader=True) == ["dataloader"]
    assert choose_loaders("lru", with_dataloader=False) == ["lru"]
    with pytest.raises(ConfigError, match="names 'dataloader': leave out --no-dataloader"):
        choose_loaders("lru,dataloader", with_dataloader=False)
    with pytest.raises(ConfigError, match="names none"):
        choose_loaders(",", with_dataloader=True)


def test_all_is_every_recipe_that_keeps_to_the_cache() -> None:
    assert choose_recipes("all") == [name for name in recipes.names() if name != "oracle"]


def test_all_goes_without_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert set(choose_recipes("all")) == set(recipes.names()) - {"oracle", "spidercache"}


def test_the_table_and_the_plot(
    few_digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure  # not while tests are collected

    figures: list[Figure] = []
    save = Figure.savefig

    def saved(figure: Figure, *arguments: Any, **named: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **named)

    monkeypatch.setattr(Figure, "savefig", saved)
    output = tmp_path / "new"
    result = demo(
        "--data", str(few_digits), "--recipes", "lru,minio", "--output", str(output), *QUICK
    )
    assert result.exit_code == 0, result.output
    for word in (
        "recipe",
        "accu-",
        "stall",
        "dicted",
        "times",
        "dataloader",
        "lru",
        "minio",
        "An epoch takes",
        "with torch's DataLoader",
        "Limit of an epoch",
    ):
        assert word in result.output
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
    time, hits = figures[0].axes
    assert [label.get_text() for label in time.get_yticklabels()][-1] == "torch DataLoader"
    told = [text.get_text() for text in time.texts]
    assert len(told) == 3 and hits.get_xlabel()
    # Torch's own loader is the topmost, with the times that the table has for it.
    times = re.fullmatch(r"(\d+\.\d\d) s, waiting (\d+\.\d\d)", told[-1])
    row = next(line for line in result.output.splitlines() if line.startswith("dataloader"))
    assert times and set(times.groups()) <= set(row.split()), (told[-1], row)


def test_a_cache_for_everything_leaves_nothing_to_fetch(few_digits: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        root,
        [
            *("demo", "--data", str(few_digits), "--recipes", "lru", "--cache", "100%"),
            *("--no-dataloader", "--json", "--output", str(tmp_path), *QUICK),
        ],
    )
    assert result.exit_code == 0, result.output
    [run] = json.loads(result.stdout)["runs"]
    assert run["epochs"][1]["stats"]["fetched"] == 0
    assert run["hit_ratio"] == 1


def test_too_few_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "one.jpg").write_bytes(b"x")
    result = demo("--data", str(tmp_path))
    assert result.exit_code == 1
    assert "give at least 60" in result.output
