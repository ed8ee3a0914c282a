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


class TestLRU(PolicyConformance):
    def make_policy(self) -> Policy:
        return LRU()


class TestLFU(PolicyConformance):
    def make_policy(self) -> Policy:
        return LFU()


class TestFIFO(PolicyConformance):
    def make_policy(self) -> Policy:
        return FIFO()


class TestRandom(PolicyConformance):
    def make_policy(self) -> Policy:
        return Random()


class TestMinIO(PolicyConformance):
    def make_policy(self) -> Policy:
        return MinIO()


class TestSieve(PolicyConformance):
    def make_policy(self) -> Policy:
        return Sieve()


class TestS3FIFO(PolicyConformance):
    def make_policy(self) -> Policy:
        return S3FIFO(small=0.2, visits=1)


class TestScore(PolicyConformance):
    def make_policy(self) -> Policy:
        return Score()


class TestHighLow(PolicyConformance):
    def make_policy(self) -> Policy:
        return HighLow(h_share=0.5)


class TestStaticSet(PolicyConformance):
    def make_policy(self) -> Policy:
        return StaticSet(share=0.3)


class TestHomophily(PolicyConformance):
    def make_policy(self) -> Policy:
        return Homophily()
