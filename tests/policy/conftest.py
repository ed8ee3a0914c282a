"""The arenas that every policy is run through."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from reference.arena import ReferenceArena

from stoker.policy import Policy
from stoker.store.arena import Arena

NewArena = Callable[..., Any]


def reference(num_ids: int, capacity: int, seed: int) -> Any:
    return ReferenceArena(num_ids, capacity, seed=seed)


def native(num_ids: int, capacity: int, seed: int) -> Any:
    # exact: recency and frequency at each access; production refreshes them lazily. A mean size
    # of 1 gives a block to every id, so that payload bytes alone decide, as in the references.
    return Arena(num_ids, capacity, mean_size=1, exact=True, seed=seed)


@pytest.fixture(params=[reference, native], ids=lambda kind: kind.__name__)
def new_arena(request: pytest.FixtureRequest) -> Iterator[NewArena]:
    """Return a function (policy, num_ids, capacity, seed=0) -> arena with the policy's regions."""
    with ExitStack() as arenas:

        def make(policy: Policy, num_ids: int, capacity: int, seed: int = 0) -> Any:
            arena = arenas.enter_context(request.param(num_ids, capacity, seed))
            arena.configure(policy.regions())
            return arena

        yield make
