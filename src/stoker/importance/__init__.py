"""Importance: from what training shows about a sample to its score."""

from stoker.importance.base import Background, Neighbours, Observation, Scorer
from stoker.importance.baselines import (
    GradientNorm,
    InBatchRank,
    LossHistory,
    ReducibleLoss,
    SelectiveBackward,
)
from stoker.importance.graph import Graph
from stoker.importance.hybrid import Hybrid, Realtime

__all__ = [
    "Background",
    "GradientNorm",
    "Graph",
    "Hybrid",
    "InBatchRank",
    "LossHistory",
    "Neighbours",
    "Observation",
    "Realtime",
    "ReducibleLoss",
    "Scorer",
    "SelectiveBackward",
]
