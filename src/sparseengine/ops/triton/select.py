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

_HELD_COLUMNS = 1 << 13  # of a row that a program likes to hold in registers
_MOST_COLUMNS = 1 << 15  # that it can hold
_BLOCK_W = 4096  # columns that it reads at a time where it cannot hold them
_BLOCK_K = 256


@triton.jit
def _ranks(scores, w, used, sinks):
    """int32 numbers in the order of a row's scores at columns w, forced ones above all others."""
    x = tl.load(scores + w, mask=w < used, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)  # both zeros are one number
    x = tl.minimum(x, 3.4028234663852886e38)  # an infinite score is below what is forced
    x = tl.where((w < sinks) | (w == used - 1), float("inf"), x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)  # ordered as the floats are


@triton.jit
def _row_count(lens, budgets, span, group, lens_ss, lens_sg, least, PAGE: tl.constexpr):
    """(columns in use of a row, how many of them are chosen)."""
    length = tl.load(lens + span * lens_ss + group * lens_sg)
    budget = tl.load(budgets + span)
    used = tl.cdiv(length, PAGE)
    count = used
    if length > budget:
        count = tl.minimum(used, tl.maximum(budget // PAGE, least))
    return used, count


@triton.jit
def _pad_tail(out, count, width, BLOCK_K: tl.constexpr):
    """-1 behind the chosen columns."""
    for k0 in range(0, width, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        tl.store(out + k, tl.full([BLOCK_K], -1, tl.int32), mask=(k >= count) & (k < width))


@triton.jit
def _count_at(key, floor, shift):
    """How many numbers are at least floor + 1, 2, 3 times 2^shift: counts of 16 bits, two a sum."""
    one = tl.full([], 1, tl.int32) << shift
    found = (key >= floor + one).to(tl.int32) + ((key >= floor + 2 * one).to(tl.int32) << 16)
    total = tl.sum(found, 0)
    most = tl.sum((key >= floor + 3 * one).to(tl.int32), 0)
    return total & 0xFFFF, (total >> 16) & 0xFFFF, most


@triton.jit
def _floor_of(key, inside, count):
    """(floor, how many numbers are above it): with some of those equal to it they are `count`.

    key: -2^31, which no number is, outside. Two bits a round; the last one is that in which a
    candidate parts exactly `count` numbers from the others. (Sums wrap around at 2^31, which is
    what they shall do.)
    """
    floor = tl.full([], -2147483648, tl.int32)  # below every number
    above = tl.sum(inside.to(tl.int32), 0)
    if count >= above:
        shift = tl.full([], -2, tl.int32)
    else:
        shift = tl.full([], 30, tl.int32)
        above = tl.full([], 0, tl.int32)
    while shift >= 0:
        n1, n2, n3 = _count_at(key, floor, shift)
        digit = (n1 >= count).to(tl.int32) + (n2 >= count).to(tl.int32) + (n3 >= count).to(tl.int32)
        floor += digit << shift
        here = tl.where(digit == 3, n3, tl.where(digit == 2, n2, n1))
        above = tl.where(digit == 2, n3, tl.where(digit == 1, n2, tl.where(digit == 0, n1, above)))
        shift -= 2
        if (digit > 0) & (here == count):
            floor -= 1
            above = count
            shift = tl.full([], -2, tl.int32)
    return floor, above


@triton.jit
def _top_pages_kernel(
    scores, ids, lens, budgets, out, columns, given, width, lens_ss, lens_sg, sinks, least,
    HEADS: tl.constexpr, ROW_PER_HEAD: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    GIVEN: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The best columns of one part of a row, or of those that `ids` gives; ties by position."""
    row, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    span, head = row // HEADS, row % HEADS
    group = head if ROW_PER_HEAD else 0
    used, count = _row_count(lens, budgets, span, group, lens_ss, lens_sg, least, PAGE)
    w = part * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = w < used
    if GIVEN:
        w = tl.load(ids + row * given + w, mask=w < given, other=-1)
        inside = w >= 0
    key = _ranks(scores + row * columns, tl.where(inside, w, used), used, sinks)
    key = tl.where(inside, key, -2147483648)
    count = tl.minimum(count, tl.sum(inside.to(tl.int32), 0))
    floor, above = _floor_of(key, inside, count)
    ties = inside & (key == floor)
    chosen = inside & (key > floor)
    chosen = chosen | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= count - above))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    out += (row * PARTS + part) * width
    tl.store(out + place, w, mask=chosen & (place < width))
    _pad_tail(out, count, width, BLOCK_K)


@triton.jit
def _top_columns_kernel(
    scores, lens, budgets, out, columns, width, lens_ss, lens_sg, sinks, least,
    HEADS: tl.constexpr, ROW_PER_HEAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same for a row that no program can hold: read again, from the cache, in every pass.

    A pass finds three bits of the count-th largest number: how many numbers are at least as large
    as each of eight candidates. (Sums wrap around at 2^31, which is what they shall do.) It was the
    last one when a candidate parts exactly `count` numbers from the others. A row that is read
    whole needs no pass.
    """
    row = tl.program_id(0).to(tl.int64)
    span, head = row // HEADS, row % HEADS
    group = head if ROW_PER_HEAD else 0
    used, count = _row_count(lens, budgets, span, group, lens_ss, lens_sg, least, PAGE)
    scores += row * columns
    w = tl.arange(0, BLOCK_W)
    digit = tl.arange(0, 8)
    floor = tl.full([], -2147483648, tl.int32)  # below every number
    above = used
    if count < used:
        shift = tl.full([], 29, tl.int32)
        while shift > -3:
            candidates = floor + (digit << tl.maximum(shift, 0))
            found = tl.zeros([8], tl.int32)
            for w0 in range(0, used, BLOCK_W):
                inside = (w0 + w < used)[None, :]
                key = _ranks(scores, w0 + w, used, sinks)
                found += tl.sum((inside & (key[None, :] >= candidates[:, None])).to(tl.int32), 1)
            enough = found >= count  # of the smaller candidates
            best = tl.max(tl.where(enough, digit, 0), 0)
            floor += best << tl.maximum(shift, 0)
            above = tl.max(tl.where(enough, 0, found), 0)
            shift -= 3
            if tl.min(tl.where(enough, found, used), 0) == count:
                floor -= 1
                above = count
                shift = tl.full([], -3, tl.int32)
    room = count - above  # for columns that equal the count-th largest
    out += row * width
    placed = 0
    for w0 in range(0, used, BLOCK_W):
        at = w0 + w
        key = _ranks(scores, at, used, sinks)
        ties = (at < used) & (key == floor)
        chosen = (at < used) & (key > floor)
        chosen = chosen | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= room))
        place = placed + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(out + place, at, mask=chosen & (place < width))
        room -= tl.sum(ties.to(tl.int32), 0)
        placed += tl.sum(chosen.to(tl.int32), 0)
    _pad_tail(out, count, width, BLOCK_K)


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
    """See the twin. Long rows are cut, and the best of the parts' best are taken."""
    spans, heads, columns = scores.shape
    rows = spans * heads
    if rows * width == 0:
        return torch.empty(spans, heads, width, dtype=torch.int32, device=scores.device)
    scores, budgets = scores.contiguous(), budgets.contiguous()
    limits = (*lens.stride(), sinks, least)
    shape = {"HEADS": heads, "ROW_PER_HEAD": lens.shape[1] > 1, "PAGE": page_size}

    def launch(given: Tensor | None, parts: int, block: int) -> Tensor:
        out = torch.empty(rows, parts * width, dtype=torch.int32, device=scores.device)
        _top_pages_kernel[(rows * parts,)](
            scores, given, lens, budgets, out, columns, 0 if given is None else given.shape[1],
            width, *limits, **shape, PARTS=parts, GIVEN=given is not None, BLOCK_W=block,
            BLOCK_K=_BLOCK_K, num_warps=max(1, min(32, block // 1024)),
        )  # fmt: skip
        return out

    given, left = None, columns
    # A cut leaves at most half of what it was given.
    part = max(_HELD_COLUMNS, int(triton.next_power_of_2(2 * width)))
    while left > part and part <= _MOST_COLUMNS:
        given = launch(given, triton.cdiv(left, part), part)
        left = given.shape[1]
    if left <= _MOST_COLUMNS:
        return launch(given, 1, max(16, int(triton.next_power_of_2(left)))).view(
            spans, heads, width
        )
    out = torch.empty(spans, heads, width, dtype=torch.int32, device=scores.device)
    _top_columns_kernel[(rows,)](
        scores, lens, budgets, out, columns, width, *limits, **shape,
        BLOCK_W=_BLOCK_W, BLOCK_K=_BLOCK_K, num_warps=max(1, min(16, _BLOCK_W // 256)),
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
