"""Prefetch: a process of its own walks the plan ahead of the loader and fills the cache.

The one arrow: ``Prefetcher`` (in each rank) publishes coming accesses over a ``Channel``; the
process keeps a ``Walk`` per rank, and its ``Fetcher`` hands out what a walk's window allows, in
groups. A ``Reader`` claims a group and has ``Lanes`` read it, as many at once as the
``ConcurrencyLimit`` finds useful. Where one interpreter does not keep up with the storage, a
``Crew`` of further processes, each with a ``Reader`` too, asks for groups. If one of them dies,
another reads what it had in hand; if the one with the walks does, workers read for themselves.
"""

from stoker.prefetch.prefetcher import Prefetcher

__all__ = ["Prefetcher"]
