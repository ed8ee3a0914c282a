"""The ``stoker`` command: each command is loaded when it is called."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; ends the process. Asks for the extra ``tui`` where it is missing."""
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"the stoker command needs click and rich ({error}): pip install 'stoker[tui]'. "
            "The library itself works without them."
        )
    from stoker.cli.root import root

    root()
