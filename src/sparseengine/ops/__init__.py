"""Ops on paged pools: `ops.store(...)` and friends choose their implementation by device."""

from sparseengine.ops.dispatch import (
    compact,
    copy_pages,
    dense_attention,
    gather_rows,
    merge_lse,
    moe_experts,
    moe_route,
    page_bounds,
    page_scores,
    store,
    window_scores,
)

__all__ = [
    "compact",
    "copy_pages",
    "dense_attention",
    "gather_rows",
    "merge_lse",
    "moe_experts",
    "moe_route",
    "page_bounds",
    "page_scores",
    "store",
    "window_scores",
]
