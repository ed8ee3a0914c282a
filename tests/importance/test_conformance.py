"""Every scorer against what scorers must do."""

from functools import partial

import numpy as np

from stoker.importance.base import Background, Scorer
from stoker.importance.baselines import GradientNorm, InBatchRank, LossHistory, ReducibleLoss
from stoker.importance.graph import Graph
from stoker.importance.hybrid import Hybrid, Realtime
from stoker.importance.knn import HnswIndex
from stoker.testing.scorer_conformance import ScorerConformance


class TestLossHistory(ScorerConformance):
    def make_scorer(self) -> Scorer:
        return LossHistory()


class TestInBatchRank(ScorerConformance):
    def make_scorer(self) -> Scorer:
        return InBatchRank()


class TestGradientNorm(ScorerConformance):
    def make_scorer(self) -> Scorer:
        return GradientNorm()


class TestReducibleLoss(ScorerConformance):
    def make_scorer(self) -> Scorer:
        return ReducibleLoss(np.full(self.num_samples, 0.5))


class TestHybrid(ScorerConformance):
    def make_scorer(self) -> Scorer:
        return Hybrid(self.num_samples, cache_samples=20, max_warm_up=3)


class TestRealtime(ScorerConformance):
    def make_scorer(self) -> Scorer:
        return Realtime(self.num_samples)


class TestGraph(ScorerConformance):
    def make_scorer(self) -> Scorer:
        return Graph(self.num_samples, neighbor_max=20, target_degree=6)


class TestQuantizedGraph(ScorerConformance):
    num_samples = 288  # enough for centroids

    def make_scorer(self) -> Scorer:
        return Graph(self.num_samples, neighbor_max=20, target_degree=6, code_bytes=2)


class TestGraphHnsw(ScorerConformance):
    """Without rebuilds: what is found would depend on when they end."""

    def make_scorer(self) -> Scorer:
        still = partial(HnswIndex, rebuild_share=1.0, min_recall=0.0)
        return Graph(self.num_samples, neighbor_max=48, target_degree=6, index=still)


class TestBackground(ScorerConformance):
    def make_scorer(self) -> Scorer:
        return Background(InBatchRank(), depth=1)


class TestBackgroundGraph(ScorerConformance):
    def make_scorer(self) -> Scorer:
        return Background(Graph(self.num_samples, neighbor_max=20, target_degree=6))
