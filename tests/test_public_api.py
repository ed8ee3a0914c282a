"""What is public changes only on purpose: names, parameters, members, commands and options.

``python tests/test_public_api.py`` writes the listing again, for a change that is meant.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path
from typing import Any

import click

import stoker
from stoker.cli.root import root

ROOT = Path(__file__).parents[1]
LISTING = ROOT / "tests" / "public_api.txt"


def packages() -> tuple[str, ...]:
    """The packages of the reference, as docs/conf.py lists them."""
    (listed,) = re.findall(r"^PUBLIC = (\(.*?\))", (ROOT / "docs/conf.py").read_text(), re.M | re.S)
    found: tuple[str, ...] = ast.literal_eval(listed)
    return found


def parameters(thing: Any) -> str:
    """Names, kinds and defaults, without annotations: "(dataset, batch_size=1, *, seed=0)"."""
    try:
        signature = inspect.signature(thing)
    except ValueError:  # an exception or a generic alias of the standard library
        return ""
    bare = [
        each.replace(annotation=each.empty, default=_Default.of(each.default))
        for each in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


class _Default:
    """Shown as the default is, where that is the same in each process and Python."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown

    @classmethod
    def of(cls, value: Any) -> Any:
        plain = value is inspect.Parameter.empty or isinstance(value, str | int | float | None)
        if plain and not isinstance(value, stoker.Outcome):
            return value
        return cls("..." if " at 0x" in repr(value) or "<" in repr(value) else repr(value))


def members(kind: type) -> Iterator[str]:
    """The public members that our own classes give it, as "name(parameters)" or "name"."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("stoker"):
            found |= {name: getattr(kind, name, None) for name in vars(base) if name[0] != "_"}
            found |= dict.fromkeys(n for n in inspect.get_annotations(base) if n[0] != "_")
    for name, value in sorted(found.items()):
        yield name + (parameters(value) if _is_method(value) else "")


def _is_method(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def commands(command: click.Command, name: str) -> Iterator[str]:
    """A command with its options, and those below it."""
    options = sorted(
        option for each in command.params for option in (*each.opts, *each.secondary_opts)
    )
    yield " ".join((name, *options))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            assert below is not None
            yield from commands(below, f"{name} {each}")


def listing() -> str:
    """All that is public, a line each."""
    lines: list[str] = []
    first: dict[int, str] = {}
    for package in packages():
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            thing = getattr(module, name)
            if callable(thing) and first.setdefault(id(thing), package) != package:
                lines.append(f"{package}.{name} = {first[id(thing)]}.{name}")
                continue
            plain = not callable(thing) or isinstance(thing, EnumType)
            lines.append(f"{package}.{name}" + ("" if plain else parameters(thing)))
            if isinstance(thing, type):
                lines += [f"{package}.{name}.{member}" for member in members(thing)]
    return "\n".join([*lines, *commands(root, "stoker")]) + "\n"


def test_the_public_interface_is_the_listed_one() -> None:
    listed, found = LISTING.read_text().splitlines(), listing().splitlines()
    gone = sorted(set(listed) - set(found))
    new = sorted(set(found) - set(listed))
    assert (gone, new) == ([], []), "if it is meant: python tests/test_public_api.py"
    assert listed == found


def test_the_listing_sees_members_defaults_and_options() -> None:
    lines = LISTING.read_text().splitlines()
    assert any(line.startswith("stoker.Loader(dataset, batch_size=1") for line in lines)
    assert "stoker.Loader.stats" in lines
    assert any(line.startswith("stoker demo") and "--no-dataloader" in line for line in lines)


def test_the_version_is_the_same_everywhere() -> None:
    version = stoker.__version__
    for file, line in (
        ("pyproject.toml", rf'^version = "{version}"$'),
        ("CITATION.cff", rf'^version: "{version}"$'),
        ("CHANGELOG.md", rf"^## {version}\b"),
    ):
        assert re.search(line, (ROOT / file).read_text(), re.M), file


if __name__ == "__main__":
    LISTING.write_text(listing())
