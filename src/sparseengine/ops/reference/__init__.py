"""Plain-torch twin of every op: runs on any device and is the oracle of the kernels."""

from sparseengine.ops.reference.dense import dense_attention
from sparseengine.ops.reference.fused import (
    add_rms_norm,
    gated,
    latent_rows,
    norm_rotate,
    rms_norm,
    rotate_into,
)
from sparseengine.ops.reference.merge import merge_lse
from sparseengine.ops.reference.moe import moe_experts, moe_route
from sparseengine.ops.reference.parts import gather_part, merge_parts
from sparseengine.ops.reference.scores import page_bounds, page_scores, window_scores
from sparseengine.ops.reference.select import take_pages, top_pages
from sparseengine.ops.reference.storage import compact, copy_pages, gather_rows, store

__all__ = [
    "add_rms_norm",
    "compact",
    "copy_pages",
    "dense_attention",
    "gated",
    "gather_part",
    "gather_rows",
    "latent_rows",
    "merge_lse",
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
