"""Settings of the documentation site (``make docs``), whose sources are the repository's pages."""

from __future__ import annotations

import importlib
from typing import Any

from sphinx.application import Sphinx

import stoker

project, author = "Stoker", "the Stoker developers"
copyright = f"2026, {author}"
release = version = stoker.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "*.md", "docs/**.md", "benchmarks/RESULTS.md", "benchmarks/results/*.md",
]  # fmt: skip
exclude_patterns = ["build", ".venv", "README.md"]  # docs/index.md takes the place of README

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# Links to files and folders that are no pages; tests/test_docs.py checks that they exist.
suppress_warnings = ["myst.xref_missing", "myst.header"]

autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("ArrayLike", "DTypeLike", "NDArray")}
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}

highlight_language = "none"  # of blocks that name no language

html_theme = "furo"
pygments_style = "friendly"  # which has what a diff adds in green
html_title = f"Stoker {release}"
html_extra_path = ["site"]
html_copy_source = False

# The packages whose __all__ is public; a name belongs to the first that has it.
PUBLIC = (
    "stoker", "stoker.pytorch", "stoker.feed", "stoker.source", "stoker.images", "stoker.recipes",
    "stoker.policy", "stoker.sampler", "stoker.importance", "stoker.store", "stoker.sim",
    "stoker.bundles", "stoker.loggers", "stoker.testing",
)  # fmt: skip
_moved: dict[str, str] = {}
"""Where a name is documented, by where it is defined."""


def show_where_users_find_them() -> None:
    """Let each public class and function say the package that users import it from."""
    for package in PUBLIC:
        module = importlib.import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            defined = f"{getattr(thing, '__module__', '')}.{name}"
            is_new = defined not in _moved and defined not in _moved.values()
            if is_new and callable(thing) and defined.startswith("stoker."):
                _moved[defined] = f"{package}.{name}"
                thing.__module__ = package


def resolve(app: Sphinx, env: Any, node: Any, inner: Any) -> Any:
    """Resolve a reference to where something is defined by where it is documented."""
    target = _moved.get(str(node.get("reftarget", "")).removeprefix("~"))
    if target is None or node.get("refdomain") != "py":
        return None
    return env.domains["py"].resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], target, node, inner
    )


def setup(app: Sphinx) -> None:
    """Register the above with Sphinx."""
    show_where_users_find_them()
    app.connect("missing-reference", resolve)
