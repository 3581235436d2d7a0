"""Arithmetic of KV memory: what a page costs and how many fit, before any allocation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sparseengine.cache.plan import Geometry, geometry
from sparseengine.core.specs import CacheGroup, ModelSpec, Per
from sparseengine.errors import ConfigError

ENTRY_BYTES = 4  # int32 page id in a table
ROW_BYTES = 8  # int32 length and sealed-page count of a row
PAGE_META_BYTES = 8  # int32 reference count and free-stack entry of a bundle


class PageCost(NamedTuple):
    """Bytes that one page of tokens takes in every row of a request, all groups together.

    table: one table entry per row, its lengths and the page's bookkeeping, host and device copies
    each counted once; growth by doubling can use up to four times that.
    """

    payload: int
    aux: int
    table: int

    @property
    def total(self) -> int:
        return self.payload + self.aux + self.table


class CacheBytes(NamedTuple):
    """Bytes a running cache holds."""

    payload: int
    aux: int
    tables: int


def bundle_bytes(geo: Geometry, dtype: torch.dtype) -> tuple[int, int]:
    """(payload, side tensor) bytes of one bundle of a group."""
    slots = geo.units * geo.page_size
    payload = slots * sum(geo.spec.stored_dims) * dtype.itemsize
    aux = 0
    for a in geo.group.aux:
        size = math.prod(a.dims(geo.spec)) * a.dtype.itemsize
        aux += size * {Per.SLOT: slots, Per.PAGE: geo.units, Per.REQUEST: 0}[a.per]
    return payload, aux


def pools_of(geos: Sequence[Geometry]) -> list[list[int]]:
    """Indices of the groups that take pages from one pool, pool by pool."""
    pools: dict[tuple[object, ...], list[int]] = {}
    for i, geo in enumerate(geos):
        pools.setdefault(geo.bundle, []).append(i)
    return list(pools.values())


def page_bytes(model: ModelSpec, groups: Sequence[CacheGroup], dtype: torch.dtype) -> PageCost:
    """Bytes of one page of tokens in all rows of a request (the plan's largest page size)."""
    size = max((g.page_size for g in groups), default=1)
    return request_bytes([geometry(model, g) for g in groups], dtype, size, size)


def request_bytes(
    geos: Sequence[Geometry], dtype: torch.dtype, tokens: int, chunk: int
) -> PageCost:
    """Bytes of one request whose rows took `tokens` tokens in chunks of `chunk`."""
    payload = aux = table = 0
    for members in pools_of(geos):
        mine = [geos[i] for i in members]
        bundles = sum(g.rows * g.row_pages(tokens, tokens, chunk) for g in mine)
        p, a = _pool_bundle_bytes(mine, dtype)
        payload += bundles * p
        aux += bundles * a
        table += bundles * (ENTRY_BYTES + PAGE_META_BYTES)
    return PageCost(payload, aux, table)


def _pool_bundle_bytes(geos: Sequence[Geometry], dtype: torch.dtype) -> tuple[int, int]:
    """(payload, side tensor) bytes of a bundle that any of these groups may take."""
    each = [bundle_bytes(g, dtype) for g in geos]
    return each[0][0], sum(a for _, a in each)


def split_pages(
    geos: Sequence[Geometry],
    dtype: torch.dtype,
    *,
    total_bytes: int | None = None,
    num_pages: int | None = None,
) -> list[int]:
    """Usable bundles per pool (`pools_of`), such that rows of all groups could be equally long.

    total_bytes: payload and side tensors together, one trash bundle per pool included.
    num_pages: as vLLM's num_gpu_blocks: pages of one row (the largest page size of the plan), that
    is, room for num_pages * page_size tokens of a single request in every row.
    Raises `ConfigError` when not even one page per row fits.
    """
    if (total_bytes is None) == (num_pages is None):
        raise ConfigError("give total_bytes or num_pages, and only one of them")
    if not geos:
        return []
    size = max(g.page_size for g in geos)
    pools = [[geos[i] for i in members] for members in pools_of(geos)]
    rows = [sum(g.rows for g in pool) for pool in pools]
    if num_pages is not None:
        tokens = num_pages * size
        needed = 1
    else:
        assert total_bytes is not None
        cost = [sum(_pool_bundle_bytes(pool, dtype)) for pool in pools]
        parts = zip(cost, rows, pools, strict=True)
        per_token = sum(c * r / pool[0].page_size for c, r, pool in parts)
        tokens = int((total_bytes - sum(cost)) / per_token)
        needed = sum(cost) + math.ceil(per_token * size)
    bundles = [tokens // pool[0].page_size * r for pool, r in zip(pools, rows, strict=True)]
    if min(bundles) < 1:
        unit = "bytes (kv_cache_memory_bytes)" if num_pages is None else "pages"
        have = total_bytes if num_pages is None else num_pages
        raise ConfigError(
            f"KV memory of {have} {unit} holds less than one page of {size} tokens per row; "
            f"at least {needed} are needed"
        )
    return bundles
