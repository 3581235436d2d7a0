"""Plain-torch twin of every op: runs on any device and is the oracle of the kernels."""

from sparseengine.ops.reference.dense import dense_attention
from sparseengine.ops.reference.merge import merge_lse
from sparseengine.ops.reference.moe import moe_experts, moe_route
from sparseengine.ops.reference.scores import page_bounds, page_scores, window_scores
from sparseengine.ops.reference.storage import compact, copy_pages, gather_rows, store

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
