"""Every import in the source, also inside functions, against the ladder of ARCHITECTURE.md."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest
from support.modules import SOURCE, Module, modules

ARCHITECTURE = Path(__file__).parents[1] / "ARCHITECTURE.md"


def ladder(text: str) -> list[tuple[set[str], bool]]:
    """Return the rungs that the page draws, with whether braces stand around their parts."""
    line = next(part for part in text.split("\n\n") if " → " in part)
    rungs = [rung.strip() for rung in " ".join(line.split()).split(" → ")]
    return [
        ({part.strip() for part in rung.strip("{}").split(",")}, rung.startswith("{"))
        for rung in rungs
    ]


DRAWN = ladder(ARCHITECTURE.read_text().split("## The import ladder")[1])
RUNGS = [{"_core", "_images", "_version"}, *(parts for parts, _ in DRAWN)]
SIBLINGS = next(parts for parts, is_braced in DRAWN if is_braced)
RUNG_OF = {part: rung for rung, parts in enumerate(RUNGS) for part in parts}
# Stands beside the ladder: imports anything but the command line, which alone may import it
# (its demo needs slow storage to show).
TESTING = "testing"
# These write samples as bytes, tensors too, and load torch for one only.
KNOW_TENSORS = {"stoker.epoch.codec"}
# `import stoker`, which re-exports: above everything but the command line.
FACE = ""


def part_of(module: str) -> str:
    """Return the part that ``stoker.part.anything`` belongs to."""
    return module.split(".")[1] if "." in module else FACE


@cache
def imports(module: Module) -> list[tuple[int, str]]:
    """Return (line, absolute module) of every import, wherever it stands."""
    found: list[tuple[int, str]] = []
    is_package = module.path.stem == "__init__"
    package = module.dotted if is_package else module.dotted.rpartition(".")[0]
    for node in module.nodes:
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            if base == "stoker":
                found += ((node.lineno, as_module(alias.name)) for alias in node.names)
            else:
                found.append((node.lineno, base))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.append((node.lineno, first.value))
    return found


def as_module(name: str) -> str:
    """``from stoker import plan`` is an import of the part, ``import Loader`` of the face.

    So is ``import _core``: the compiled core stands below all, the face above.
    """
    known = name in RUNG_OF.keys() - {"_core", "_images"} or name == TESTING
    return f"stoker.{name}" if known else "stoker"


def allowed(importer: str, imported: str) -> bool:
    """May part ``importer`` import part ``imported``?"""
    if importer == imported:
        return True
    if imported == TESTING:
        return importer == "cli"
    if importer in (TESTING, FACE):
        return imported != "cli"
    if imported == FACE:
        return importer == "cli"
    if importer in SIBLINGS and imported in SIBLINGS:
        return False
    return RUNG_OF[imported] <= RUNG_OF[importer]


def test_every_part_has_a_rung() -> None:
    parts = {part_of(module.dotted) for module in modules()} - {FACE, TESTING, "__main__"}
    assert parts <= RUNG_OF.keys(), "add the new part to the ladder in ARCHITECTURE.md"


def test_every_rung_is_a_part_that_exists() -> None:
    missing = [
        part
        for parts, _ in DRAWN
        for part in parts
        if not (SOURCE / part).is_dir() and not (SOURCE / f"{part}.py").is_file()
    ]
    assert missing == []


def test_braces_are_read_to_the_last() -> None:
    found = ladder("Words.\n\na, b → {c,\nd} → e → {f} → g\n\nWords → no.")
    assert [parts for parts, _ in found] == [{"a", "b"}, {"c", "d"}, {"e"}, {"f"}, {"g"}]
    assert [is_braced for _, is_braced in found] == [False, True, False, True, False]
    assert {"source", "importance", "sampler", "policy"} == SIBLINGS
    assert sum(is_braced for _, is_braced in DRAWN) > 1


def test_left_never_imports_right() -> None:
    wrong = [
        f"{module.name}:{line} imports {name}"
        for module in modules()
        for line, name in imports(module)
        if name.split(".")[0] == "stoker" and not allowed(part_of(module.dotted), part_of(name))
    ]
    assert not wrong


def test_torch_is_imported_in_its_own_corner() -> None:
    wrong = [
        f"{module.name}:{line} imports {name}"
        for module in modules()
        if part_of(module.dotted) not in {"pytorch", "cli", TESTING}
        and module.dotted not in KNOW_TENSORS
        for line, name in imports(module)
        if name.split(".")[0] in {"torch", "torchdata"}
    ]
    assert not wrong


def test_the_core_needs_numpy_only() -> None:
    """Below the frameworks, whatever is not NumPy is imported where it is used, not at the top."""
    allowed_roots = sys.stdlib_module_names | {"numpy", "stoker"}
    wrong = {
        module.name: sorted(roots - allowed_roots)
        for module in modules()
        if part_of(module.dotted) not in RUNGS[-1] | RUNGS[-2] | {TESTING}
        and (roots := roots_at_the_top(module)) - allowed_roots
    }
    assert not wrong


def roots_at_the_top(module: Module) -> set[str]:
    """Return the first parts of what a module imports when it is imported."""
    roots: set[str] = set()
    for node in module.tree.body:
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.split(".")[0])
    return roots


@pytest.mark.parametrize(
    ("importer", "imported", "verdict"),
    [
        ("store", "policy", True),
        ("policy", "store", False),
        ("policy", "sampler", False),
        ("plan", "scores", True),
        ("pytorch", "recipes", True),
        ("recipes", "pytorch", False),
        ("epoch", "pytorch", False),
        ("sim", "epoch", True),
        ("cli", FACE, True),
        ("store", FACE, False),
        ("store", TESTING, False),
        (TESTING, "cli", False),
        (FACE, "pytorch", True),
    ],
)
def test_the_rule_itself(importer: str, imported: str, verdict: bool) -> None:
    assert allowed(importer, imported) == verdict
