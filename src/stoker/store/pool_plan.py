"""From ``pool="valkey://h1,h2"`` and ``pool_cache="64GiB"`` to the pool of a data set."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.errors import ConfigError
from stoker.store.disk_plan import Wanted
from stoker.store.pool import PoolTier
from stoker.store.pool_address import PoolAddress
from stoker.store.pool_servers import require_redis
from stoker.types import parse_bytes


@dataclass(frozen=True)
class PoolPlan:
    """A pool, checked, not opened yet."""

    address: PoolAddress
    wanted: Wanted
    capacity: int | None

    def open(self, *, renews: bool, takes_keys: bool) -> PoolTier:
        """Return the pool, with a look at its servers, and warnings of what is amiss there.

        ``renews``: whether this process renews lifetimes; one of the job is enough.
        ``takes_keys``: whether keys of the policy say what a sample is worth.
        """
        wanted = self.wanted
        tier = PoolTier(
            self.address,
            wanted.key,
            wanted.num_ids,
            wanted.data_bytes,
            self.capacity,
            mean_size=wanted.mean_size,
            takes_keys=takes_keys,
        )
        tier.renews = renews
        tier.look()
        return tier


def plan_pool(
    pool: str | None,
    pool_cache: int | float | str | None,
    wanted: Wanted,
    *,
    is_private: bool = False,
) -> PoolPlan | None:
    """Return the pool as the user asked for it, or None for none.

    Without ``pool_cache``, or if the servers have less, it is as large as they are together.
    ``is_private``: the key says nothing to other nodes.

    Raises :class:`~stoker.errors.ConfigError` for what makes no sense, and where redis-py is
    missing.
    """
    capacity = None
    if pool_cache is not None:
        capacity = parse_bytes(pool_cache, of=wanted.data_bytes, name="pool_cache")
    if pool is None:
        if capacity:
            raise ConfigError(f"pool_cache={pool_cache!r} needs servers: give pool too")
        return None
    address = PoolAddress.parse(pool)
    if capacity == 0:
        return None
    if capacity is not None and capacity < wanted.largest:
        raise ConfigError(
            f"pool_cache={pool_cache!r} is {capacity} bytes and the largest sample has "
            f"{wanted.largest}: give it more, or leave it out"
        )
    if is_private:
        raise ConfigError(
            f"pool={str(address)!r} is refused, as nothing tells other nodes that this is the same "
            "data set: give wrap() a name, or the decoder one"
        )
    require_redis()
    return PoolPlan(address, wanted, capacity)
