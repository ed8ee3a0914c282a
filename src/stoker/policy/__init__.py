"""Cache policies: who stays, as regions with an order, an admission rule and a pop rule."""

from stoker.policy.base import Policy, Region
from stoker.policy.elastic import ElasticSplit
from stoker.policy.fifo import FIFO
from stoker.policy.high_low import HighLow
from stoker.policy.homophily import NO_SAMPLE, Homophily
from stoker.policy.lfu import LFU
from stoker.policy.lru import LRU
from stoker.policy.minio import MinIO
from stoker.policy.next_use import NextUse
from stoker.policy.once_an_epoch import OnceAnEpoch
from stoker.policy.random import Random
from stoker.policy.s3fifo import S3FIFO
from stoker.policy.score import Score
from stoker.policy.shares import FrequencySplit, Shares
from stoker.policy.sieve import Sieve
from stoker.policy.static_set import StaticSet
from stoker.policy.substitution import Substitution

__all__ = [
    "FIFO",
    "LFU",
    "LRU",
    "NO_SAMPLE",
    "S3FIFO",
    "ElasticSplit",
    "FrequencySplit",
    "HighLow",
    "Homophily",
    "MinIO",
    "NextUse",
    "OnceAnEpoch",
    "Policy",
    "Random",
    "Region",
    "Score",
    "Shares",
    "Sieve",
    "StaticSet",
    "Substitution",
]
