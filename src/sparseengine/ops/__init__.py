"""Ops on paged pools: `ops.store(...)` and friends choose their implementation by device."""

from sparseengine.ops.dispatch import (
    compact,
    copy_pages,
    gather_rows,
    merge_lse,
    page_bounds,
    page_scores,
    store,
    window_scores,
)

__all__ = [
    "compact",
    "copy_pages",
    "gather_rows",
    "merge_lse",
    "page_bounds",
    "page_scores",
    "store",
    "window_scores",
]
