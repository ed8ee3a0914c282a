"""Optional members of our protocols are declared; nothing else asks whether an object has them."""

import ast
import inspect
from collections.abc import Iterator

from support.modules import Module, modules

from stoker.importance.base import Scorer
from stoker.policy import Policy, Shares
from stoker.sampler import Sampler
from stoker.source import Source
from stoker.store import RegionTier

# Here an object that a user wrote without our base classes gets what it lacks.
COMPLETING = {
    "importance/base.py",
    "policy/base.py",
    "policy/shares.py",
    "sampler/base.py",
    "source/base.py",
}


def members() -> set[str]:
    """Return the public members that the protocols declare."""
    kinds = (Policy, Shares, Sampler, Scorer, Source, RegionTier)
    names = {name for kind in kinds for name, _ in inspect.getmembers(kind)}
    return {name for name in names if not name.startswith("_")}


def asked(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every getattr and hasattr with a literal name."""
    for node in module.nodes:
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in {"getattr", "hasattr"}:
            continue
        name = node.args[1]
        if isinstance(name, ast.Constant):
            yield node.lineno, name.value


def test_members_are_declared_and_not_searched_for() -> None:
    declared = members()
    assert {"looks_ahead", "foresees", "take_scored", "for_cache", "is_ready"} <= declared
    found = [
        f"{module.name}:{line} asks for {name!r}"
        for module in modules()
        if module.name not in COMPLETING
        for line, name in asked(module)
        if name in declared
    ]
    assert found == []


def test_no_policy_or_scorer_delegates_by_getattr() -> None:
    wrong = [
        f"{module.name}:{node.lineno}"
        for module in modules()
        if module.name.startswith(("policy/", "importance/", "sampler/", "jobs/", "store/"))
        for node in module.nodes
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
    ]
    assert wrong == []
