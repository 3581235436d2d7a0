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


def page_bytes(model: ModelSpec, groups: Sequence[CacheGroup], dtype: torch.dtype) -> PageCost:
    """Bytes of one page of tokens in all rows of a request (the plan's largest page size)."""
    size = max((g.page_size for g in groups), default=1)
    payload = aux = table = 0
    for group in groups:
        geo = geometry(model, group)
        bundles = geo.rows * (size / geo.page_size)
        p, a = bundle_bytes(geo, dtype)
        payload += math.ceil(bundles * p)
        aux += math.ceil(bundles * a)
        table += math.ceil(bundles * (ENTRY_BYTES + PAGE_META_BYTES))
    return PageCost(payload, aux, table)


def split_pages(
    geos: Sequence[Geometry],
    dtype: torch.dtype,
    *,
    total_bytes: int | None = None,
    num_pages: int | None = None,
) -> list[int]:
    """Usable bundles per group, such that all groups run out at the same row length.

    total_bytes: payload and side tensors together, one trash bundle per group included.
    num_pages: as vLLM's num_gpu_blocks: pages of one row (the largest page size of the plan), that
    is, room for num_pages * page_size tokens of a single request in every row.
    Raises `ConfigError` when not even one page per row fits.
    """
    if (total_bytes is None) == (num_pages is None):
        raise ConfigError("give total_bytes or num_pages, and only one of them")
    if not geos:
        return []
    size = max(g.page_size for g in geos)
    if num_pages is not None:
        tokens = num_pages * size
        needed = 1
    else:
        assert total_bytes is not None
        cost = [sum(bundle_bytes(g, dtype)) for g in geos]
        per_token = sum(c * g.rows / g.page_size for c, g in zip(cost, geos, strict=True))
        tokens = int((total_bytes - sum(cost)) / per_token)
        needed = sum(cost) + math.ceil(per_token * size)
    bundles = [tokens // g.page_size * g.rows for g in geos]
    if min(bundles) < 1:
        unit = "bytes (kv_cache_memory_bytes)" if num_pages is None else "pages"
        have = total_bytes if num_pages is None else num_pages
        raise ConfigError(
            f"KV memory of {have} {unit} holds less than one page of {size} tokens per row; "
            f"at least {needed} are needed"
        )
    return bundles
