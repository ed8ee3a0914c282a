"""Eviction policies: regions with an order, an admission rule and a pop rule."""

from stoker.policy.base import Policy, Region, Substitution
from stoker.policy.baselines import FIFO, LFU, LRU, S3FIFO, MinIO, Random, Sieve
from stoker.policy.next_use import AsPlanned, InPasses, NextBlock, NextUse, OnceAnEpoch
from stoker.policy.score import HighLow, Homophily, Score, StaticSet
from stoker.policy.shares import ElasticSplit, FrequencySplit, Shares

__all__ = [
    "FIFO",
    "LFU",
    "LRU",
    "S3FIFO",
    "AsPlanned",
    "ElasticSplit",
    "FrequencySplit",
    "HighLow",
    "Homophily",
    "InPasses",
    "MinIO",
    "NextBlock",
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
