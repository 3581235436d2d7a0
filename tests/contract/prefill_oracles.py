"""What patterns of sparse prefill should read, by their papers' formulas: loops in float64.

Every function takes the queries q [n, Hq, D] of one chunk, whose first query is at position
`start`, and all keys k [L, Hkv, D] of the row, which end with the chunk's own; nothing was evicted.
It returns {(query head, block of queries): set of blocks of keys}, before the dense tail is added;
blocks of queries are numbered within the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

Choice = dict[tuple[int, int], set[int]]


def blocks_of(start: int, n: int, block: int) -> list[list[int]]:
    """Positions of the chunk's queries, by block."""
    found: dict[int, list[int]] = {}
    for position in range(start, start + n):
        found.setdefault(position // block, []).append(position)
    return list(found.values())


def causal(choice: Choice, start: int, n: int, block: int) -> Choice:
    """Own blocks added, blocks behind the queries removed."""
    out = {}
    for (head, row), columns in choice.items():
        mine = blocks_of(start, n, block)[row]
        own = set(range(mine[0] // block, mine[-1] // block + 1))
        out[head, row] = {c for c in columns | own if c <= mine[-1] // block}
    return out


def a_shape(q: Tensor, k: Tensor, start: int, block: int, sink: int, window: int) -> Choice:
    choice: Choice = {}
    for head in range(q.shape[1]):
        for row, mine in enumerate(blocks_of(start, len(q), block)):
            near = range(max(0, mine[0] - window), mine[-1] + 1)
            choice[head, row] = {s // block for s in (*near, *range(sink))}
    return causal(choice, start, len(q), block)


def _logits(q: Tensor, k: Tensor, head: int, position: int, start: int) -> Tensor:
    group = q.shape[1] // k.shape[1]
    keys = k[: position + 1, head // group].double()
    return keys @ q[position - start, head].double() / math.sqrt(q.shape[2])


def antidiagonal(
    q: Tensor, k: Tensor, start: int, block: int, stride: int, threshold: float
) -> Choice:
    """XAttention: means along the antidiagonals of stride x stride tiles, softmax, top-p."""
    group, scale = q.shape[1] // k.shape[1], 1 / (math.sqrt(q.shape[2]) * stride)
    choice: Choice = {}
    for head in range(q.shape[1]):
        for row, mine in enumerate(blocks_of(start, len(q), block)):
            mass: dict[int, float] = {}
            for tile in sorted({p // stride for p in mine}):
                newest = max(p for p in mine if p // stride == tile)
                logits = []
                for other in range(newest // stride + 1):
                    total = 0.0
                    for i in range(stride):
                        at, key = tile * stride + stride - 1 - i, other * stride + i
                        if at in mine and key < len(k):
                            query = q[at - start, head].double()
                            total += float(query @ k[key, head // group].double())
                    logits.append(total * scale)
                share = torch.tensor(logits, dtype=torch.float64).softmax(0)
                for other, part in enumerate(share.tolist()):
                    column = other * stride // block
                    mass[column] = mass.get(column, 0.0) + part
            forced = {0, *(p // block for p in mine)}
            goal = threshold * sum(mass.values())
            kept, sofar = set(forced), sum(mass[c] for c in forced)
            for column in sorted(set(mass) - forced, key=lambda c: (-mass[c], c)):
                if sofar >= goal:
                    break
                kept.add(column)
                sofar += mass[column]
            choice[head, row] = kept
    return causal(choice, start, len(q), block)


def line_mass(
    q: Tensor, k: Tensor, start: int, count: int, head: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Mass of the chunk's newest queries by slot and by distance."""
    vertical: dict[int, float] = {}
    slash: dict[int, float] = {}
    for position in range(start + len(q) - count, start + len(q)):
        for slot, part in enumerate(_logits(q, k, head, position, start).softmax(0).tolist()):
            vertical[slot] = vertical.get(slot, 0.0) + part
            slash[position - slot] = slash.get(position - slot, 0.0) + part
    return vertical, slash


def _top_blocks(mass: dict[int, float], count: int, block: int, num_blocks: int) -> set[int]:
    """The `count` blocks of most mass, block 0 always first."""
    sums = [sum(mass.get(i, 0.0) for i in range(b * block, (b + 1) * block)) for b in
            range(num_blocks)]  # fmt: skip
    order = sorted(range(num_blocks), key=lambda b: (b != 0, -sums[b], b))
    return set(order[:count])


def _touched(
    mine: list[int], columns: Iterable[int], distances: Iterable[int], block: int
) -> set[int]:
    """Blocks of keys that lines touch for some queries."""
    found = set(columns)
    for position in mine:
        for group in distances:
            for distance in range(group * block, (group + 1) * block):
                if distance <= position:
                    found.add((position - distance) // block)
    return found


def vertical_slash(
    q: Tensor, k: Tensor, start: int, block: int, vertical: int, slash: int, queries: int
) -> Choice:
    """MInference: `vertical` and `slash` tokens of lines, in whole blocks."""
    choice: Choice = {}
    num_blocks = -(-len(k) // block)
    for head in range(q.shape[1]):
        by_slot, by_distance = line_mass(q, k, start, min(queries, len(q)), head)
        columns = _top_blocks(by_slot, -(-vertical // block), block, num_blocks)
        distances = _top_blocks(by_distance, -(-slash // block), block, num_blocks)
        for row, mine in enumerate(blocks_of(start, len(q), block)):
            choice[head, row] = _touched(mine, columns, distances, block)
    return causal(choice, start, len(q), block)


def _pooled(q: Tensor, k: Tensor, head: int, rows: list[int], start: int, block: int) -> Tensor:
    """Softmax of mean query times mean keys, over the blocks that these queries see."""
    group = q.shape[1] // k.shape[1]
    query = torch.stack([q[p - start, head].double() for p in rows]).mean(0)
    means = [
        k[b : b + block, head // group].double().mean(0) for b in range(0, max(rows) + 1, block)
    ]
    return (torch.stack(means) @ query / math.sqrt(q.shape[2])).softmax(0)


def flexible(
    q: Tensor, k: Tensor, start: int, block: int, gamma: float, tau: float, least: int, most: int
) -> tuple[Choice, list[bool]]:
    """FlexPrefill; also, which heads are query-aware."""
    choice: Choice = {}
    aware = []
    rows, num_blocks = blocks_of(start, len(q), block), -(-len(k) // block)
    count = min(block, len(q))
    newest = list(range(start + len(q) - count, start + len(q)))
    for head in range(q.shape[1]):
        by_slot, by_distance = line_mass(q, k, start, count, head)
        truth = torch.zeros(num_blocks, dtype=torch.float64)
        for slot, part in by_slot.items():
            truth[slot // block] += part / count
        estimate = torch.zeros(num_blocks, dtype=torch.float64)
        pooled = _pooled(q, k, head, newest, start, block)
        estimate[: len(pooled)] = pooled
        middle = (truth + estimate) / 2
        divergence = sum(
            float(p * torch.log(p / m)) for side in (truth, estimate)
            for p, m in zip(side, middle, strict=True) if p > 0
        ) / 2  # fmt: skip
        aware.append(math.sqrt(max(divergence, 0.0)) < tau)
        floor = -(-least // block)
        sizes = []
        for mass in (by_slot, by_distance):
            sofar, lines = 0.0, 0
            for part in sorted(mass.values(), reverse=True):
                sofar += part
                if sofar >= gamma * count:
                    break
                lines += 1
            sizes.append(min(max(lines // block + 1, floor), max(floor, -(-most // block))))
        if aware[-1]:
            sizes = [floor, floor]
        columns = _top_blocks(by_slot, sizes[0], block, num_blocks)
        distances = _top_blocks(by_distance, sizes[1], block, num_blocks)
        for row, mine in enumerate(rows):
            choice[head, row] = _touched(mine, columns, distances, block)
        if aware[-1]:
            pairs = {
                (row, column): part for row, mine in enumerate(rows)
                for column, part in enumerate(_pooled(q, k, head, mine, start, block).tolist())
            }  # fmt: skip
            sofar = 0.0
            for (row, column), part in sorted(pairs.items(), key=lambda e: (-e[1], e[0])):
                if sofar >= gamma * len(rows):
                    break
                choice[head, row].add(column)
                sofar += part
    return causal(choice, start, len(q), block), aware
