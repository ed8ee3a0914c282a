"""Each code block of the documentation is run by a test, or says above it why not.

A block that no test runs follows a line ``<!-- not run: REASON -->``. What it names exists all the
same: commands with their options, and names of Stoker with the arguments that they are called with.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from support.pages import ROOT

from stoker.cli.root import root

RUN = {
    "README.md": ("tests/test_readme.py", 1),
    "docs/distributed-sampler.md": ("tests/pytorch/test_distributed_sampler_doc.py", 2),
    "docs/examples.md": ("tests/frameworks/test_ported.py", 5),
    "docs/extend.md": ("tests/testing/test_own_parts_docs.py", 9),
    "docs/feed.md": ("tests/feed/test_feed_doc.py", 1),
    "docs/formats.md": ("tests/test_site.py", 3),
    "docs/images.md": ("tests/test_site.py", 1),
    "docs/migrate.md": ("tests/test_site.py", 2),
    "docs/mixtures.md": ("tests/test_mixing.py", 2),
    "docs/nodes.md": ("tests/test_readme.py", 2),
    "docs/operate.md": ("tests/jobs/test_operate_doc.py", 2),
    "docs/pool.md": ("tests/test_readme.py", 2),
    "docs/resume.md": ("tests/test_readme.py", 3),
    "docs/sequences.md": ("tests/sampler/test_sequences_doc.py", 1),
    "docs/serve.md": ("tests/jobs/test_serve_doc.py", 2),
    "docs/start.md": ("tests/test_site.py", 1),
    "docs/storage.md": ("tests/test_readme.py", 4),
    "docs/tiering.md": ("tests/tiering/test_docs.py", 2),
    "docs/tutorials/images-on-s3.md": ("tests/test_tutorials.py", 7),
    "docs/tutorials/nfs-and-nvme.md": ("tests/test_tutorials.py", 5),
    "docs/tutorials/reading-a-report.md": ("tests/test_tutorials.py", 2),
    "docs/tutorials/several-jobs.md": ("tests/test_tutorials.py", 3),
    "docs/tutorials/several-nodes.md": ("tests/test_tutorials.py", 4),
    "docs/tutorials/text-from-parquet.md": ("tests/test_tutorials.py", 7),
    "docs/tutorials/your-own-policy.md": ("tests/test_tutorials.py", 3),
    "docs/write-a-policy.md": ("tests/testing/test_own_parts_docs.py", 3),
}
"""Which test runs the blocks of a page that are not marked, and how many those are."""


class Block(NamedTuple):
    """A block of code, and why no test runs it."""

    page: str
    number: int
    language: str
    code: str
    excuse: str

    def __str__(self) -> str:
        return f"{self.page.removeprefix('docs/')}-{self.number}"


def found() -> Iterator[Block]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in pages:
        page = str(path.relative_to(ROOT))
        pattern = r"^(?:<!-- not run: (.+?) -->\n)?\n?```([^\n]*)\n(.*?)^```"
        text = re.findall(pattern, path.read_text(), re.DOTALL | re.M)
        for number, (excuse, language, code) in enumerate(text):
            if not language.startswith("{"):  # a directive of the site
                yield Block(page, number, language, code, excuse)


BLOCKS = list(found())
NOT_RUN = [block for block in BLOCKS if block.excuse]


def test_each_block_is_run_or_says_why_not() -> None:
    """A new block is marked; or the test of its page runs it, and the count above is one more."""
    left = Counter(block.page for block in BLOCKS if not block.excuse)
    left["README.md"] -= 1  # clones and builds: tests/check_wheel.py installs what that gives
    assert left == {page: count for page, (_, count) in RUN.items()}


@pytest.mark.parametrize("page", RUN)
def test_a_page_is_known_to_the_test_that_runs_it(page: str) -> None:
    test = (ROOT / RUN[page][0]).read_text()
    assert (Path(page).stem if page.startswith("docs/tutorials/") else Path(page).name) in test


@pytest.mark.parametrize("block", [b for b in NOT_RUN if "stoker " in b.code], ids=str)
def test_commands_that_are_not_run_exist_with_their_options(block: Block) -> None:
    for line in block.code.replace("\\\n", "").splitlines():
        words = shlex.split(line.partition(" #")[0].partition(" & ")[0]) or [""]
        if words[0] != "stoker" or words[1:2] == []:
            continue
        command: click.Command = root
        while isinstance(command, click.Group):
            command = command.get_command(click.Context(command), words.pop(1)) or pytest.fail(line)
        known = {name for part in command.params for name in part.opts + part.secondary_opts}
        own = words[: words.index("--")] if "--" in words else words
        assert {word.partition("=")[0] for word in own if word.startswith("--")} <= known, line


def resolve(node: ast.expr) -> Any:
    """What ``stoker.a.b`` is, or None for other expressions."""
    path = []
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    if not (isinstance(node, ast.Name) and node.id == "stoker"):
        return None
    thing: Any = importlib.import_module("stoker")
    for name in reversed(path):
        if inspect.ismodule(thing) and not hasattr(thing, name):
            thing = importlib.import_module(f"{thing.__name__}.{name}")
        else:
            thing = getattr(thing, name)
    return thing


def as_python(block: Block) -> str:
    """The block, or what a diff adds."""
    if block.language != "diff":
        return block.code
    hunks = re.split(r"^@@.*\n", block.code, flags=re.M)
    return "\n".join(map(_added, hunks))


def _added(hunk: str) -> str:
    """The new lines, with the brackets closed that old lines close."""
    lines = [line[1:] for line in hunk.splitlines() if line.startswith("+")]
    text = textwrap.dedent("\n".join(lines))
    return text + ")" * (text.count("(") - text.count(")"))


@pytest.mark.parametrize(
    "block",
    [b for b in NOT_RUN if b.language in ("python", "diff") or re.search(r"stoker\.[A-Z]", b.code)],
    ids=str,
)
def test_names_that_are_not_run_exist_with_their_arguments(block: Block) -> None:
    for node in ast.walk(ast.parse(as_python(block))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stoker"):
            module = importlib.import_module(str(node.module))
            assert [each.name for each in node.names if not hasattr(module, each.name)] == []
        if isinstance(node, ast.Attribute):
            resolve(node)  # raises AttributeError for a name that does not exist
        if isinstance(node, ast.Call) and (called := resolve(node.func)) is not None:
            names = inspect.signature(called).parameters.values()
            if all(each.kind != each.VAR_KEYWORD for each in names):
                known = {each.name for each in names}
                assert {str(word.arg) for word in node.keywords} <= known, ast.unparse(node)
