"""Ops on paged pools: `ops.store(...)` and friends choose their implementation by device."""

from sparseengine.ops.dispatch import (
    add_rms_norm,
    compact,
    copy_pages,
    dense_attention,
    gated,
    gather_rows,
    merge_lse,
    moe_experts,
    moe_route,
    norm_rotate,
    page_bounds,
    page_scores,
    store,
    take_pages,
    top_pages,
    window_scores,
)

__all__ = [
    "add_rms_norm",
    "compact",
    "copy_pages",
    "dense_attention",
    "gated",
    "gather_rows",
    "merge_lse",
    "moe_experts",
    "moe_route",
    "norm_rotate",
    "page_bounds",
    "page_scores",
    "store",
    "take_pages",
    "top_pages",
    "window_scores",
]
