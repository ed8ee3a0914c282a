"""Commands that train or load batches need torch, which is an extra."""

from __future__ import annotations

import importlib.util

from stoker.errors import ConfigError


def need_torch(command: str) -> None:
    """Raise ConfigError, with the way out, where torch is not installed; does not import it."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"stoker {command} needs torch, which is not installed: pip install 'stoker[torch]'"
        )
