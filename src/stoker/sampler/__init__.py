"""Samplers: from scores to the plan of an epoch."""

from stoker.sampler.base import Sampler
from stoker.sampler.baselines import InfoBatchSampler, SelectiveSampler, WeightedSampler
from stoker.sampler.batching import Batching
from stoker.sampler.blocks import BlockSampler, neighbour_distances
from stoker.sampler.draws import counts, coverage, ess, repeat_share
from stoker.sampler.importance import ImportanceSampler
from stoker.sampler.mixture import Mixture, MixtureSampler, Stages
from stoker.sampler.pads import PadsSampler
from stoker.sampler.super_epochs import AdaptiveSampler, SuperEpochSampler
from stoker.sampler.token_batches import Buckets, Packing, TokenBudget
from stoker.sampler.uniform import Draw, EpochSampler, UniformSampler

__all__ = [
    "AdaptiveSampler",
    "Batching",
    "BlockSampler",
    "Buckets",
    "Draw",
    "EpochSampler",
    "ImportanceSampler",
    "InfoBatchSampler",
    "Mixture",
    "MixtureSampler",
    "Packing",
    "PadsSampler",
    "Sampler",
    "SelectiveSampler",
    "Stages",
    "SuperEpochSampler",
    "TokenBudget",
    "UniformSampler",
    "WeightedSampler",
    "counts",
    "coverage",
    "ess",
    "neighbour_distances",
    "repeat_share",
]
