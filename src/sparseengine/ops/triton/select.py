# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton kernels take pointers and compile-time constants, which Python types cannot express.)
"""From page scores to the pages a row reads: one launch to choose, one to look up.

In plain torch both are a dozen kernels each, which is what a selecting decode step is made of.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseengine.core.view import PackedTable
from sparseengine.ops.reference.select import top_pages as twin

_MAX_COLUMNS = 1 << 15  # of one row that a program holds in registers
_BLOCK_K = 256


@triton.jit
def _top_pages_kernel(
    scores, lens, budgets, out, columns, width, lens_ss, lens_sg, sinks, least,
    HEADS: tl.constexpr, ROW_PER_HEAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row: the count-th largest score is found bit by bit, ties by position."""
    row = tl.program_id(0).to(tl.int64)
    span, head = row // HEADS, row % HEADS
    group = head if ROW_PER_HEAD else 0
    length = tl.load(lens + span * lens_ss + group * lens_sg)
    budget = tl.load(budgets + span)
    used = tl.cdiv(length, PAGE)
    count = used
    if length > budget:
        count = tl.minimum(used, tl.maximum(budget // PAGE, least))

    w = tl.arange(0, BLOCK_W)
    x = tl.load(scores + row * columns + w, mask=w < columns, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)  # both zeros are one number
    x = tl.minimum(x, 3.4028234663852886e38)  # an infinite score is below what is forced
    x = tl.where((w < sinks) | (w == used - 1), float("inf"), x)
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)  # ordered as the floats are
    inside = w < used
    least_key = tl.full([], -2147483648, tl.int64)
    for i in range(32):
        candidate = least_key + (tl.full([], 1, tl.int64) << (31 - i))
        enough = tl.sum((inside & (key >= candidate)).to(tl.int32), 0) >= count
        least_key = tl.where(enough, candidate, least_key)
    above = inside & (key > least_key)
    ties = inside & (key == least_key)
    room = count - tl.sum(above.to(tl.int32), 0)
    chosen = above | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= room))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    out += row * width
    tl.store(out + place, w, mask=chosen & (place < width))
    for k0 in range(0, width, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        tl.store(out + k, tl.full([BLOCK_K], -1, tl.int32), mask=(k >= count) & (k < width))


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
    """See the twin, which also serves rows too long for one program."""
    spans, heads, columns = scores.shape
    if columns > _MAX_COLUMNS:
        return twin(
            scores, lens, budgets, page_size, sinks=sinks, least=least, width=width
        )  # fmt: skip
    out = torch.empty(spans, heads, width, dtype=torch.int32, device=scores.device)
    if out.numel():
        block = max(16, int(triton.next_power_of_2(columns)))
        _top_pages_kernel[(spans * heads,)](
            scores.contiguous(), lens, budgets.contiguous(), out, columns, width,
            *lens.stride(), sinks, least, HEADS=heads, ROW_PER_HEAD=lens.shape[1] > 1,
            PAGE=page_size, BLOCK_W=block, BLOCK_K=_BLOCK_K,
            num_warps=max(1, min(16, block // 256)),
        )  # fmt: skip
    return out


@triton.jit
def _take_pages_kernel(
    arena, starts, widths, index, lens, pages, counts, first_row, width, i_ss, i_sg,
    lens_ss, lens_sg,
    GROUPS: tl.constexpr, INDEX_PER_HEAD: tl.constexpr, ROW_PER_HEAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    span, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
    row = group if ROW_PER_HEAD else 0
    own = tl.load(widths + span)
    table = arena + tl.load(starts + span) + (first_row + row) * own
    index += span * i_ss + (group if INDEX_PER_HEAD else 0) * i_sg
    length = tl.load(lens + span * lens_ss + row * lens_sg)
    pages += (span * GROUPS + group) * width
    total = 0
    for k0 in range(0, width, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        column = tl.load(index + k, mask=k < width, other=-1)
        live = column >= 0
        inside = tl.minimum(column, tl.maximum(own - 1, 0).to(tl.int32))
        page = tl.load(table + inside, mask=live, other=0)
        tl.store(pages + k, page, mask=k < width)
        fill = tl.minimum(tl.maximum(length - column * PAGE, 0), PAGE)
        total += tl.sum(tl.where(live, fill, 0), 0)
    tl.store(counts + span * GROUPS + group, total)


def take_pages(
    table: PackedTable, index: Tensor, lens: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """See the twin."""
    spans, width = index.shape[0], index.shape[2]
    groups = max(table.groups, index.shape[1])
    pages = torch.empty(spans, groups, width, dtype=torch.int32, device=index.device)
    counts = torch.empty(spans, groups, dtype=torch.int32, device=index.device)
    if spans:
        index = index if index.stride(2) == 1 else index.contiguous()
        _take_pages_kernel[(spans * groups,)](
            table.arena, table.base, table.width, index, lens, pages, counts, table.row, width,
            *index.stride()[:2], *lens.stride(), GROUPS=groups,
            INDEX_PER_HEAD=index.shape[1] > 1, ROW_PER_HEAD=table.groups > 1,
            PAGE=page_size, BLOCK_K=_BLOCK_K, num_warps=2,
        )  # fmt: skip
    return pages, counts
