"""Every Python module of the source, read and parsed once for all tests that look at it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import stoker.errors

SOURCE = Path(stoker.errors.__file__).parent


@dataclass(frozen=True)
class Module:
    """One file; ``name`` is its path below the package: "store/store.py"."""

    path: Path
    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree, as ast.walk() gives them."""
        return tuple(ast.walk(self.tree))

    @property
    def dotted(self) -> str:
        """The name that it is imported by."""
        parts = ("stoker", *Path(self.name).with_suffix("").parts)
        return ".".join(parts).removesuffix(".__init__")


@cache
def modules() -> tuple[Module, ...]:
    """Return all of them, in the order of their paths."""
    return tuple(
        Module(path, path.relative_to(SOURCE).as_posix(), path.read_text())
        for path in sorted(SOURCE.rglob("*.py"))
    )


def module(path: Path) -> Module:
    """Return the module of one file."""
    return next(each for each in modules() if each.path == path)
