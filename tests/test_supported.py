"""The page of formats and frameworks says what marked tests show, and no more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import exact

PAGE = Path(__file__).parents[1] / "docs" / "supported.md"


def test_the_page_says_what_tests_show() -> None:
    """Written by ``pytest -m exact --supported docs/supported.md``."""
    page, lines = PAGE.read_text(), exact.rows(exact.written())
    for subject in exact.SUBJECTS:
        if exact.is_testable(subject):
            assert lines[subject] in page, f"{subject}: write the page again"
    known = {f"| {subject} |" for subject in lines}
    body = [line for line in page.splitlines() if line.startswith("| ") and "| how |" not in line]
    assert [line for line in body if not line.startswith(tuple(known))] == []


def report(outcome: str, *claims: str, when: str = "call", why: str = "") -> Any:
    shown = [["Parquet", claim] for claim in claims]
    properties = [(exact.PROPERTY, shown)] if claims else []
    outcomes = {each: each == outcome for each in ("passed", "failed", "skipped")}
    return SimpleNamespace(user_properties=properties, when=when, longrepr=why, **outcomes)


def test_a_claim_needs_all_its_tests(tmp_path: Path) -> None:
    recorder = exact.Recorder(tmp_path / "page")
    for each in (
        report("passed", "a", when="setup"),
        report("passed", "b", "c"),
        report("failed", "c"),
        report("skipped", "d", when="setup"),
        report("skipped", "h", when="setup", why="jax is not installed: pip install ..."),
        report("passed"),
        report("passed", "b", when="teardown"),
    ):
        recorder.pytest_runtest_logreport(each)
    page = "| Parquet | how | extra | c; d; e; g; h |"
    all_of = {"Parquet": ["a", "b", "c", "d", "e", "f", "h"], "LMDB": ["g"]}
    assert recorder.claims(page, all_of) == {"Parquet": ["b", "e", "h"]}  # e and h were not tried


def test_tables_are_put_between_their_marks() -> None:
    page = "x\n<!-- begin: formats -->\nold\n<!-- end -->\n<!-- begin: frameworks -->\n<!-- end -->"
    made = exact.on_page(page, {"Parquet": ["rows", "resume"], "Accelerate": ["scores"]})
    assert exact.on_page(made, {"Parquet": ["rows", "resume"], "Accelerate": ["scores"]}) == made
    formats, frameworks = made.split("<!-- end -->")[:2]
    assert "| Parquet | `ParquetSource` | `arrow` | rows; resume |\n" in formats
    assert "Accelerate" not in formats and "| Accelerate |" in frameworks and "old" not in made


def test_an_unknown_subject_is_an_error() -> None:
    with pytest.raises(KeyError):
        exact.ordered([("Punch cards", "rows")])
