"""Compiled loops of `ops.cpu`: float32, addresses and strides in elements unless said otherwise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types

from sparseengine.ops.native import (
    FAR,
    JIT,
    as_f32,
    as_f64,
    as_i32,
    as_i64,
    openmp_parallel,
    take_ticket,
)

_LOG2_E = np.float32(math.log2(math.e))
_GELU, _CUBE = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)
_TINY = np.float32(-126.0)  # the least exponent of a normal float32
# Minimax polynomial of 2 ** x on [-0.5, 0.5]; relative error 1e-7.
_C6, _C5, _C4, _C3, _C2, _C1 = (
    np.float32(c)
    for c in (1.5353362e-4, 1.3398874e-3, 9.6184373e-3, 5.5503324e-2, 2.4022648e-1, 6.9314720e-1)
)


@njit(**JIT)
def exp_in_place(x: Any, count: int, shift: Any, powers: Any) -> None:
    """x[:count] = exp(x - shift), at most 2 ** 127. powers: int32 scratch of `count`."""
    scale = powers.view(np.float32)
    for i in range(count):
        t = min(max((x[i] - shift) * _LOG2_E, _TINY), np.float32(127.0))
        whole = np.floor(t + np.float32(0.5))
        d = t - whole
        p = ((((_C6 * d + _C5) * d + _C4) * d + _C3) * d + _C2) * d + _C1
        powers[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        x[i] = p * d + np.float32(1.0)
    for i in range(count):
        x[i] *= scale[i]


@njit(**JIT)
def rms_norm_rows(
    x: int, by_outer: int, by_inner: int, inner: int, weight: int, eps: float, size: int, out: int,
    first: int, last: int,
) -> None:  # fmt: skip
    """Row r is x[r // inner, r % inner]; out is contiguous."""
    source, scale = carray(as_f32(x), FAR), carray(as_f32(weight), size)
    places = carray(as_f32(out), FAR)
    for row in range(first, last):
        begin = row // inner * by_outer + row % inner * by_inner
        mine, place = source[begin : begin + size], places[row * size : (row + 1) * size]
        total = np.float32(0)
        for i in range(size):
            total += mine[i] * mine[i]
        factor = np.float32(1.0 / math.sqrt(total / size + eps))
        for i in range(size):
            place[i] = mine[i] * factor * scale[i]


@njit(**JIT)
def rotate_rows(
    x: int, by_token: int, by_head: int, heads: int, size: int, cos: int, sin: int, half: int,
    out: int, first: int, last: int,
) -> None:  # fmt: skip
    """Tokens first .. last: channel i of the first half pairs with i + half; the rest pass."""
    source, target = carray(as_f32(x), FAR), carray(as_f32(out), FAR)
    all_cos, all_sin = carray(as_f32(cos), FAR), carray(as_f32(sin), FAR)
    for token in range(first, last):
        c, s = (
            all_cos[token * half : (token + 1) * half],
            all_sin[token * half : (token + 1) * half],
        )
        for head in range(heads):
            begin, place = token * by_token + head * by_head, (token * heads + head) * size
            low, high = source[begin : begin + half], source[begin + half : begin + 2 * half]
            to_low, to_high = target[place : place + half], target[place + half : place + 2 * half]
            for i in range(half):
                to_low[i] = low[i] * c[i] - high[i] * s[i]
                to_high[i] = high[i] * c[i] + low[i] * s[i]
            for i in range(2 * half, size):
                target[place + i] = source[begin + i]


@njit(**JIT)
def silu_mul_rows(
    gate: int, by_gate: int, up: int, by_up: int, size: int, out: int, first: int, last: int
) -> None:
    """out = gate * sigmoid(gate) * up, row by row; out is contiguous."""
    gates, ups, places = (
        carray(as_f32(gate), FAR),
        carray(as_f32(up), FAR),
        carray(as_f32(out), FAR),
    )
    minus = np.empty(size, np.float32)
    powers = np.empty(size, np.int32)
    for row in range(first, last):
        g, u = gates[row * by_gate : row * by_gate + size], ups[row * by_up : row * by_up + size]
        for i in range(size):
            minus[i] = -g[i]
        _gate(g, u, minus, powers, size, places[row * size : (row + 1) * size])


@njit(**JIT)
def gelu_mul_rows(
    gate: int, by_gate: int, up: int, by_up: int, size: int, out: int, first: int, last: int
) -> None:
    """out = gelu(gate) * up with gelu's tanh approximation, where 1 + tanh(x) = 2 sigmoid(2 x)."""
    gates, ups, places = (
        carray(as_f32(gate), FAR),
        carray(as_f32(up), FAR),
        carray(as_f32(out), FAR),
    )
    minus = np.empty(size, np.float32)
    powers = np.empty(size, np.int32)
    for row in range(first, last):
        g, u = gates[row * by_gate : row * by_gate + size], ups[row * by_up : row * by_up + size]
        for i in range(size):
            minus[i] = -_GELU * g[i] * (np.float32(1) + _CUBE * g[i] * g[i])
        _gate(g, u, minus, powers, size, places[row * size : (row + 1) * size])


@njit(**JIT)
def _gate(g: Any, u: Any, minus: Any, powers: Any, size: int, place: Any) -> None:
    """place = g / (1 + exp(minus)) * u; minus is overwritten."""
    exp_in_place(minus, size, np.float32(0), powers)
    for i in range(size):
        place[i] = g[i] / (np.float32(1.0) + minus[i]) * u[i]


@njit(**JIT)
def store_rows(
    pool: int, by_page: int, by_head: int, by_slot: int, page_size: int,
    value: int, by_token: int, by_value_head: int, heads: int, size: int,
    slots: int, by_group: int, tokens: int,
) -> None:  # fmt: skip
    """Copy value[t, h] to slot slots[h * by_group + t]; -1 skips."""
    pools, values = carray(as_f32(pool), FAR), carray(as_f32(value), FAR)
    places = carray(as_i64(slots), FAR)
    for token in range(tokens):
        for head in range(heads):
            slot = places[head * by_group + token]
            if slot < 0:
                continue
            to = slot // page_size * by_page + head * by_head + slot % page_size * by_slot
            begin = token * by_token + head * by_value_head
            for i in range(size):
                pools[to + i] = values[begin + i]


@njit(**JIT)
def page_score_rows(
    q: int, by_span: int, by_q_head: int, group: int, kmin: int, kmax: int, by_page: int,
    by_head: int, table: int, table_span: int, table_group: int,
    spans: int, heads: int, width: int, size: int, out: int,
) -> None:  # fmt: skip
    """out[s, h, w]: the largest of a group's bounds sum_d max(q_d kmin_d, q_d kmax_d) of a page."""
    queries, pages = carray(as_f32(q), FAR), carray(as_i32(table), FAR)
    lows, highs = carray(as_f32(kmin), FAR), carray(as_f32(kmax), FAR)
    places = carray(as_f32(out), FAR)
    for span in range(spans):
        for head in range(heads):
            row = span * table_span + head * table_group
            for column in range(width):
                begin = np.int64(pages[row + column]) * by_page + head * by_head
                low, high = lows[begin : begin + size], highs[begin : begin + size]
                best = np.float32(-np.inf)
                for q_head in range(head * group, (head + 1) * group):
                    first = span * by_span + q_head * by_q_head
                    query = queries[first : first + size]
                    bound = np.float32(0)
                    for i in range(size):
                        bound += max(query[i] * low[i], query[i] * high[i])
                    best = max(best, bound)
                places[(span * heads + head) * width + column] = best


@cfunc(types.void(types.CPointer(types.int64)), cache=True)
def _entry(words: Any) -> None:
    """Takes blocks of rows until none is left. Runs on every thread at once.

    words: ticket, kernel, rows, rows of a block, address of float64 constants, the kernel's words.
    """
    a = carray(words, 16)
    kernel, rows, block = a[1], a[2], a[3]
    while True:
        first = take_ticket(np.int64(a.ctypes.data)) * block
        if first >= rows:
            break
        last = min(first + block, rows)
        if kernel == 0:
            eps = carray(as_f64(a[4]), 1)[0]
            rms_norm_rows(a[5], a[6], a[7], a[8], a[9], eps, a[10], a[11], first, last)
        elif kernel == 1:
            rotate_rows(a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], first, last)
        elif kernel == 3:
            gelu_mul_rows(a[5], a[6], a[7], a[8], a[9], a[10], first, last)
        else:
            silu_mul_rows(a[5], a[6], a[7], a[8], a[9], a[10], first, last)


def run_threaded(kernel: int, rows: int, constant: float, words: tuple[int, ...]) -> bool:
    """Spread rows over torch's threads; False when there is only one."""
    threads, parallel = torch.get_num_threads(), openmp_parallel()
    if threads == 1 or parallel is None:
        return False
    constants = np.array([constant])
    block = max(1, min(32, rows // (4 * threads)))
    packed = np.zeros(16, np.int64)
    packed[1 : 5 + len(words)] = (kernel, rows, block, constants.ctypes.data, *words)
    parallel(_entry.address, packed.ctypes.data, threads, 0)
    return True
