"""`stoker doctor` on this machine, with parts missing, and on storage that is slow on purpose."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from images.photographs import photographs
from source.conftest import cache_home  # noqa: F401  (fixtures)
from support.s3 import Bucket

import stoker
from stoker import ImageFolder, Loader, bounds
from stoker.cli import _storage
from stoker.cli.root import root
from stoker.node.memory import Memory
from stoker.source.image_folder import ImageFolderSource
from stoker.testing import SlowSource

module = importlib.import_module("stoker.cli.doctor")


def test_json_holds_what_would_be_used() -> None:
    result = CliRunner().invoke(root, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    assert facts["core"]["found"]
    assert facts["extras"]["tui"] == []
    assert 0 < facts["would_use"]["sensible_cache"] < facts["would_use"]["largest_cache"]


def test_table_names_core_memory_and_extras() -> None:
    output = CliRunner().invoke(root, ["doctor"]).output
    words = (
        "native core",
        "found",
        "memory",
        "cgroup limit",
        "/dev/shm",
        "extra torch",
        "of JPEGs",
    )
    for word in words:
        assert word in output


def test_the_build_is_told_and_one_of_another_version_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = module.examine_build()
    assert build["version"] == stoker.__version__
    assert re.fullmatch(r"(GNU|Clang|AppleClang) [\d.]+", build["compiler"])
    assert re.fullmatch(r"[0-9a-f]{12}|", build["commit"])
    assert build["abi"] in (f"cp{sys.version_info.major}{sys.version_info.minor}", "abi3")
    told = CliRunner().invoke(root, ["--version"]).output
    assert told == f"stoker {stoker.__version__} ({module.describe_build(build)})\n"
    monkeypatch.setattr(module, "examine_build", lambda: build | {"version": "0.9"})
    assert "of version 0.9: install stoker again" in CliRunner().invoke(root, ["doctor"]).output


def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(module._EXTRAS, "cloud", ("no_such_module",))
    output = CliRunner().invoke(root, ["doctor"], terminal_width=200).output
    assert "needs no_such_module" in output
    assert "stoker[cloud]" in output


def test_without_the_core_the_exit_status_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_core", lambda: {"found": False, "error": "not built"})
    result = CliRunner().invoke(root, ["doctor"])
    assert result.exit_code == 1
    assert "missing" in result.output
    assert "not built" in result.output


def measure(*arguments: object, status: int = 0) -> str:
    command = ["doctor", *map(str, arguments), "--seconds", "1.5"]
    result = CliRunner().invoke(root, command, terminal_width=200)
    assert result.exit_code == status, result.output
    # Lines are folded at the width of the terminal.
    return " ".join((result.stdout if status == 0 else result.output).split())


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local folders answer 400 reads a second, each after 5 ms."""

    def opened(url: str, *_: object) -> SlowSource:
        return SlowSource(ImageFolderSource(url), latency=0.005, tail=0.0, iops=400)

    monkeypatch.setattr(module, "open_url", opened)


def test_training_that_outruns_storage_needs_a_cache(few_digits: Path, slow: None) -> None:
    facts = json.loads(measure(few_digits, "--compute-rate", "1000", "--json"))["storage"]
    assert facts["samples"] == 300
    assert facts["latency"]["p50"] == pytest.approx(0.005, rel=0.6)
    assert facts["bound_by"] == "storage"
    assert any("foresight:block=32" in note for note in facts["notes"])
    assert facts["rates"]["storage"] == pytest.approx(400, rel=0.3)
    assert facts["smallest_cache"] == pytest.approx(1 - facts["rates"]["storage"] / 1000)
    assert facts["epoch_without_cache"]["stall_share"] == pytest.approx(0.6, abs=0.13)
    assert facts["epoch_with_advice"]["stall_share"] == pytest.approx(0, abs=1e-9)
    assert facts["decode_seconds"] > 0
    assert facts["page_cache"] == {"applies": True, "suffices": True}
    arguments = facts["advice"]["arguments"]
    assert int(arguments["cache"].rstrip("%")) == pytest.approx(60, abs=13)
    Loader(ImageFolder(few_digits), **arguments).close()


def test_slow_training_needs_none(few_digits: Path, slow: None) -> None:
    output = measure(few_digits, "--compute-rate", "50")
    assert "bound by" in output and "compute; an epoch takes at least 6.0 s" in output
    assert "none: even without one storage keeps up" in output and "block=" not in output
    assert "cache='20%'" in output


def test_without_a_rate_it_says_what_storage_can_feed(few_digits: Path, slow: None) -> None:
    output = measure(few_digits)
    assert "samples/s waits (--compute-rate)" in output
    assert "with it storage keeps up with decoding" in output
    assert "measure data that was not read recently" in output


def test_little_memory_leads_to_the_disk(
    few_digits: Path, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(total=1 << 30, free=1000, cgroups=())
    monkeypatch.setattr(_storage, "read_memory", lambda: memory)
    facts = json.loads(measure(few_digits, "--compute-rate", "1000", "--json"))["storage"]
    assert not facts["page_cache"]["suffices"]
    assert "disk" in facts["advice"]["arguments"]["cache"]


def test_an_object_store(few_digits: Path, bucket: Bucket) -> None:
    files = [path for path in few_digits.rglob("*") if path.is_file()][:60]
    bucket.put({f"train/{file.relative_to(few_digits)}": file.read_bytes() for file in files})
    given = [
        f"--option={name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in bucket.options().items()
    ]
    facts = json.loads(measure(f"{bucket.url}/train", *given, "--json"))["storage"]
    assert facts["samples"] == 60 and facts["page_cache"]["applies"] is False
    assert facts["decode_seconds"] > 0
    assert "does not keep objects" in measure(f"{bucket.url}/train", "--image-folder", *given)


@pytest.fixture
def photograph_root(tmp_path: Path) -> Path:
    """Two hundred photographs, larger than training needs them."""
    (tmp_path / "class").mkdir()
    for number in range(200):
        data = photographs()[number % len(photographs())]
        (tmp_path / "class" / f"{number:03}.jpg").write_bytes(data)
    return tmp_path


def test_smaller_images_are_measured(photograph_root: Path, slow: None) -> None:
    facts = json.loads(measure(photograph_root, "--compute-rate", "450", "--json"))["storage"]
    resized = facts["resized"]
    assert resized["stage"] == "resized:288" and 0.15 < resized["factor"] < 0.7
    assert 0 < resized["decode_seconds"] < facts["decode_seconds"]
    assert resized["make_seconds"] > 0
    share = facts["advice"]["cached"] / resized["factor"]
    assert resized["cached"] == pytest.approx(min(1, share))


@pytest.mark.parametrize(
    ("storage", "factor", "make_seconds", "is_worth_it"),
    [
        (100, 0.3, 0.002, True),
        (100, 0.9, 0.002, False),  # hardly smaller
        (100, 0.3, 0.5, False),  # it takes longer than reading
        (9000, 0.3, 0.002, False),  # storage is fast enough
    ],
)
def test_smaller_images_are_advised_where_they_help(
    storage: float, factor: float, make_seconds: float, is_worth_it: bool
) -> None:
    resized = {"factor": factor, "make_seconds": make_seconds, "decode_seconds": 0.0005}
    found = _storage._with_resized(bounds.Rates(storage, 1000.0), resized, 0.2, 2)
    assert found["is_worth_it"] is is_worth_it
    assert found["cached"] == pytest.approx(0.2 / factor)


def test_the_advice_on_smaller_images_is_a_line(photograph_root: Path, slow: None) -> None:
    output = measure(photograph_root)
    assert "smaller images stoker.Cache(..., stage='resized:288') keeps" in output


def test_small_images_are_not_made_smaller(few_digits: Path, slow: None) -> None:
    facts = json.loads(measure(few_digits, "--json"))["storage"]
    assert facts["resized"] is None
    assert "smaller images" not in measure(few_digits)


def test_what_cannot_be_measured_is_refused_without_a_trace(few_digits: Path) -> None:
    assert "is invalid: give it as NAME=VALUE" in measure(few_digits, "--option", "x", status=1)
    assert "--most='lots'" in measure(few_digits, "--most", "lots", status=1)
    assert "no/such" in measure("/no/such", status=1)
    assert "--compute-rate" in measure(few_digits, "--compute-rate", "0", status=2)
