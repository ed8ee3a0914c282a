"""The one list of metrics, and what a job's loader publishes of them."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from support.parts import number_of, numbers
from support.waiting import until

from stoker.epoch.stats import Stats
from stoker.jobs.metrics import COUNTS, PUBLISHED, WAIT_SECONDS, exposition
from stoker.jobs.survey import JobInfo, survey
from stoker.pytorch import Loader, SampleDataset

TRAINING = """
import signal
from support.parts import number_of, numbers
from stoker.pytorch import Loader, SampleDataset
with Loader(SampleDataset(numbers(200), number_of), batch_size=10, recipe="lru") as loader:
    list(loader)
    list(loader)
    print("trained", flush=True)
    signal.pause()
"""


def only_job() -> JobInfo:
    [job] = [job for cache in survey() for job in cache.jobs]
    return job


def exposed() -> str:
    return exposition([cache.told() for cache in survey()], {})


def test_the_list_is_of_what_stats_count() -> None:
    assert set(PUBLISHED) <= {field.name for field in fields(Stats)}
    assert len(set(PUBLISHED)) == len(PUBLISHED)


def test_the_list_leaves_out_only_what_takes_a_pass_over_all_samples() -> None:
    assert {field.name for field in fields(Stats)} - set(PUBLISHED) == {"coverage", "ess"}


def test_names_and_help_keep_the_conventions() -> None:
    families = {metric.family: metric for metric in COUNTS}
    for name, metric in families.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert not name.endswith("_total")
        assert metric.help.endswith(".")
        if name.endswith("_seconds"):
            assert metric.help.startswith("Seconds")
        if "bytes" in name:
            assert "ytes" in metric.help


def test_what_an_epoch_counted_is_published_at_its_end() -> None:
    with Loader(SampleDataset(numbers(200), number_of), batch_size=10, recipe="lru") as loader:
        list(loader)
        list(loader)
        job, stats = only_job(), loader.stats
        for name in ("accesses", "hits", "fetched", "bytes_from_source"):
            assert job.counts[name] == getattr(stats, name), name
        assert sum(job.waits) == 40
        assert job.counts["read"] + job.counts["read_ahead"] > 0


def test_prometheus_reads_families_in_one_piece_with_a_histogram_of_waits() -> None:
    with Loader(SampleDataset(numbers(200), number_of), batch_size=10, recipe="lru") as loader:
        list(loader)
        text = exposed()
    lines = text.splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert "stoker_job_stall_seconds_total" in types
    buckets = [line for line in lines if line.startswith("stoker_job_batch_wait_seconds_bucket")]
    counts = [int(line.rpartition(" ")[2]) for line in buckets]
    assert len(buckets) == len(WAIT_SECONDS) + 1
    assert counts == sorted(counts)
    assert 'le="+Inf"' in buckets[-1]
    assert f'le="{WAIT_SECONDS[0]}"' in buckets[0]
    [total] = [line for line in lines if line.startswith("stoker_job_batch_wait_seconds_count")]
    assert int(total.rpartition(" ")[2]) == counts[-1] == 20
    for tier in ("cache", "source", "disk", "pool"):
        assert re.search(rf'stoker_job_bytes_total{{.*tier="{tier}"}} \d', text)


def test_another_process_is_seen_with_its_counts_until_it_is_killed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING], stdout=subprocess.PIPE, text=True, cwd="tests"
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "trained\n"
        job = only_job()
        assert job.pid == process.pid
        assert job.counts["accesses"] == 400
        assert 'stoker_job_accesses_total{cache="' in exposed()
        process.kill()
        process.wait()
    until(lambda: not any(cache.jobs for cache in survey()))


def test_the_document_lists_every_family() -> None:
    document = (Path(__file__).parents[2] / "docs" / "operate.md").read_text()
    missing = [metric.help for metric in COUNTS if metric.help not in document]
    assert missing == []
    with Loader(SampleDataset(numbers(200), number_of), batch_size=10, recipe="lru") as loader:
        list(loader)
        families = re.findall(r"# TYPE (\S+)", exposed())
    assert [family for family in families if f"`{family}`" not in document] == []
