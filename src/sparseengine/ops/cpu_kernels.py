"""Compiled loops of `ops.cpu`: float32, addresses and strides in elements unless said otherwise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from sparseengine.ops import native
from sparseengine.ops.native import FAR, JIT, as_f32, as_i64

_LOG2_E = np.float32(math.log2(math.e))
_TINY = np.float32(-126.0)  # the least exponent of a normal float32
# Minimax polynomial of 2 ** x on [-0.5, 0.5]; relative error 1e-7.
_C6, _C5, _C4, _C3, _C2, _C1 = (
    np.float32(c)
    for c in (1.5353362e-4, 1.3398874e-3, 9.6184373e-3, 5.5503324e-2, 2.4022648e-1, 6.9314720e-1)
)


@njit(**JIT)
def exp_into(x: Any, count: int, shift: Any, out: Any, powers: Any) -> None:
    """out[:count] = exp(x - shift) for x - shift <= 87. powers: int32 scratch of `count`."""
    scale = powers.view(np.float32)
    for i in range(count):
        t = min(max((x[i] - shift) * _LOG2_E, _TINY), np.float32(127.0))
        whole = np.floor(t + np.float32(0.5))
        d = t - whole
        p = ((((_C6 * d + _C5) * d + _C4) * d + _C3) * d + _C2) * d + _C1
        powers[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        out[i] = p * d + np.float32(1.0)
    for i in range(count):
        out[i] *= scale[i]


@njit(**JIT)
def _rms_norm(a: Any, first: int, last: int) -> None:
    x, weight, out = carray(as_f32(a[1]), FAR), carray(as_f32(a[2]), FAR), carray(as_f32(a[3]), FAR)
    size, stride = a[4], a[5]
    eps = carray(as_f32(a[6]), 1)[0]
    for row in range(first, last):
        mine, place = x[row * stride : row * stride + size], out[row * size : (row + 1) * size]
        total = np.float32(0)
        for i in range(size):
            total += mine[i] * mine[i]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            place[i] = mine[i] * factor * weight[i]
