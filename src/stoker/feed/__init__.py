"""Batches of NumPy arrays for JAX, TensorFlow and plain Python, without torch.

::

    Feed -> Controller -> requests -> [thread: CachedSamples -> decode -> transform] -> Batch
"""

from stoker.feed.batch import Batch
from stoker.feed.feed import Feed

__all__ = ["Batch", "Feed"]
