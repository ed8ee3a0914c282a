from typing import Any

import pytest

from stoker.policy import (
    FIFO,
    LFU,
    LRU,
    S3FIFO,
    HighLow,
    Homophily,
    MinIO,
    Policy,
    Random,
    Score,
    Sieve,
    StaticSet,
)
from stoker.testing.policy_conformance import PolicyConformance

from .conftest import NewArena


class Conformance(PolicyConformance):
    """Also against the reference."""

    @pytest.fixture
    def arena(self, policy: Policy, new_arena: NewArena) -> Any:
        return new_arena(policy, self.num_samples, self.capacity)


class TestLRU(Conformance):
    def make_policy(self) -> Policy:
        return LRU()


class TestLFU(Conformance):
    def make_policy(self) -> Policy:
        return LFU()


class TestFIFO(Conformance):
    def make_policy(self) -> Policy:
        return FIFO()


class TestRandom(Conformance):
    def make_policy(self) -> Policy:
        return Random()


class TestMinIO(Conformance):
    def make_policy(self) -> Policy:
        return MinIO()


class TestSieve(Conformance):
    def make_policy(self) -> Policy:
        return Sieve()


class TestS3FIFO(Conformance):
    def make_policy(self) -> Policy:
        return S3FIFO(small=0.2, visits=1)


class TestScore(Conformance):
    def make_policy(self) -> Policy:
        return Score()


class TestHighLow(Conformance):
    def make_policy(self) -> Policy:
        return HighLow(h_share=0.5)


class TestStaticSet(Conformance):
    def make_policy(self) -> Policy:
        return StaticSet(share=0.3)


class TestHomophily(Conformance):
    def make_policy(self) -> Policy:
        return Homophily()
