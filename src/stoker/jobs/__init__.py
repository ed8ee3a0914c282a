"""Several jobs on one node that share the cache of their data set.

Each job has a row in a table that lies in shared memory beside the cache (``JobTable``). There it
publishes when it needs each sample next, or how much each is worth to it, and what the cache gains
it (``PassiveGain``, ``Probe``). ``Merged`` makes of these the one key that a sample has in the
cache. ``stoker serve`` (``Service``) keeps caches between jobs.
"""

from stoker.jobs.member import Sharing

__all__ = ["Sharing"]
