"""The small operations between matrix products as one compiled loop each, for float32 on a CPU.

A decode step of a small model runs hundreds of them on a few rows. Right after a matrix product has
swept the caches, each torch operator costs 5 to 15 us, mostly to fetch its own code; one of these
costs 3. Rows are computed one by one: a row's bits do not depend on the others.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseengine.core.view import PackedTable
from sparseengine.ops import reference

_THREADED_ELEMENTS = 1 << 15  # fewer are done by the calling thread
_RMS_NORM, _ROTATE, _SILU_MUL, _GELU_MUL = range(4)


@cache
def kernels() -> ModuleType | None:
    """The compiled kernels, or None where numba is not installed."""
    if importlib.util.find_spec("numba") is None:
        return None
    from sparseengine.ops import cpu_kernels

    return cpu_kernels


def _compiled(*tensors: Tensor) -> ModuleType | None:
    """The kernels if they can take these tensors: float32, on the CPU, contiguous channels."""
    for t in tensors:
        if t.dtype != torch.float32 or t.stride(-1) != 1 or t.device.type != "cpu":
            return None
    return kernels()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis of x [T, size] or [T, H, size]."""
    kernel = _compiled(x, weight)
    if kernel is None or x.dim() not in (2, 3):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    size, inner = x.shape[-1], 1 if x.dim() == 2 else x.shape[1]
    rows = x.shape[0] * inner
    out = torch.empty(x.shape)
    words = (
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        inner,
        weight.data_ptr(),
    )
    if rows * size >= _THREADED_ELEMENTS and kernel.run_threaded(
        _RMS_NORM, rows, eps, (*words, size, out.data_ptr())
    ):
        return out
    kernel.rms_norm_rows(*words, eps, size, out.data_ptr(), 0, rows)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """Turn the pairs (i, i + half) of x [T, H, D] by cos, sin [T, 1, half]; other channels pass.

    None when the tensors are not for the compiled kernel.
    """
    kernel = _compiled(x, cos, sin)
    if kernel is None or not (cos.is_contiguous() and sin.is_contiguous()):
        return None
    tokens, heads, size = x.shape
    out = torch.empty(x.shape)
    words = (
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        heads,
        size,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[-1],
        out.data_ptr(),
    )
    if x.numel() < _THREADED_ELEMENTS or not kernel.run_threaded(_ROTATE, tokens, 0.0, words):
        kernel.rotate_rows(*words, 0, tokens)
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [T, size]."""
    kernel = _compiled(gate, up)
    if kernel is None or gate.dim() != 2:
        return F.silu(gate) * up
    return _gated(gate, up, _SILU_MUL, kernel.silu_mul_rows, kernel)


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, both [T, size], with the tanh approximation of gelu."""
    kernel = _compiled(gate, up)
    if kernel is None or gate.dim() != 2:
        return F.gelu(gate, approximate="tanh") * up
    return _gated(gate, up, _GELU_MUL, kernel.gelu_mul_rows, kernel)


def _gated(
    gate: Tensor, up: Tensor, number: int, rows_of: Callable[..., None], kernel: ModuleType
) -> Tensor:
    rows, size = gate.shape
    out = torch.empty(gate.shape)
    words = (
        gate.data_ptr(),
        gate.stride(0),
        up.data_ptr(),
        up.stride(0),
        size,
        out.data_ptr(),
    )
    if rows * size < _THREADED_ELEMENTS or not kernel.run_threaded(number, rows, 0.0, words):
        rows_of(*words, 0, rows)
    return out


def store(pools: Sequence[Tensor], values: Sequence[Tensor], slots: Tensor) -> bool:
    """`ops.store` by the compiled kernel; False, having done nothing, when it cannot."""
    kernel = _compiled(*pools, *values)
    if kernel is None or slots.dtype != torch.int64 or slots.stride(1) != 1:
        return False
    groups, tokens = slots.shape
    for pool, value in zip(pools, values, strict=True):
        kernel.store_rows(
            pool.data_ptr(),
            pool.stride(0),
            pool.stride(1) if pool.shape[1] > 1 else 0,
            pool.stride(2),
            pool.shape[2],
            value.data_ptr(),
            value.stride(0),
            value.stride(1),
            value.shape[1],
            value.shape[2],
            slots.data_ptr(),
            slots.stride(0) if groups > 1 else 0,
            tokens,
        )
    return True


def page_scores(
    q: Tensor, kmin: Tensor, kmax: Tensor, table: Tensor, group_size: int
) -> Tensor | None:
    """`ops.page_scores` by the compiled kernel, or None when it cannot run."""
    kernel = _compiled(q, kmin, kmax)
    if kernel is None or table.dtype != torch.int32 or table.stride(2) != 1:
        return None
    if kmin.stride() != kmax.stride():
        return None
    spans, q_heads, size = q.shape
    heads, width = q_heads // group_size, table.shape[2]
    out = torch.empty(spans, heads, width)
    kernel.page_score_rows(
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        group_size,
        kmin.data_ptr(),
        kmax.data_ptr(),
        kmin.stride(0),
        kmin.stride(1) if kmin.shape[1] > 1 else 0,
        table.data_ptr(),
        table.stride(0),
        table.stride(1) if table.shape[1] > 1 else 0,
        spans,
        heads,
        width,
        size,
        out.data_ptr(),
    )
    return out


def slot_scores(q: Tensor, k_pool: Tensor, table: Tensor | PackedTable) -> Tensor | None:
    """Unscaled `ops.slot_scores` by the compiled kernel, or None when it cannot run.

    A slot is a page of one token here, whose bounds are the key: q.k is their bound.
    """
    size = k_pool.shape[3]
    strides = [step // size for step in k_pool.stride()[:3]]  # in keys
    if any(step % size for step in k_pool.stride()[:3]) or k_pool.stride(3) != 1:
        return None
    rest = sum((n - 1) * step for n, step in zip(k_pool.shape, strides, strict=False))
    if rest >= 1 << 31:
        return None
    dense = table.dense() if isinstance(table, PackedTable) else table
    heads = max(dense.shape[1], k_pool.shape[1])
    head = torch.arange(heads)[:, None, None] * (strides[1] if k_pool.shape[1] > 1 else 0)
    slot = torch.arange(k_pool.shape[2]) * strides[2]
    ids = (dense.long()[..., None] * strides[0] + head + slot).flatten(2).to(torch.int32)
    keys = k_pool.as_strided((rest + 1, 1, size), (size, size, 1))
    return page_scores(q, keys, keys, ids, q.shape[1] // heads)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` with a weight that may be wider than x: the product is rounded once."""
    if weight.dtype == x.dtype:
        return rms_norm(x, weight, eps)
    return rms_norm(x.to(weight.dtype), weight, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, its RMS norm), both [T, D]."""
    total = residual + x
    return total, _norm(total, weight, eps)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of gate_up [T, 2 I] -> [T, I]; "silu" or "gelu_tanh"."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu_mul(gate, up) if activation == "silu" else gelu_mul(gate, up)


def norm_rotate(
    qk: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """RMS norm over each head (where weights are given), then rotation; see ops.norm_rotate."""
    if q_weight is not None and k_weight is not None:
        q, k = qk[:, :q_heads], qk[:, q_heads:]
        qk = torch.cat((_norm(q, q_weight, eps), _norm(k, k_weight, eps)), dim=1)
    turned = rotate(qk, cos, sin)
    if turned is not None:
        return turned
    return reference.norm_rotate(qk, cos, sin, q_heads, None, None, eps)
