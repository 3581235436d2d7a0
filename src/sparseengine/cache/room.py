"""How many pages things take, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence

from sparseengine.cache.group import GroupCache
from sparseengine.cache.pool import PagePool
from sparseengine.errors import CapacityError

UNBOUNDED_TOKENS = 1 << 40  # free_tokens of a model without KV

Needs = Sequence[tuple[PagePool, int]]


class Room:
    """Arithmetic over the pools of a cache. max_chunk: see `PagedCache`."""

    def __init__(
        self, groups: Sequence[GroupCache], pools: Sequence[PagePool], max_chunk: int | None
    ) -> None:
        self._groups, self._pools, self._max_chunk = groups, pools, max_chunk

    @staticmethod
    def of(pool: PagePool) -> int:
        """Head pages of a pool that are free, or only kept for later requests."""
        return pool.free_heads + pool.reclaimable() * pool.units

    def free_pages(self) -> int:
        return sum(map(self.of, self._pools))

    def pages_for(self, tokens: int, positions: int | None, chunk: int | None) -> int:
        """Head pages of one request, in all groups together.

        tokens: in each row (the mean will do). positions: that were run, of which WINDOW rows hold
        the newest; None: as many as tokens. chunk: longest run at once; None: any chunk. Where
        there are several pools, the share of the pool that is short first, of all pages.
        """
        needs = self._needs(tokens, positions, chunk)
        if len(needs) < 2:
            return sum(needs)
        total = sum(p.total_heads for p in self._pools)
        shares = zip(needs, self._pools, strict=True)
        return max(-(-need * total // pool.total_heads) for need, pool in shares)

    def _needs(self, tokens: int, positions: int | None, chunk: int | None) -> list[int]:
        """Head pages of one request by pool."""
        positions = tokens if positions is None else positions
        bound = self._max_chunk if chunk is None else chunk
        run = positions if bound is None else bound
        each = [
            (g.pool, g.geo.row_pages(tokens, positions, run) * g.geo.rows * g.geo.units)
            for g in self._groups
        ]
        return [sum(n for p, n in each if p is pool) for pool in self._pools]

    def free_tokens(self) -> int:
        """The longest row that fits: `_needs` grows with it."""
        low, high = 0, UNBOUNDED_TOKENS
        rooms = list(map(self.of, self._pools))
        while low < high:
            middle = (low + high + 1) // 2
            needs = self._needs(middle, None, None)
            if all(need <= room for need, room in zip(needs, rooms, strict=True)):
                low = middle
            else:
                high = middle - 1
        return low

    def lacks(self, needs: Needs) -> bool:
        """Whether a pool has fewer free bundles than its groups need together."""
        return any(self._wanted(needs, pool) > pool.num_free for pool in self._pools)

    @staticmethod
    def _wanted(needs: Needs, pool: PagePool) -> int:
        return sum(n for p, n in needs if p is pool)

    def require(self, needs: Needs, what: str) -> None:
        """Raise `CapacityError` unless every pool has the bundles that its groups need."""
        for pool in self._pools:
            pages = self._wanted(needs, pool) * pool.units
            if pages > pool.free_heads:
                raise CapacityError(
                    f"{what} needs {pages} head pages, {pool.free_heads} of {pool.total_heads} are "
                    f"free; raise kv_cache_memory_bytes or gpu_memory_utilization, or lower "
                    f"max_num_seqs",
                    needed=pages,
                    available=pool.free_heads,
                )
