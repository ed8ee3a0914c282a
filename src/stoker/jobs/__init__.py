"""Several jobs on one node that share the cache of their data set.

Each job has a row in a table that lies in shared memory beside the cache (``JobTable``), where it
says when it needs each sample next, or how much each is worth to it, and what the cache gains it
(``Gain``). ``Merged`` makes of these the one key that a sample has in the cache; what is merged
how stands in ``merging``, in plain arrays. ``stoker serve`` (``Service``) keeps caches between
jobs.
"""

from stoker.jobs.sharing import Sharing

__all__ = ["Sharing"]
