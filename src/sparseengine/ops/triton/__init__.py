"""Triton kernels of the ops, under the names of their twins in `ops/reference/`."""

from sparseengine.ops.triton.scores import page_bounds, page_scores, window_scores
from sparseengine.ops.triton.storage import compact, copy_pages, store

__all__ = [
    "compact",
    "copy_pages",
    "page_bounds",
    "page_scores",
    "store",
    "window_scores",
]
