"""Stands for a training: three epochs of images in class folders, through the cache of a group."""

import os

import stoker

cache = stoker.Cache(os.environ["CACHE"], pool=os.environ["CACHE_POOL"])
with stoker.Feed(os.environ["DATA"], 32, cache=cache, transform=stoker.images.Train(64)) as feed:
    for epoch in range(3):
        for batch in feed:
            assert len(batch.data) == len(batch.targets)  # your step is here
        print(f"epoch {epoch}: {feed.stats.hits} hits, {feed.stats.fetched} read", flush=True)
