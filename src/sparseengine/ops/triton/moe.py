# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton kernels take pointers and compile-time constants, which Python types cannot express.)
"""Mixture of experts on CUDA. Twins: `ops/reference/moe.py`.

Four launches, none of which the host waits for: (token, choice) pairs are sorted by expert and cut
into tiles of one expert each; gate and up with the SwiGLU between; down; the weighted sum over a
token's choices. Grids are sized by the numbers of tokens, choices and experts alone, so that a
captured graph serves any routing; tiles that a routing does not need end at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparseengine.ops.triton.launch import dot_precision, shared_memory_bytes

_SORT_BLOCK = 1024  # pairs per step of the sort
_FUSED_PAIRS = 8192  # up to so many pairs every program of the sort counts all of them itself
_TILE_FACTS = 4  # expert, first row, end row of a tile; one unused


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Launch shape of one grouped product: rows (pairs) x cols (weight rows), depth per step.

    swap: the weights are the left operand. tma: they are read through a tensor descriptor.
    """

    rows: int
    cols: int
    depth: int
    warps: int = 4
    stages: int = 3
    swap: bool = False
    tma: bool = False

    def fitted(self, parts: int, item_bytes: int, limit_bytes: int) -> Tile:
        """The same with fewer stages, then a smaller depth, until `parts` weights and the rows of
        all stages fit into the shared memory."""
        best = self
        while (best.rows + parts * best.cols) * best.depth * item_bytes * best.stages > limit_bytes:
            if best.stages > 2:
                best = replace(best, stages=best.stages - 1)
            elif best.depth > 16:
                best = replace(best, depth=best.depth // 2)
            else:
                break
        return best


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["ids"])
def _count_kernel(
    ids, counts, num_pairs, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """counts[b, e]: pairs of block b that go to expert e."""
    block = tl.program_id(0)
    n = block * BLOCK + tl.arange(0, BLOCK)
    ok = n < num_pairs
    found = tl.histogram(tl.load(ids + n, mask=ok, other=0).to(tl.int32), BLOCK_E, mask=ok)
    e = tl.arange(0, BLOCK_E)
    tl.store(counts + block * EXPERTS + e, found, mask=e < EXPERTS)


@triton.jit(
    do_not_specialize=["num_pairs", "num_tiles"], do_not_specialize_on_alignment=["ids", "counts"]
)
def _sort_kernel(
    ids, counts, order, tiles, num_pairs, num_tiles,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    FUSED: tl.constexpr, FACTS: tl.constexpr,
):  # fmt: skip
    """One program per expert: the places of its pairs in `order` and its tiles' facts."""
    expert = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int32)
    if FUSED:
        for n0 in range(0, num_pairs, BLOCK):
            n = n0 + tl.arange(0, BLOCK)
            ok = n < num_pairs
            total += tl.histogram(tl.load(ids + n, mask=ok, other=0).to(tl.int32), BLOCK_E, mask=ok)
    else:
        for b0 in range(0, tl.cdiv(num_pairs, BLOCK), 16):
            b = b0 + tl.arange(0, 16)
            ok = (b < tl.cdiv(num_pairs, BLOCK))[:, None] & (e < EXPERTS)[None, :]
            total += tl.sum(
                tl.load(counts + b[:, None] * EXPERTS + e[None, :], mask=ok, other=0), 0
            )
    per = (total + ROWS - 1) // ROWS
    first = tl.sum(tl.where(e < expert, total, 0))
    end = first + tl.sum(tl.where(e == expert, total, 0))
    tile = tl.sum(tl.where(e < expert, per, 0))
    for row in range(first, end, ROWS):
        tl.store(tiles + tile * FACTS, expert)
        tl.store(tiles + tile * FACTS + 1, row)
        tl.store(tiles + tile * FACTS + 2, end)
        tile += 1
    if expert == EXPERTS - 1:
        for t0 in range(tile, num_tiles, BLOCK):
            t = t0 + tl.arange(0, BLOCK)
            tl.store(tiles + t * FACTS, tl.full([BLOCK], -1, tl.int32), mask=t < num_tiles)
    at = first
    for n0 in range(0, num_pairs, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        hit = (tl.load(ids + n, mask=n < num_pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(hit, 0) - 1, n, mask=hit != 0)
        at += tl.sum(hit)


@triton.jit
def _weight_tile(
    weights, row, k,
    DEPTH: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, LAST: tl.constexpr,
    PART: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[COLS, STEP] of a matrix of LAST rows of DEPTH, at (row, k). Tiles start at multiples of COLS
    in parts of PART rows."""
    if TMA:
        return weights.load([row, k])
    r, d = row + tl.arange(0, COLS), k + tl.arange(0, STEP)
    at = weights + r.to(tl.int64)[:, None] * DEPTH + d[None, :]
    if DEPTH % STEP == 0 and PART % COLS == 0:
        return tl.load(at)
    return tl.load(at, mask=(r < LAST)[:, None] & (d < DEPTH)[None, :], other=0.0)


@triton.jit
def _add_product(acc, x, w, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x w^T ([rows, cols]), or its transpose with SWAP."""
    if SWAP:
        return tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    return tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize_on_alignment=["order", "tiles"])
def _up_kernel(
    x, weights, out, order, tiles, x_st,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, FACTS: tl.constexpr,
):  # fmt: skip
    """silu(x gate^T) * (x up^T) of one tile of sorted pairs: rows of out [T * K, INNER]."""
    per_row: tl.constexpr = (INNER + COLS - 1) // COLS
    tile, col = tl.program_id(0) // per_row, (tl.program_id(0) % per_row) * COLS
    expert = tl.load(tiles + tile * FACTS)
    if expert < 0:
        return
    row = tl.load(tiles + tile * FACTS + 1) + tl.arange(0, ROWS)
    ok = row < tl.load(tiles + tile * FACTS + 2)
    token = tl.load(order + row, mask=ok, other=0) // TOP_K
    d = tl.arange(0, STEP)
    x_at = x + token.to(tl.int64)[:, None] * x_st + d[None, :]
    gate = tl.zeros([COLS, ROWS] if SWAP else [ROWS, COLS], tl.float32)
    up = tl.zeros([COLS, ROWS] if SWAP else [ROWS, COLS], tl.float32)
    base = expert * (2 * INNER) + col
    for k in range(0, HIDDEN, STEP):
        if HIDDEN % STEP == 0:
            part = tl.load(x_at + k, mask=ok[:, None], other=0.0)
        else:
            part = tl.load(x_at + k, mask=ok[:, None] & (k + d < HIDDEN)[None, :], other=0.0)
        w = _weight_tile(weights, base, k, HIDDEN, COLS, STEP, LAST, INNER, TMA)
        gate = _add_product(gate, part, w, SWAP, PRECISION)
        w = _weight_tile(weights, base + INNER, k, HIDDEN, COLS, STEP, LAST, INNER, TMA)
        up = _add_product(up, part, w, SWAP, PRECISION)
    mixed = (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty)
    c = col + tl.arange(0, COLS)
    if SWAP:
        at = out + row.to(tl.int64)[None, :] * INNER + c[:, None]
        tl.store(at, mixed, mask=ok[None, :] & (c < INNER)[:, None])
    else:
        at = out + row.to(tl.int64)[:, None] * INNER + c[None, :]
        tl.store(at, mixed, mask=ok[:, None] & (c < INNER)[None, :])


@triton.jit(do_not_specialize_on_alignment=["order", "tiles"])
def _down_kernel(
    mixed, weights, out, order, tiles,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, FACTS: tl.constexpr,
):  # fmt: skip
    """mixed down^T of one tile of sorted pairs, to the pairs' own rows of out [T * K, HIDDEN]."""
    per_row: tl.constexpr = (HIDDEN + COLS - 1) // COLS
    tile, col = tl.program_id(0) // per_row, (tl.program_id(0) % per_row) * COLS
    expert = tl.load(tiles + tile * FACTS)
    if expert < 0:
        return
    row = tl.load(tiles + tile * FACTS + 1) + tl.arange(0, ROWS)
    ok = row < tl.load(tiles + tile * FACTS + 2)
    d = tl.arange(0, STEP)
    x_at = mixed + row.to(tl.int64)[:, None] * INNER + d[None, :]
    acc = tl.zeros([COLS, ROWS] if SWAP else [ROWS, COLS], tl.float32)
    base = expert * HIDDEN + col
    for k in range(0, INNER, STEP):
        if INNER % STEP == 0:
            part = tl.load(x_at + k, mask=ok[:, None], other=0.0)
        else:
            part = tl.load(x_at + k, mask=ok[:, None] & (k + d < INNER)[None, :], other=0.0)
        w = _weight_tile(weights, base, k, INNER, COLS, STEP, LAST, HIDDEN, TMA)
        acc = _add_product(acc, part, w, SWAP, PRECISION)
    pair = tl.load(order + row, mask=ok, other=0).to(tl.int64)
    c = col + tl.arange(0, COLS)
    y = acc.to(out.dtype.element_ty)
    if SWAP:
        tl.store(out + pair[None, :] * HIDDEN + c[:, None], y,
                 mask=ok[None, :] & (c < HIDDEN)[:, None])  # fmt: skip
    else:
        tl.store(out + pair[:, None] * HIDDEN + c[None, :], y,
                 mask=ok[:, None] & (c < HIDDEN)[None, :])  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["weights"])
def _reduce_kernel(
    parts, weights, out, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[t] = sum_k weights[t, k] * parts[t, k] in fp32, in the order of k."""
    token, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token.to(tl.int64) * TOP_K + k
        part = tl.load(parts + pair * HIDDEN + c, mask=ok, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair)
    tl.store(out + token.to(tl.int64) * HIDDEN + c, total.to(out.dtype.element_ty), mask=ok)


def sort_pairs(ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Pairs of ids [T, K] by expert, each expert's in order, cut into tiles of `rows`.

    Returns order int32 [T * K] (pair t * K + k of each sorted row) and tiles int32 [tiles, 4]:
    expert (-1: none), first and end row. The number of tiles is the most that any routing needs.
    """
    num_pairs = ids.numel()
    ids = ids.contiguous()
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (rows - 1)) // rows
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(num_tiles, _TILE_FACTS, dtype=torch.int32, device=ids.device)
    block_e = triton.next_power_of_2(num_experts)
    fused = num_pairs <= _FUSED_PAIRS
    counts = order
    sizes = {"EXPERTS": num_experts, "BLOCK_E": block_e, "BLOCK": _SORT_BLOCK}
    if not fused:
        blocks = triton.cdiv(num_pairs, _SORT_BLOCK)
        counts = torch.empty(blocks, num_experts, dtype=torch.int32, device=ids.device)
        _count_kernel[(blocks,)](ids, counts, num_pairs, **sizes, num_warps=4)
    _sort_kernel[(num_experts,)](
        ids, counts, order, tiles, num_pairs, num_tiles,
        **sizes, ROWS=rows, FUSED=fused, FACTS=_TILE_FACTS, num_warps=4,
    )  # fmt: skip
    return order, tiles


def _operand(weights: Tensor, tile: Tile) -> tuple[Any, bool]:
    """The stack [E, N, D] as a matrix of rows, through a descriptor where the tile asks for one and
    its rows are aligned as descriptors need."""
    aligned = weights.shape[2] * weights.element_size() % 16 == 0 and weights.data_ptr() % 16 == 0
    if not (tile.tma and aligned):
        return weights, False
    matrix = weights.view(-1, weights.shape[2])
    return TensorDescriptor.from_tensor(matrix, [tile.cols, tile.depth]), True


def up(x: Tensor, gate_up: Tensor, order: Tensor, tiles: Tensor, top_k: int, tile: Tile) -> Tensor:
    """silu(gate) * up of all sorted pairs: [T * K, I]."""
    num_experts, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = x.new_empty(order.shape[0], inner)
    weights, tma = _operand(gate_up, tile)
    _up_kernel[(tiles.shape[0] * triton.cdiv(inner, tile.cols),)](
        x, weights, out, order, tiles, x.stride(0),
        HIDDEN=x.shape[1], INNER=inner, TOP_K=top_k, LAST=num_experts * 2 * inner,
        ROWS=tile.rows, COLS=tile.cols, STEP=tile.depth, SWAP=tile.swap, TMA=tma,
        PRECISION=dot_precision(x.dtype), FACTS=_TILE_FACTS,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def down(mixed: Tensor, weights: Tensor, order: Tensor, tiles: Tensor, tile: Tile) -> Tensor:
    """The down projection of all sorted pairs, in the order of pairs: [T * K, H]."""
    num_experts, hidden, inner = weights.shape
    out = mixed.new_empty(order.shape[0], hidden)
    operand, tma = _operand(weights, tile)
    _down_kernel[(tiles.shape[0] * triton.cdiv(hidden, tile.cols),)](
        mixed, operand, out, order, tiles,
        HIDDEN=hidden, INNER=inner, LAST=num_experts * hidden,
        ROWS=tile.rows, COLS=tile.cols, STEP=tile.depth, SWAP=tile.swap, TMA=tma,
        PRECISION=dot_precision(mixed.dtype), FACTS=_TILE_FACTS,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def reduce(parts: Tensor, weights: Tensor) -> Tensor:
    """sum_k weights[t, k] * parts[t * K + k]: [T, H]."""
    num_tokens, top_k = weights.shape
    hidden = parts.shape[1]
    out = parts.new_empty(num_tokens, hidden)
    block = min(1024, triton.next_power_of_2(hidden))
    _reduce_kernel[(num_tokens, triton.cdiv(hidden, block))](
        parts, weights.contiguous(), out, HIDDEN=hidden, TOP_K=top_k, BLOCK=block, num_warps=4
    )
    return out


def plan_tiles(num_pairs: int, num_experts: int) -> tuple[Tile, Tile]:
    """Launch shapes of the two products, by the mean number of pairs per expert."""
    mean = num_pairs / num_experts
    if mean > 64:
        return (
            Tile(rows=128, cols=128, depth=64, warps=8, stages=4),
            Tile(rows=128, cols=256, depth=64, warps=8, stages=4),
        )
    rows = 16 if mean <= 8 else 32 if mean <= 24 else 64
    return (
        Tile(rows=rows, cols=64, depth=128, stages=3),
        Tile(rows=rows, cols=64, depth=128, stages=3),
    )


def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down_proj: Tensor,
    ids: Tensor,
    weights: Tensor,
    row_tile: int | None = None,
    tiles: tuple[Tile, Tile] | None = None,
) -> Tensor:
    """Weighted sum of the experts that each token chose; see the twin for shapes.

    With `row_tile` every product has the same launch shape whatever the call, so that a row's bits
    are its own. `tiles` overrides the launch shapes (benchmarks).
    """
    num_tokens, top_k = ids.shape
    if num_tokens == 0:
        return torch.empty_like(x)
    if not (gate_up.is_contiguous() and down_proj.is_contiguous()):
        raise ValueError("stacks of experts must be contiguous")
    num_experts, item, limit = gate_up.shape[0], x.element_size(), shared_memory_bytes(x.device)
    first, second = tiles or plan_tiles(row_tile or ids.numel(), num_experts)
    first, second = first.fitted(2, item, limit), second.fitted(1, item, limit)
    x = x if x.stride(1) == 1 else x.contiguous()
    order, facts = sort_pairs(ids, num_experts, first.rows)
    mixed = up(x, gate_up, order, facts, top_k, first)
    return reduce(down(mixed, down_proj, order, facts, second), weights)
