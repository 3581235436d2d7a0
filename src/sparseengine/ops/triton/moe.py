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
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparseengine.ops.triton.launch import dot_precision, shared_memory_bytes
from sparseengine.ops.tuned import launch_shape

_FUSED_PAIRS = 4096  # up to so many pairs every program of the sort counts all of them itself
_FUSED_BLOCK, _BLOCK = 1024, 4096  # pairs per step of the sort
_TILE_FACTS = 4  # expert, first row, end row of a tile; one unused


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Launch shape of one grouped product: rows (pairs) x cols (weight rows), depth per step.

    swap: the weights are the left operand. tma: they are read through a tensor descriptor. half: a
    tile with at most half its rows in use computes half as many.
    """

    rows: int
    cols: int
    depth: int
    warps: int = 4
    stages: int = 3
    swap: bool = False
    tma: bool = False
    half: bool = False

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
    """Places of an expert's pairs in `order`, and its tiles' facts.

    FUSED: one program per expert, which counts all pairs itself. Otherwise one per expert and
    block of pairs, told by counts [blocks, E].
    """
    expert, block = tl.program_id(0), tl.program_id(1)
    e = tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int32)
    earlier = tl.zeros([BLOCK_E], tl.int32)  # in blocks before this one
    blocks = tl.cdiv(num_pairs, BLOCK)
    if FUSED:
        for n0 in range(0, num_pairs, BLOCK):
            n = n0 + tl.arange(0, BLOCK)
            ok = n < num_pairs
            part = tl.load(ids + n, mask=ok, other=0).to(tl.int32)
            total += tl.histogram(part, BLOCK_E, mask=ok)
    else:
        for b0 in range(0, blocks, 16):
            b = b0 + tl.arange(0, 16)
            ok = (b < blocks)[:, None] & (e < EXPERTS)[None, :]
            found = tl.load(counts + b[:, None] * EXPERTS + e[None, :], mask=ok, other=0)
            total += tl.sum(found, 0)
            earlier += tl.sum(tl.where((b < block)[:, None], found, 0), 0)
    first = tl.sum(tl.where(e < expert, total, 0))
    if block == 0:
        end = first + tl.sum(tl.where(e == expert, total, 0))
        tile = tl.sum(tl.where(e < expert, (total + ROWS - 1) // ROWS, 0))
        for row in range(first, end, ROWS):
            tl.store(tiles + tile * FACTS, expert)
            tl.store(tiles + tile * FACTS + 1, row)
            tl.store(tiles + tile * FACTS + 2, end)
            tile += 1
        if expert == EXPERTS - 1:
            for t0 in range(tile, num_tiles, BLOCK):
                t = t0 + tl.arange(0, BLOCK)
                tl.store(tiles + t * FACTS, tl.full([BLOCK], -1, tl.int32), mask=t < num_tiles)
    at = first + tl.sum(tl.where(e == expert, earlier, 0))
    mine = block * BLOCK
    for n0 in range(mine, num_pairs if FUSED else mine + 1, BLOCK):
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
        w = weights.load([row, k])
    else:
        r, d = row + tl.arange(0, COLS), k + tl.arange(0, STEP)
        at = weights + r.to(tl.int64)[:, None] * DEPTH + d[None, :]
        if DEPTH % STEP == 0 and PART % COLS == 0:
            w = tl.load(at)
        else:
            w = tl.load(at, mask=(r < LAST)[:, None] & (d < DEPTH)[None, :], other=0.0)
    return w


@triton.jit
def _add_product(acc, x, w, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x w^T ([rows, cols]), or its transpose with SWAP."""
    if SWAP:
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _up_tile(
    x, weights, out, order, x_st, expert, first, end, col,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = first + tl.arange(0, ROWS)
    ok = row < end
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
    _store_tile(out, mixed, row, ok, col, INNER, COLS, SWAP)


@triton.jit
def _down_tile(
    mixed, weights, out, order, expert, first, end, col,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, MIXED_TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = first + tl.arange(0, ROWS)
    ok = row < end
    d = tl.arange(0, STEP)
    acc = tl.zeros([COLS, ROWS] if SWAP else [ROWS, COLS], tl.float32)
    base = expert * HIDDEN + col
    for k in range(0, INNER, STEP):
        if MIXED_TMA:  # rows past the tile's end are other experts': computed, not stored
            part = mixed.load([first, k])
        else:
            at = mixed + row.to(tl.int64)[:, None] * INNER + (k + d)[None, :]
            if INNER % STEP == 0:
                part = tl.load(at, mask=ok[:, None], other=0.0)
            else:
                part = tl.load(at, mask=ok[:, None] & (k + d < INNER)[None, :], other=0.0)
        w = _weight_tile(weights, base, k, INNER, COLS, STEP, LAST, HIDDEN, TMA)
        acc = _add_product(acc, part, w, SWAP, PRECISION)
    pair = tl.load(order + row, mask=ok, other=0)
    _store_tile(out, acc.to(out.dtype.element_ty), pair, ok, col, HIDDEN, COLS, SWAP)


@triton.jit
def _store_tile(
    out, tile, row, ok, col, WIDTH: tl.constexpr, COLS: tl.constexpr, SWAP: tl.constexpr
):  # fmt: skip
    """The tile ([rows, COLS], transposed with SWAP) to rows `row` of out [.., WIDTH]."""
    c = col + tl.arange(0, COLS)
    at = row.to(tl.int64) * WIDTH
    if SWAP:
        tl.store(out + at[None, :] + c[:, None], tile, mask=ok[None, :] & (c < WIDTH)[:, None])
    else:
        tl.store(out + at[:, None] + c[None, :], tile, mask=ok[:, None] & (c < WIDTH)[None, :])


@triton.jit(do_not_specialize_on_alignment=["order", "tiles"])
def _up_kernel(
    x, weights, out, order, tiles, x_st,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, FACTS: tl.constexpr,
):  # fmt: skip
    """silu(x gate^T) * (x up^T) of one tile of sorted pairs: rows of out [T * K, INNER]."""
    per_row: tl.constexpr = (INNER + COLS - 1) // COLS
    tile, col = tl.program_id(0) // per_row, (tl.program_id(0) % per_row) * COLS
    expert = tl.load(tiles + tile * FACTS)
    if expert < 0:
        return
    first, end = tl.load(tiles + tile * FACTS + 1), tl.load(tiles + tile * FACTS + 2)
    if HALF and end - first <= ROWS // 2:
        _up_tile(x, weights, out, order, x_st, expert, first, end, col, HIDDEN, INNER, TOP_K,
                 LAST, ROWS // 2, COLS, STEP, SWAP, TMA, PRECISION)  # fmt: skip
    else:
        _up_tile(x, weights, out, order, x_st, expert, first, end, col, HIDDEN, INNER, TOP_K,
                 LAST, ROWS, COLS, STEP, SWAP, TMA, PRECISION)  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["order", "tiles"])
def _down_kernel(
    mixed, mixed_rows, weights, out, order, tiles,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, FACTS: tl.constexpr,
):  # fmt: skip
    """mixed down^T of one tile of sorted pairs, to the pairs' own rows of out [T * K, HIDDEN]."""
    per_row: tl.constexpr = (HIDDEN + COLS - 1) // COLS
    tile, col = tl.program_id(0) // per_row, (tl.program_id(0) % per_row) * COLS
    expert = tl.load(tiles + tile * FACTS)
    if expert < 0:
        return
    first, end = tl.load(tiles + tile * FACTS + 1), tl.load(tiles + tile * FACTS + 2)
    if HALF and end - first <= ROWS // 2:
        _down_tile(mixed, weights, out, order, expert, first, end, col, HIDDEN, INNER, LAST,
                   ROWS // 2, COLS, STEP, SWAP, TMA, False, PRECISION)  # fmt: skip
    else:
        _down_tile(mixed_rows, weights, out, order, expert, first, end, col, HIDDEN, INNER, LAST,
                   ROWS, COLS, STEP, SWAP, TMA, TMA, PRECISION)  # fmt: skip


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
    fused = num_pairs <= _FUSED_PAIRS
    block = _FUSED_BLOCK if fused else _BLOCK
    blocks, counts = triton.cdiv(num_pairs, block), order
    block_e = triton.next_power_of_2(num_experts)
    sizes = {"EXPERTS": num_experts, "BLOCK_E": block_e, "BLOCK": block, "num_warps": 8}
    if not fused:
        counts = torch.empty(blocks, num_experts, dtype=torch.int32, device=ids.device)
        _count_kernel[(blocks,)](ids, counts, num_pairs, **sizes)
    _sort_kernel[(num_experts, 1 if fused else blocks)](
        ids, counts, order, tiles, num_pairs, num_tiles,
        **sizes, ROWS=rows, FUSED=fused, FACTS=_TILE_FACTS,
    )  # fmt: skip
    return order, tiles


@cache
def _has_descriptors(device: torch.device) -> bool:
    """Whether the device copies tiles by descriptor; the interpreter does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def _by_descriptor(weights: Tensor, tile: Tile) -> bool:
    """Whether a stack [E, N, D] is read that way: rows must be aligned to 16 bytes."""
    aligned = weights.shape[2] * weights.element_size() % 16 == 0 and weights.data_ptr() % 16 == 0
    return tile.tma and aligned and _has_descriptors(weights.device)


def _descriptor(matrix: Tensor, rows: int, tile: Tile) -> Any:
    return TensorDescriptor.from_tensor(matrix, [rows, tile.depth])


def up(x: Tensor, gate_up: Tensor, order: Tensor, tiles: Tensor, top_k: int, tile: Tile) -> Tensor:
    """silu(gate) * up of all sorted pairs: [T * K, I]."""
    num_experts, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = x.new_empty(order.shape[0], inner)
    tma = _by_descriptor(gate_up, tile)
    weights = _descriptor(gate_up.view(-1, x.shape[1]), tile.cols, tile) if tma else gate_up
    _up_kernel[(tiles.shape[0] * triton.cdiv(inner, tile.cols),)](
        x, weights, out, order, tiles, x.stride(0),
        HIDDEN=x.shape[1], INNER=inner, TOP_K=top_k, LAST=num_experts * 2 * inner,
        ROWS=tile.rows, COLS=tile.cols, STEP=tile.depth, SWAP=tile.swap, TMA=tma, HALF=tile.half,
        PRECISION=dot_precision(x.dtype), FACTS=_TILE_FACTS,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def down(mixed: Tensor, weights: Tensor, order: Tensor, tiles: Tensor, tile: Tile) -> Tensor:
    """The down projection of all sorted pairs, in the order of pairs: [T * K, H]."""
    num_experts, hidden, inner = weights.shape
    out = mixed.new_empty(order.shape[0], hidden)
    tma = _by_descriptor(weights, tile)
    stack = _descriptor(weights.view(-1, inner), tile.cols, tile) if tma else weights
    rows = _descriptor(mixed, tile.rows, tile) if tma else mixed
    _down_kernel[(tiles.shape[0] * triton.cdiv(hidden, tile.cols),)](
        mixed, rows, stack, out, order, tiles,
        HIDDEN=hidden, INNER=inner, LAST=num_experts * hidden,
        ROWS=tile.rows, COLS=tile.cols, STEP=tile.depth, SWAP=tile.swap, TMA=tma, HALF=tile.half,
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


def plan_tiles(num_pairs: int, num_experts: int, item_bytes: int) -> tuple[Tile, Tile]:
    """Launch shapes of the two products, by the mean number of pairs per expert.

    Few pairs per expert: time is that of reading the weights, whatever the rows of a tile. Many:
    it is that of the products. fp32 is multiplied exactly, without matrix units.
    """
    mean = num_pairs / num_experts
    if item_bytes > 2:
        tile = Tile(rows=16 if mean <= 24 else 32, cols=32, depth=32, stages=2)
        return tile, tile
    if mean <= 12:
        tile = Tile(rows=16, cols=64, depth=128, swap=True)
        return tile, tile
    if mean <= 24:
        tile = Tile(rows=32, cols=64, depth=128)
        return tile, tile
    if mean <= 40:
        tile = Tile(rows=64, cols=128, depth=64, stages=4)
        return tile, tile
    many = Tile(rows=128, cols=128, depth=64, warps=8, stages=4, swap=True, tma=True, half=True)
    return many, replace(many, cols=256)


def tuned_tiles(num_pairs: int, num_experts: int, item_bytes: int) -> tuple[Tile, Tile]:
    """`plan_tiles`, unless a tuning file knows better; both products walk the same rows."""
    first, second = plan_tiles(num_pairs, num_experts, item_bytes)
    mean = max(1, triton.next_power_of_2(triton.cdiv(num_pairs, num_experts)))
    kind = f"up to {mean} pairs per expert of {item_bytes} bytes"
    first = launch_shape("moe_up", kind, first)
    second = launch_shape("moe_down", kind, second)
    second = replace(second, rows=first.rows)
    if first.rows < 32:  # half of it would be less than a matrix instruction takes
        return replace(first, half=False), replace(second, half=False)
    return first, second


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
    first, second = tiles or tuned_tiles(row_tile or ids.numel(), num_experts, item)
    first, second = first.fitted(2, item, limit), second.fitted(1, item, limit)
    x = x if x.stride(1) == 1 else x.contiguous()
    order, facts = sort_pairs(ids, num_experts, first.rows)
    mixed = up(x, gate_up, order, facts, top_k, first)
    return reduce(down(mixed, down_proj, order, facts, second), weights)
