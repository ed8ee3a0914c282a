from stoker.policy import FIFO, LFU, LRU, S3FIFO, MinIO, Policy, Random, Sieve
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
