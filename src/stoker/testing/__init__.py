"""Test sources, and conformance classes for sources, tiers, policies, samplers and scorers.

Each name is loaded when it is first asked for, so that a stand-in does not need pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "FaultySource": "stoker.testing.sources",
    "PolicyConformance": "stoker.testing.policy_conformance",
    "SamplerConformance": "stoker.testing.sampler_conformance",
    "ScorerConformance": "stoker.testing.scorer_conformance",
    "SlowSource": "stoker.testing.sources",
    "SourceConformance": "stoker.testing.source_conformance",
    "TierConformance": "stoker.testing.tier_conformance",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(_WHERE)
