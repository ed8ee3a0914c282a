"""Optional members of our protocols are declared; nothing else asks whether an object has them."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import stoker.errors
from stoker.importance.base import Scorer
from stoker.policy import Policy, Shares
from stoker.sampler import Sampler
from stoker.source import Source
from stoker.store import RegionTier

SOURCE = Path(stoker.errors.__file__).parent

# Here an object that a user wrote without our base classes gets what it lacks.
COMPLETING = {
    "importance/base.py",
    "policy/base.py",
    "policy/shares.py",
    "sampler/base.py",
    "source/adapt.py",
}


def members() -> set[str]:
    """Return the public members that the protocols declare."""
    kinds = (Policy, Shares, Sampler, Scorer, Source, RegionTier)
    names = {name for kind in kinds for name, _ in inspect.getmembers(kind)}
    return {name for name in names if not name.startswith("_")}


def asked(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every getattr and hasattr with a literal name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in {"getattr", "hasattr"}:
            continue
        name = node.args[1]
        if isinstance(name, ast.Constant):
            yield node.lineno, name.value


def test_members_are_declared_and_not_searched_for() -> None:
    declared = members()
    assert {"looks_ahead", "foresees", "take_scored", "for_cache", "is_ready"} <= declared
    found = [
        f"{path.relative_to(SOURCE)}:{line} asks for {name!r}"
        for path in sorted(SOURCE.rglob("*.py"))
        if str(path.relative_to(SOURCE)) not in COMPLETING
        for line, name in asked(path)
        if name in declared
    ]
    assert found == []


def test_no_policy_or_scorer_delegates_by_getattr() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for folder in ("policy", "importance", "sampler", "jobs", "store")
        for path in sorted((SOURCE / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
    ]
    assert wrong == []
