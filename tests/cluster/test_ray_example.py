"""examples/ray_train.py can be imported where Ray is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


def test_the_example_is_python() -> None:
    compile(EXAMPLE.read_text(), str(EXAMPLE), "exec")


def test_the_example_finds_what_it_needs() -> None:
    pytest.importorskip("ray.train", reason='no Ray here: pip install "ray[train]"')
    spec = importlib.util.spec_from_file_location("ray_train", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert callable(module.train)
