"""Servers that tests of the pool use, ended with the test."""

import pytest
from support.redis_servers import Server


@pytest.fixture(scope="module")
def shared_server():
    server = Server("--maxmemory-policy", "volatile-ttl", "--maxmemory", "100mb")
    yield server
    server.close()


@pytest.fixture
def server(shared_server):
    """An empty server."""
    with shared_server.client() as client:
        client.flushall()
    return shared_server


@pytest.fixture
def make_server():
    """Starts servers with options."""
    made = []

    def make(*options, **more):
        made.append(Server(*options, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()
