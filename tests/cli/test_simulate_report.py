"""`stoker report` of a real trace says what the loader counted."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from support.parts import number_of, numbers

from stoker.cli.root import root
from stoker.pytorch import Loader, SampleDataset
from stoker.sim.report import stats_of
from stoker.sim.trace import Trace


def test_a_trace_becomes_a_page_with_the_counts_of_the_loader(tmp_path: Path) -> None:
    path, data = tmp_path / "trace", SampleDataset(numbers(60), number_of)
    with Loader(data, batch_size=10, recipe="lru", cache="50%", trace=path) as loader:
        for _ in range(2):
            list(loader)
        counted = loader.epoch_stats
    with Trace(path) as trace:
        for epoch, stats in zip(trace, counted, strict=True):
            told = stats_of(epoch, trace.sizes)
            for name in ("accesses", "hits", "fetched", "substituted", "packaged"):
                assert getattr(told, name) == getattr(stats, name), name
            assert 0 < told.stall_seconds <= told.epoch_seconds
    result = CliRunner().invoke(root, ["report", str(path)])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "trace.html").read_text()
    assert text.count("<tr><td>") == 2
    assert "12 batches; p50" in text


def test_what_is_no_trace_is_an_error_without_a_page(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"nothing of the kind")
    result = CliRunner().invoke(root, ["report", str(path), "-o", str(tmp_path / "page.html")])
    assert result.exit_code == 1
    assert not (tmp_path / "page.html").exists()
