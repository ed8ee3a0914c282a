"""Where samples are kept: tiers over a source, and the store that serves batches from them.

The one arrow: ``Store -> Tier -> arena``, and ``Store -> Source`` for what the tier misses. A
tier never reads the source, and the source knows of no tier.
"""

from stoker.source.packed import Packed, pack, unpack
from stoker.store.claims import Served
from stoker.store.memory_tier import MemoryTier
from stoker.store.store import Store
from stoker.store.tier import NullTier, RegionTier, Tier

__all__ = [
    "MemoryTier",
    "NullTier",
    "Packed",
    "RegionTier",
    "Served",
    "Store",
    "Tier",
    "pack",
    "unpack",
]
