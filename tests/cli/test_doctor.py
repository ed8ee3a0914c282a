"""`stoker doctor` on this machine, and with parts missing."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from stoker.cli import doctor as module
from stoker.cli.root import root


def test_json_holds_what_would_be_used() -> None:
    result = CliRunner().invoke(root, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    assert facts["core"]["found"]
    assert facts["extras"]["tui"] == []
    assert 0 < facts["would_use"]["sensible_cache"] < facts["would_use"]["largest_cache"]


def test_table_names_core_memory_and_extras() -> None:
    output = CliRunner().invoke(root, ["doctor"]).output
    for word in ("native core", "found", "memory", "cgroup limit", "/dev/shm", "extra torch"):
        assert word in output


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
