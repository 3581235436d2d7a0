"""Causal attention over plain tensors by torch's fused operators. Twin: `ops/reference/dense.py`.

The chunk's own keys are a causal square; the keys before it are seen by every query, so that they
need no mask. The parts are computed apart and merged by their log-sum-exp: torch's causal mask is
top-left aligned, and no masked half is computed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseengine.ops.parts import (
    Fetch,
    Merge,
    Part,
    Parts,
    attend_parts,
    cut_freely,
    cut_row,
    padded,
)

_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_CUDA_MAX_DIM = 256
# cuDNN runs large parts 1.5 times (over pages) to twice (flash) as fast as the other kernels, but
# plans every new pair of lengths for 40 ms. Below so many operations a layer it does not pay, nor
# where padding takes more than a part of what it wins.
UNIT = 512
LONGEST = 32768  # keys of a part that are gathered from pages
LONGEST_MADE = 16384  # keys of a part that are computed, for more heads than are stored
_CUDNN_OPERATIONS = 2e11
_CUDNN_PADDING = 1.3


def cut_for_cudnn(
    num_q: int, length: int, heads: int, channels: int, longest: int = LONGEST
) -> Parts | None:
    """The row's parts where cuDNN pays; heads of queries, channels of a key and a value together.

    num_q of 0 has no parts.
    """
    row = cut_row(num_q, length, UNIT, longest) if num_q else None
    if row is None or 2 * heads * channels * row.needed_pairs < _CUDNN_OPERATIONS:
        return None
    return row if row.pairs <= _CUDNN_PADDING * row.needed_pairs else None


def attend_row(
    q: Tensor, length: int, value_dim: int, fetch: Fetch, scale: float, merge: Merge
) -> Tensor | None:
    """q [n, Hq, D], the last queries of a row of `length` keys -> [n, Hq, Dv].

    fetch: keys [rows, Hkv, D] and values [rows, Hkv, Dv] of a part. None where torch has no
    operator. Heads of different sizes are padded to the wider one where it wants equal ones.
    """
    if not _has_operator(q, value_dim):
        return None
    out = q.new_empty(q.shape[0], q.shape[1], value_dim)
    if q.shape[0]:
        row, on_cudnn = plan_row(q, length, value_dim)
        fused = partial(fused_cudnn if on_cudnn else _fused_flash, scale=scale)
        attend_parts(q, row, fetch, fused, merge, out)
    return out


def plan_row(q: Tensor, length: int, value_dim: int) -> tuple[Parts, bool]:
    """Parts that `attend_row` would fetch, and whether cuDNN runs them."""
    row = None
    if q.device.type == "cuda" and runs_cudnn(q, value_dim):
        channels = q.shape[2] + value_dim
        row = cut_for_cudnn(q.shape[0], length, q.shape[1], channels, LONGEST_MADE)
    return row or cut_freely(q.shape[0], length, LONGEST_MADE), row is not None


def _has_operator(q: Tensor, value_dim: int) -> bool:
    if q.device.type == "cpu":
        return q.dtype in _CPU_DTYPES
    return q.dtype in _CUDA_DTYPES and max(q.shape[2], value_dim) <= _CUDA_MAX_DIM


def slices_of(k: Tensor, v: Tensor) -> Fetch:
    """Parts of keys [L, Hkv, D] and values [L, Hkv, Dv]."""

    def fetch(part: Part) -> tuple[Tensor, Tensor]:
        mine = slice(part.first, part.first + part.rows)
        return padded(k[mine], 0, part.rows), padded(v[mine], 0, part.rows)

    return fetch


def runs_cudnn(q: Tensor, value_dim: int) -> bool:
    """Whether cuDNN takes q [n, Hq, D] and values of `value_dim` channels on this device."""
    keys, values = (q.new_empty(UNIT, q.shape[1], d) for d in (q.shape[2], value_dim))
    parts = (x.transpose(0, 1)[None] for x in (q, keys, values))
    params = torch.backends.cuda.SDPAParams(*parts, None, 0.0, False, True)
    return torch.backends.cuda.can_use_cudnn_attention(params, False)


def fused_cudnn(
    query: Tensor, keys: Tensor, values: Tensor, causal: bool, *, scale: float
) -> tuple[Tensor, Tensor]:
    """query [1, Hq, n, D], keys, values [1, Hkv, L, D] -> ([1, Hq, n, Dv], lse of n each)."""
    found: Any = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, keys, values, None, True, 0.0, causal, False, scale=scale
    )
    return found[0], found[1]


def _fused_flash(
    query: Tensor, keys: Tensor, values: Tensor, causal: bool, *, scale: float
) -> tuple[Tensor, Tensor]:
    """The same by torch's flash attention."""
    aten, width = torch.ops.aten, max(query.shape[3], values.shape[3])
    value_dim = values.shape[3]
    query, keys, values = (_widened(x, width) for x in (query, keys, values))
    if query.device.type == "cpu":
        keys, values = _repeated(keys, query.shape[1]), _repeated(values, query.shape[1])
        found: Any = aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, causal, scale=scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, causal, False, scale=scale
        )
    return found[0][..., :value_dim], found[1]


def _widened(x: Tensor, width: int) -> Tensor:
    """Zero channels change neither products nor the results that are kept."""
    return x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3]))


def _repeated(x: Tensor, heads: int) -> Tensor:
    """[1, Hkv, L, D] -> [1, Hq, L, D]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
