"""ARCHITECTURE.md against the code: what its pictures, tables and sentences name is there."""

import ast
import inspect
import re
from pathlib import Path

from support.modules import SOURCE, Module, modules

from stoker.epoch.placing import EpochCache
from stoker.importance.base import Scorer
from stoker.policy import Policy, Shares
from stoker.sampler import Sampler
from stoker.source import Source
from stoker.source.base import REQUIRED
from stoker.store import Tier

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()

KINDS = (Policy, Sampler, Scorer, Shares, EpochCache)
# Words of the picture that name no part, and the part that the loader stands for.
OUTSIDE = {"training", "reads", "who", "says", "stays"}
CALLED = {"loader": "epoch"}  # which Loader and Feed stand on


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def drawing(title: str) -> str:
    return section(title).split("```")[1]


def exists(part: str) -> bool:
    part = CALLED.get(part, part)
    return (SOURCE / part).is_dir() or (SOURCE / f"{part}.py").is_file()


def source_text() -> str:
    folders = (ROOT / "native", ROOT / "bindings", ROOT / "shim")
    native = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    texts = [path.read_text() for path in native if path.suffix in {".h", ".cpp", ".c"}]
    return "\n".join([*(module.text for module in modules()), *texts])


def classes() -> set[str]:
    return {
        node.name for module in modules() for node in module.nodes if isinstance(node, ast.ClassDef)
    }


def test_parts_of_the_picture_exist() -> None:
    words = set(re.findall(r"[a-z]+", re.sub(r"\(.*", "", drawing("The picture"))))
    assert {"sampler", "plan", "policy", "importance"} <= words
    assert [word for word in sorted(words - OUTSIDE) if not exists(word)] == []


def test_arrows_of_the_picture_are_imports() -> None:
    """Of two parts with an arrow between them one imports the other, or a module imports both."""
    arrows = re.findall(r"([a-z]+) ─► (?=([a-z]+))", drawing("The picture"))
    assert ("sampler", "plan") in arrows and len(arrows) > 3
    wrong = [
        f"{left} ─► {right}"
        for left, right in arrows
        if not {left, right} & OUTSIDE and not any(knows(each, left, right) for each in modules())
    ]
    assert wrong == []


def knows(module: Module, *parts: str) -> bool:
    """Whether a module belongs to one of ``parts`` or imports it, for each of them."""
    own = module.name.removesuffix(".py").split("/")[0]
    names = [CALLED.get(part, part) for part in parts]
    return all(
        name == own
        or re.search(rf"^from stoker\.{name}\b|^from stoker import .*\b{name}\b", module.text, re.M)
        for name in names
    )


def test_folders_are_those_of_the_tree() -> None:
    rows = drawing("Folders").split("src/stoker/\n")[1].splitlines()
    starts = [match[0] for row in rows if (match := re.match(r"  (\w+(/|\.py) ?)+", row))]
    listed = {name for start in starts for name in re.findall(r"\w+(?:/|\.py)", start)}
    there = {f"{path.name}/" for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    there |= {path.name for path in SOURCE.glob("*.py") if not path.name.startswith("_")}
    assert listed == there


def test_files_that_are_named_exist() -> None:
    for name in re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?|\w+\.py)`", PAGE):
        assert (ROOT / name).exists() or (SOURCE / name).exists(), name


def test_classes_that_are_named_exist() -> None:
    named = set(re.findall(r"`([A-Z][a-z]+\w*)`", PAGE))
    assert {"Policy", "Upstream"} <= named
    assert named - classes() == set()


def test_functions_and_constants_that_are_named_exist() -> None:
    text = source_text()
    named = set(re.findall(r"`(?:\w+\.)?(\w+)(?:\(\)|=)`", PAGE))
    named |= set(re.findall(r"`([A-Z]{3,})`", PAGE))
    named |= set(re.findall(r"`(\w+_\w+)`", PAGE))
    assert "verify" in named and "while_room" in named
    assert named - set(re.findall(r"\w+", text)) == set()


def test_the_protocols_have_the_members_of_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section("Protocols"), re.M)
    table = {name: set(re.findall(r"\w+", members)) for name, members in rows}
    abstract = {kind.__name__: set(kind.__abstractmethods__) for kind in KINDS}
    tier = {name for name, _ in inspect.getmembers(Tier, callable) if not name.startswith("_")}
    assert table == {**abstract, Source.__name__: set(REQUIRED), Tier.__name__: tier}
