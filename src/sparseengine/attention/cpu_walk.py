"""Decode attention on a CPU that walks page tables in place: no gathered copy of K and V.

Work is cut into items of at most `CHUNK` keys of one segment of one row, whose partial softmaxes
are merged by log-sum-exp. The cut depends on a row's own length only, so that a row's result does
not depend on the batch nor on the number of threads. Threads are those of torch's own OpenMP pool
when it can be found (a second pool would fight it for the cores), else there is one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from sparseengine.attention import cpu_vectors as vec
from sparseengine.ops.cpu_kernels import exp_in_place
from sparseengine.ops.native import FAR, JIT, as_f32, as_i32, as_i64, openmp_parallel, take_ticket

CHUNK = 256
LANES = vec.LANES
ARGS_SIZE = 256  # int64 words: a header, then _SEG words per segment

# Header words. Addresses are in bytes, strides in bytes, counts in elements.
TICKET, ITEMS, NUM_ITEMS, FIRST, SPANS, KV_HEADS, GROUP, DIM, VALUE_DIM = range(9)
WINDOW, SEGMENTS, QUERY, QUERY_T, QUERY_H, OUT, OUT_T, OUT_H = range(9, 17)
SUMS, STATS, SCALE, BLOCK = range(17, 21)
_HEADER = 24
# Words of one segment.
(KEY, KEY_N, KEY_H, KEY_P, VALUE, VALUE_N, VALUE_H, VALUE_P, TABLE, TABLE_S, TABLE_G) = range(11)
(LENS, LENS_S, LENS_G, PAGE_SIZE, HALF) = range(11, 16)
_SEG = 16
ITEM_WORDS = 6  # span, first head, past the last head, segment, first key, past the last key


def segment_word(segment: int, word: int) -> int:
    """Index of a segment's word in the arguments."""
    return _HEADER + segment * _SEG + word


@njit(**JIT)
def plan_items(a: Any) -> None:
    """Cut the rows into items; `first` marks where each (span, head block) starts."""
    items = carray(as_i64(a[ITEMS]), FAR)
    first = carray(as_i64(a[FIRST]), FAR)
    heads, block = a[KV_HEADS], a[BLOCK]
    num, row = 0, 0
    for span in range(a[SPANS]):
        for head in range(0, heads, block):
            first[row] = num
            row += 1
            total = 0
            for g in range(a[SEGMENTS]):
                s = _HEADER + g * _SEG
                at = a[s + LENS] + span * a[s + LENS_S] + head * a[s + LENS_G]
                total += carray(as_i32(at), 1)[0]
            begin = 0 if a[WINDOW] < 0 else max(total - a[WINDOW], 0)
            for g in range(a[SEGMENTS]):
                s = _HEADER + g * _SEG
                at = a[s + LENS] + span * a[s + LENS_S] + head * a[s + LENS_G]
                length = np.int64(carray(as_i32(at), 1)[0])
                if begin >= length:
                    begin -= length
                    continue
                for key in range(begin // CHUNK * CHUNK, length, CHUNK):
                    items[num * ITEM_WORDS] = span
                    items[num * ITEM_WORDS + 1] = head
                    items[num * ITEM_WORDS + 2] = min(head + block, heads)
                    items[num * ITEM_WORDS + 3] = g
                    items[num * ITEM_WORDS + 4] = max(key, begin)
                    items[num * ITEM_WORDS + 5] = min(key + CHUNK, length)
                    num += 1
                begin = 0
    first[row] = num
    a[NUM_ITEMS] = num
    a[TICKET] = 0


@njit(**JIT)
def _walk(a: Any, item: Any, scratch: int, sums: int, values: bool) -> None:
    """One pass over an item's pages: logits of its keys, or the weighted sum of its values."""
    span, head0, head1 = item[0], item[1], item[2]
    s = _HEADER + item[3] * _SEG
    key, stop = item[4], item[5]
    tables = a[s + TABLE] + span * a[s + TABLE_S]
    size, group, half = a[s + PAGE_SIZE], a[GROUP], a[s + HALF]
    pool = a[s + VALUE] if values else a[s + KEY]
    by_page = a[s + VALUE_N] if values else a[s + KEY_N]
    by_head = a[s + VALUE_H] if values else a[s + KEY_H]
    by_slot = a[s + VALUE_P] if values else a[s + KEY_P]
    dim = a[VALUE_DIM] if values else a[DIM]
    scale = carray(as_f32(a[SCALE]), 1)[0]
    done = np.int64(0)
    while key < stop:
        column, offset = key // size, key % size
        count = min(size - offset, stop - key)
        for head in range(head0, head1):
            table = carray(as_i32(tables + head * a[s + TABLE_G]), FAR)
            rows = pool + np.int64(table[column]) * by_page + head * by_head + offset * by_slot
            # Pages lie apart, so that the hardware cannot foresee the next one: its lines are asked
            # for a few at a time between the sums (26 GB/s on two cores; 13 without, 16 at once).
            ahead = np.int64(0)
            if key + count < stop:
                ahead = pool + np.int64(table[column + 1]) * by_page + head * by_head
            share = (size * by_slot // group + vec.LINE - 1) // vec.LINE * vec.LINE
            for q_head in range(head * group, (head + 1) * group):
                if ahead:
                    vec.prefetch(ahead, share)
                    ahead += share
                mine = q_head - head0 * group
                x = scratch + 4 * (mine * CHUNK + done)
                if values:
                    out = sums + 4 * mine * dim
                    if half:
                        vec.weighted_sum_bf16(x, rows, by_slot, count, dim, out)
                    else:
                        vec.weighted_sum_f32(x, rows, by_slot, count, dim, out)
                else:
                    query = a[QUERY] + span * a[QUERY_T] + q_head * a[QUERY_H]
                    if half:
                        vec.dots_bf16(query, rows, by_slot, count, dim, x, scale)
                    else:
                        vec.dots_f32(query, rows, by_slot, count, dim, x, scale)
        key += count
        done += count


@njit(**JIT)
def _soft_cap(x: Any, count: int, cap: Any) -> None:
    """x[:count] = cap * tanh(x / cap)."""
    for j in range(count):
        x[j] = cap * np.tanh(x[j] / cap)


@njit(**JIT)
def work(a: Any) -> None:
    """Take items until none is left. Runs on every thread at once."""
    q_heads, dim = a[BLOCK] * a[GROUP], a[VALUE_DIM]
    x = np.empty((q_heads, CHUNK), np.float32)
    bits = np.empty(CHUNK, np.int32)
    scratch = np.int64(x.ctypes.data)
    items = carray(as_i64(a[ITEMS]), FAR)
    cap = carray(as_f32(a[SCALE]), 2)[1]
    all_sums = carray(as_f32(a[SUMS]), FAR)
    all_stats = carray(as_f32(a[STATS]), FAR)
    ticket = np.int64(a.ctypes.data) + 8 * TICKET
    while True:
        n = take_ticket(ticket)
        if n >= a[NUM_ITEMS]:
            break
        item = items[n * ITEM_WORDS : (n + 1) * ITEM_WORDS]
        sums = all_sums[n * q_heads * dim : (n + 1) * q_heads * dim]
        stats = all_stats[n * q_heads * 2 : (n + 1) * q_heads * 2]
        count = item[5] - item[4]
        _walk(a, item, scratch, np.int64(sums.ctypes.data), False)
        for i in range((item[2] - item[1]) * a[GROUP]):
            if cap > 0:
                _soft_cap(x[i], count, cap)
            top = np.float32(-np.inf)
            for j in range(count):
                top = max(top, x[i, j])
            exp_in_place(x[i], count, top, bits)
            total = np.float32(0)
            for j in range(count):
                total += x[i, j]
            stats[2 * i] = top
            stats[2 * i + 1] = total
        sums[:] = np.float32(0)
        _walk(a, item, scratch, np.int64(sums.ctypes.data), True)


@njit(**JIT)
def merge(a: Any) -> None:
    """Merge the partial softmaxes of each row; a row without keys gives zeros."""
    first = carray(as_i64(a[FIRST]), FAR)
    all_sums = carray(as_f32(a[SUMS]), FAR)
    all_stats = carray(as_f32(a[STATS]), FAR)
    heads, block, group, dim = a[KV_HEADS], a[BLOCK], a[GROUP], a[VALUE_DIM]
    q_heads, row = block * group, 0
    for span in range(a[SPANS]):
        for head in range(0, heads, block):
            begin, end = first[row], first[row + 1]
            row += 1
            for i in range(min(block, heads - head) * group):
                at = a[OUT] + span * a[OUT_T] + (head * group + i) * a[OUT_H]
                out = carray(as_f32(at), dim)
                out[:] = np.float32(0)
                top = np.float32(-np.inf)
                for n in range(begin, end):
                    top = max(top, all_stats[(n * q_heads + i) * 2])
                total = np.float32(0)
                for n in range(begin, end):
                    weight = np.exp(all_stats[(n * q_heads + i) * 2] - top)
                    total += weight * all_stats[(n * q_heads + i) * 2 + 1]
                    base = (n * q_heads + i) * dim
                    for d in range(dim):
                        out[d] += weight * all_sums[base + d]
                if total > 0:
                    for d in range(dim):
                        out[d] /= total


@cfunc(types.void(types.CPointer(types.int64)), cache=True)
def _entry(arguments: Any) -> None:
    work(carray(arguments, ARGS_SIZE))


def run(arguments: np.ndarray, address: int, num_threads: int) -> None:
    """Plan, walk and merge. `address` is that of the first argument word."""
    plan_items(arguments)
    parallel = openmp_parallel()
    if parallel is None or num_threads == 1:
        work(arguments)
    else:
        parallel(_entry.address, address, num_threads, 0)
    merge(arguments)
