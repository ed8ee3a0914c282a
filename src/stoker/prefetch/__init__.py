"""Prefetch: a process of its own walks the plan ahead of the loader and fills the cache.

The one arrow: ``Prefetcher`` (in each rank) publishes coming accesses over a ``Channel``; the
process keeps a ``Walk`` per rank, and its ``Fetcher`` claims what a walk's window allows and has
``Lanes`` read it, as many at once as the ``ConcurrencyLimit`` finds useful. If the process dies,
workers read for themselves.
"""

from stoker.prefetch.prefetcher import Prefetcher

__all__ = ["Prefetcher"]
