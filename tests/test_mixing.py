"""stoker.mix: what it makes of what, what it does not take, and its page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.parts import number_of, numbers

import stoker
from stoker.errors import ConfigError
from stoker.mixing import MixedSource
from stoker.pytorch import MixedDataset, SampleDataset
from stoker.sampler import Mixture
from stoker.source import MemorySource

PAGE = Path(__file__).parents[1] / "docs" / "mixtures.md"


def test_data_sets_and_sources() -> None:
    weights = {"a": 1, "b": 1}
    sources = {"a": numbers(3), "b": numbers(4)}
    mixed = stoker.mix(sources, weights, epoch_samples=5)
    assert isinstance(mixed, MixedSource) and len(mixed) == 7
    sets = {name: SampleDataset(each, number_of) for name, each in sources.items()}
    assert isinstance(stoker.mix(sets, weights, epoch_samples=5), MixedDataset)
    with pytest.raises(ConfigError, match="sources beside data sets"):
        stoker.mix({**sources, "b": sets["b"]}, weights, epoch_samples=5)
    with pytest.raises(ConfigError, match="tagged"):
        stoker.mix(sources, weights, epoch_samples=5, tagged=True)


@pytest.mark.parametrize("parts", [{}, [1, 2], {"a": "/data/train", "b": 3}])
def test_other_things_raise(parts: Any) -> None:
    with pytest.raises(ConfigError):
        stoker.mix(parts, {"a": 1, "b": 1}, epoch_samples=5)


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    np.save(tmp_path / "web.npy", np.arange(20_000, dtype=np.int32).reshape(5000, 4))
    np.save(tmp_path / "code.npy", np.arange(2_000, dtype=np.int32).reshape(500, 4))
    training, replay = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.M)
    exec(compile(training.replace("/data", str(tmp_path)), PAGE.name, "exec"), {})
    assert capsys.readouterr().out.splitlines()[-2:] == ["web 2100 0.42", "code 900 1.8"]
    exec(compile(replay, PAGE.name, "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    hits = {name: float(value) for name, value in (line.split(": ") for line in lines)}
    assert hits["foresight"] > max(hits["lru"], hits["minio"])


def test_origins_of_sources() -> None:
    parts = [MemorySource([b"x"] * 10), MemorySource([b"y"] * 5)]
    source = MixedSource(parts, Mixture(("a", "b"), (10, 5), {"a": 1, "b": 1}, 20))
    assert source.names == ("a", "b")
    assert source.origins(np.array([0, 9, 10, 14], np.uint32)).tolist() == [0, 0, 1, 1]
