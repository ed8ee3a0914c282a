"""What is in deploy/ for Prometheus and Grafana, and a real Prometheus that scrapes a training."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.pages import ROOT
from support.servers import free_port
from support.waiting import until

DEPLOY = ROOT / "deploy"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="prometheus and promtool are not on PATH"
)
CLI = "from stoker.cli import main; main()"
TRAINING = """
import stoker
from stoker.source import MemorySource
from stoker.testing import SlowSource
source = SlowSource(MemorySource([bytes(100)] * 200), latency=0.001)
with stoker.Feed(source, 10, cache="20%") as feed:
    while True:
        list(feed)
"""


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return found


def queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def test_only_metrics_that_there_are_are_named() -> None:
    page = (ROOT / "docs" / "operate.md").read_text()
    known = set(re.findall(r"^\| `(stoker_\w+)` \|", page, re.M))  # which a test keeps complete
    variables = [variable.get("query") for variable in dashboard()["templating"]["list"]]
    text = (DEPLOY / "alerts.yml").read_text() + json.dumps([queries(), variables])
    named = {name.removesuffix("_bucket") for name in re.findall(r"stoker_\w+", text)}
    assert named and named <= known


def test_panels_do_not_lie_on_each_other() -> None:
    taken = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells


@contextmanager
def running(*command: str, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=30):
            return True
    except OSError:  # it does not listen, or not answer, yet
        return False


def stall_share(port: int) -> dict[str, Any]:
    """Return what Prometheus makes of the share of time that training waits."""
    (share,) = asked(port, "query", query="stoker:stall_share")["result"]
    found: dict[str, Any] = share
    return found


def asked(port: int, path: str, **arguments: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)["data"]


@needs_prometheus
def test_rules_and_queries_are_valid() -> None:
    told = subprocess.run(
        [str(PROMTOOL), "check", "config", str(DEPLOY / "prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0 and "6 rules found" in told.stdout, told.stdout + told.stderr


@needs_prometheus
def test_a_real_prometheus_scrapes_a_training_and_evaluates_the_rules(tmp_path: Path) -> None:
    port = free_port()
    with running(
        sys.executable, "-c", CLI, "serve", "--memory", "64MiB", "--metrics-port", "0",
        stdout=subprocess.PIPE,
    ) as service, running(sys.executable, "-c", TRAINING):  # fmt: skip
        assert service.stdout is not None
        lines = iter(service.stdout.readline, "")
        metrics = next(
            found[1] for line in lines if (found := re.search(r"(127\S+)/metrics", line))
        )
        config = (DEPLOY / "prometheus.yml").read_text()
        config = config.replace("10s", "200ms").replace("127.0.0.1:9400", metrics)
        (tmp_path / "prometheus.yml").write_text(config)
        shutil.copy(DEPLOY / "alerts.yml", tmp_path)
        with running(
            str(PROMETHEUS),
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ):
            until(lambda: is_ready(port))
            until(lambda: asked(port, "query", query="stoker:stall_share")["result"])
            # The first rates are of two scrapes, which may lie between two reports of the job.
            until(lambda: 0 < float(stall_share(port)["value"][1]) <= 1.1)
            share = stall_share(port)
            assert share["metric"]["job"] != "stoker", "the label is the training's"
            rules = [rule for group in asked(port, "rules")["groups"] for rule in group["rules"]]
            assert len(rules) == 6
            assert {rule["health"] for rule in rules} == {"ok"}, rules
            for query in queries():
                filled = query.replace("$__rate_interval", "5m").replace('"$cache"', '".*"')
                filled = filled.replace('"$job"', '".*"')
                assert asked(port, "query", query=filled)["result"] or "limit" in filled, filled
