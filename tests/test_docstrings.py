"""Every public symbol says what it is, and every environment variable is told."""

import ast
import re
from collections.abc import Iterator
from inspect import isroutine
from itertools import chain
from pathlib import PurePath

from support.modules import modules
from support.pages import ROOT

import stoker._core
from stoker.images.resize import native

Symbol = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def is_public(name: str) -> bool:
    parts = PurePath(name).parts
    return not any(part.startswith("_") and part != "__init__.py" for part in parts)


def undocumented(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Yield public functions, classes and, within those, methods without a docstring."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from undocumented(node.body, prefix)
            yield from undocumented(node.orelse, prefix)
        if not isinstance(node, Symbol) or node.name.startswith("_") or is_exempt(node):
            continue
        if not ast.get_docstring(node):
            yield f"{prefix}{node.name} (line {node.lineno})"
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body, f"{prefix}{node.name}.")


def is_exempt(node: Symbol) -> bool:
    """An overload and a property's setter share the docstring of the definition they belong to."""
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(name.endswith(("overload", ".setter", ".deleter")) for name in names)


def test_every_public_symbol_is_documented() -> None:
    missing = []
    for module in modules():
        if not is_public(module.name):
            continue
        missing += [] if ast.get_docstring(module.tree) else [f"{module.name}: the module"]
        missing += [f"{module.name}: {symbol}" for symbol in undocumented(module.tree.body)]
    assert missing == []


def test_the_native_core_is_documented() -> None:
    missing = []
    compiled = [stoker._core, native()]
    for name, symbol in chain.from_iterable(vars(each).items() for each in compiled if each):
        if name.startswith("_"):
            continue
        if not symbol.__doc__:
            missing.append(name)
        for member, value in vars(symbol).items() if isinstance(symbol, type) else ():
            plain = isroutine(value) or isinstance(value, property)
            if plain and not member.startswith("_") and not value.__doc__:
                missing.append(f"{name}.{member}")
    assert missing == []


def test_every_environment_variable_is_told() -> None:
    used = {
        node.value
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Constant) and re.fullmatch("STOKER_[A-Z_]+", str(node.value))
    }
    page = (ROOT / "docs/reference/configuration.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == used
