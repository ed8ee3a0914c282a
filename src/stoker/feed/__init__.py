"""Batches of NumPy arrays for JAX, TensorFlow and plain Python, without torch.

::

    Feed -> Controller -> requests -> [thread: CachedSamples -> decode -> transform] -> Batch

:func:`with_cache` gives single samples by index, for loaders that choose the order themselves.
"""

from stoker.feed.batch import Batch
from stoker.feed.feed import Feed
from stoker.feed.samples import CachedSequence, with_cache

__all__ = ["Batch", "CachedSequence", "Feed", "with_cache"]
