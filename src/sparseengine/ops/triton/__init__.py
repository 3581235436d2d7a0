"""Triton kernels of the ops, under the names of their twins in `ops/reference/`."""

from sparseengine.ops.triton.moe import moe_experts
from sparseengine.ops.triton.moe_route import moe_route
from sparseengine.ops.triton.scores import page_bounds, page_scores, window_scores
from sparseengine.ops.triton.storage import compact, copy_pages, store

__all__ = [
    "compact",
    "copy_pages",
    "moe_experts",
    "moe_route",
    "page_bounds",
    "page_scores",
    "store",
    "window_scores",
]
