"""Triton kernels of the ops, under the names of their twins in `ops/reference/`."""

from sparseengine.ops.triton.fused import (
    add_rms_norm,
    gated,
    latent_rows,
    norm_rotate,
    rms_norm,
    rotate_into,
)
from sparseengine.ops.triton.moe import moe_experts
from sparseengine.ops.triton.moe_route import moe_route
from sparseengine.ops.triton.parts import gather_part, merge_parts
from sparseengine.ops.triton.scores import page_bounds, page_scores, window_scores
from sparseengine.ops.triton.select import take_pages, top_pages
from sparseengine.ops.triton.storage import compact, copy_pages, store

__all__ = [
    "add_rms_norm",
    "compact",
    "copy_pages",
    "gated",
    "gather_part",
    "latent_rows",
    "merge_parts",
    "moe_experts",
    "moe_route",
    "norm_rotate",
    "page_bounds",
    "page_scores",
    "rms_norm",
    "rotate_into",
    "store",
    "take_pages",
    "top_pages",
    "window_scores",
]
