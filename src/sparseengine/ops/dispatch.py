"""Device choice of every op: Triton on CUDA, plain torch elsewhere. Signatures are the contract.

On a CPU `store` and `page_scores` are compiled loops where `ops.cpu` can run them.

Shapes and meaning are documented at the twins in `ops/reference/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from sparseengine.core.view import PackedTable
from sparseengine.ops import cpu, dense, reference
from sparseengine.ops.parts import Fetch, Part
from sparseengine.ops.reference import gather_rows, merge_lse
from sparseengine.ops.routing import RouterSpec

__all__ = [
    "add_rms_norm",
    "attend_row",
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


@cache
def _kernels() -> ModuleType | None:
    """The Triton ops, or None where Triton is not installed."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    from sparseengine.ops import triton as kernels

    return kernels


def _impl(pool: Tensor) -> ModuleType:
    if pool.is_cuda and pool.dtype != torch.float64:
        return _kernels() or reference
    return reference


def store(pools: Sequence[Tensor], values: Sequence[Tensor], slots: Tensor) -> None:
    """Write [T, H, D] values into slots int64 [G, T] of [N, Hs, P, D] pools; -1 skips."""
    if pools[0].device.type == "cpu" and cpu.store(pools, values, slots):
        return
    _impl(pools[0]).store(pools, values, slots)


def compact(pools: Sequence[Tensor], table: Tensor, mask: Tensor) -> None:
    """Move kept slots (mask bool [R, L]) of rows (table int32 [R, W]) to their front, in order."""
    _impl(pools[0]).compact(pools, table, mask)


def copy_pages(pools: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy whole pages src -> dst, int64 [M] ids."""
    _impl(pools[0]).copy_pages(pools, src, dst)


def window_scores(
    q: Tensor,
    k_pool: Tensor,
    table: Tensor,
    lens: Tensor,
    max_len: int,
    scale: float,
    reduce: str = "sum",
    softcap: float = 0.0,
) -> Tensor:
    """Attention mass of a row's last queries q [w, Hq, D] on its keys: fp32 [Hq, max_len]."""
    capped = {"softcap": softcap} if softcap else {}
    out: Tensor = _impl(k_pool).window_scores(
        q, k_pool, table, lens, max_len, scale, reduce, **capped
    )
    return out


def page_bounds(k_pool: Tensor, pages: Tensor, kmin: Tensor, kmax: Tensor) -> None:
    """Channel-wise min and max of whole pages, int64 [M] ids, into [N, Hs, D] bounds."""
    _impl(k_pool).page_bounds(k_pool, pages, kmin, kmax)


def page_scores(q: Tensor, kmin: Tensor, kmax: Tensor, table: Tensor, group_size: int) -> Tensor:
    """Upper bound of q.k over each page of each row: fp32 [S, Hkv, W]."""
    if kmin.device.type == "cpu":
        found = cpu.page_scores(q, kmin, kmax, table, group_size)
        if found is not None:
            return found
    out: Tensor = _impl(kmin).page_scores(q, kmin, kmax, table, group_size)
    return out


def moe_route(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """Experts int [T, K] of each token, best first, and their fp32 weights; logits fp32 [T, E]."""
    out: tuple[Tensor, Tensor] = _impl(logits).moe_route(logits, bias, spec)
    return out


def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    row_tile: int | None = None,
) -> Tensor:
    """Weighted sum over K of the SwiGLU experts that each token of x [T, H] chose: [T, H]."""
    out: Tensor = _impl(x).moe_experts(x, gate_up, down, ids, weights, row_tile)
    return out


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """Causal, bottom-right: q [n, Hq, D], k [L, Hkv, D], v [L, Hkv, Dv] -> [n, Hq, Dv]."""
    if softcap:
        return reference.dense_attention(q, k, v, scale, softcap)
    return attend_row(q, k.shape[0], v.shape[2], dense.slices_of(k, v), scale)


def attend_row(q: Tensor, length: int, value_dim: int, fetch: Fetch, scale: float) -> Tensor:
    """`dense_attention` over keys and values that exist part by part, as `fetch` makes them."""
    found = dense.attend_row(q, length, value_dim, fetch, scale, merge_parts)
    if found is None:
        found = reference.dense_attention(q, *fetch(Part(0, length, causal=True)), scale)
    return found


def gather_part(
    pools: Sequence[Tensor], table: Tensor, length: int, first: int, outs: Sequence[Tensor]
) -> None:
    """Slots first .. first + n of a row (table int32 [G, W]) into outs [n, H, D_i]; 0 behind it."""
    _impl(pools[0]).gather_part(pools, table, length, first, outs)


def merge_parts(
    outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor | None = None
) -> None:
    """Attention over all parts from outs [n, H, Dv] and lses [H, n] of each, into out and lse."""
    _impl(out).merge_parts(outs, lses, out, lse)


def _between(x: Tensor) -> ModuleType:
    """Who runs what stands between matrix products."""
    return cpu if x.device.type == "cpu" else _impl(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis of x [..., D], in float32, rounded to x's dtype."""
    out: Tensor = _between(x).rms_norm(x, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, its RMS norm), both [T, D]."""
    total, normed = _between(x).add_rms_norm(x, residual, weight, eps)
    return total, normed


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of gate_up [T, 2 I] -> [T, I]; "silu" or "gelu_tanh"."""
    out: Tensor = _between(gate_up).gated(gate_up, activation)
    return out


def norm_rotate(
    qk: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """RMS norm over each head of qk [T, Hq + Hkv, D], then rotation of its leading channels."""
    out: Tensor = _between(qk).norm_rotate(qk, cos, sin, q_heads, q_weight, k_weight, eps)
    return out


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Rotate x [T, H, 2 R] into out, which may be x; pairs are neighbours or R channels apart."""
    _impl(x).rotate_into(out, x, cos, sin, interleaved)


def latent_rows(
    raw: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """RMS norm of the latent, rotation of the key behind it: raw [T, rank + 2 R] -> the same."""
    out: Tensor = _impl(raw).latent_rows(raw, weight, eps, cos, sin, interleaved)
    return out


def top_pages(
    scores: Tensor,
    lens: Tensor,
    budgets: Tensor,
    page_size: int,
    *,
    sinks: int,
    least: int,
    width: int,
) -> Tensor:
    """The columns of each row's highest scores [S, H, W], ascending: int32 [S, H, width]."""
    out: Tensor = _impl(scores).top_pages(
        scores, lens, budgets, page_size, sinks=sinks, least=least, width=width
    )
    return out


def take_pages(
    table: PackedTable, index: Tensor, lens: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """Page ids of chosen columns [S, G, K] of packed tables, and how many tokens they hold."""
    pages, counts = _impl(index).take_pages(table, index, lens, page_size)
    return pages, counts
