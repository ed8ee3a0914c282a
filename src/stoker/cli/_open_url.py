"""The source at an address given on the command line, with options for the object store."""

from __future__ import annotations

from typing import Any

from stoker.errors import ConfigError
from stoker.source.base import Source
from stoker.source.open import open_image_folder, open_source


def open_url(url: str, image_folder: bool, options: tuple[str, ...]) -> Source:
    """Return the source at ``url``; ``options`` are ``NAME=VALUE`` for the object store.

    ``image_folder``: it has class folders. Raises ConfigError for an option of another form, and
    what :func:`open_source` raises. To be closed by the caller.
    """
    named: dict[str, Any] = {}
    if options:
        pairs = [option.partition("=") for option in options]
        for name, equals, _ in pairs:
            if not (name and equals):
                raise ConfigError(f"--option {name!r} is refused: give it as NAME=VALUE")
        named["storage_options"] = {name: value for name, _, value in pairs}
    return (open_image_folder if image_folder else open_source)(url, **named)
