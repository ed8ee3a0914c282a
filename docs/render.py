"""Render the API pages: ``python docs/render.py FOLDER`` (or ``make docs``)."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pdoc

import stoker

PARTS = ("bundles", "pytorch", "policy", "sampler", "source", "store", "testing", "types")
"""What is not reached from the names that `stoker` itself exports."""


def main() -> None:
    """Write one page per public module into the folder that was named."""
    # Names that load torch on demand have to be there before pdoc looks.
    vars(stoker).update({name: getattr(stoker, name) for name in stoker.__all__})
    # pdoc cannot resolve the annotations of NamedTuples under postponed evaluation.
    warnings.filterwarnings("ignore", message="Error parsing type annotation")
    folder = Path(sys.argv[1])
    pdoc.render.configure(docformat="restructuredtext", show_source=False)
    pdoc.pdoc("stoker", *(f"stoker.{part}" for part in PARTS), output_directory=folder)
    print(f"open {folder / 'index.html'}")


if __name__ == "__main__":
    main()
