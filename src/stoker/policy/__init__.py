"""Cache policies: who stays, as regions with an order, an admission rule and a pop rule."""

from stoker.policy.base import Policy, Region
from stoker.policy.fifo import FIFO
from stoker.policy.lfu import LFU
from stoker.policy.lru import LRU
from stoker.policy.minio import MinIO
from stoker.policy.next_use import NextUse
from stoker.policy.random import Random
from stoker.policy.s3fifo import S3FIFO
from stoker.policy.sieve import Sieve

__all__ = [
    "FIFO",
    "LFU",
    "LRU",
    "S3FIFO",
    "MinIO",
    "NextUse",
    "Policy",
    "Random",
    "Region",
    "Sieve",
]
