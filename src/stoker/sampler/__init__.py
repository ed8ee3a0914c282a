"""Samplers: from scores to the plan of an epoch."""

from stoker.sampler.base import Sampler
from stoker.sampler.uniform import UniformSampler

__all__ = ["Sampler", "UniformSampler"]
