"""Stands for a training: three epochs of images in class folders, through the cache of the node."""

import os

import stoker

cache = stoker.Cache(os.environ.get("CACHE", "20%"), disk=os.environ.get("CACHE_DISK"))
with stoker.Feed(os.environ["DATA"], 32, cache=cache, transform=stoker.images.Train(64)) as feed:
    for epoch in range(3):
        for batch in feed:
            assert len(batch.data) == len(batch.targets)  # your step is here
        print(f"epoch {epoch}: {feed.stats.hits} hits, {feed.stats.fetched} read", flush=True)
