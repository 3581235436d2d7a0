"""What each method may keep or read, in a few lines of float64: independent of the product.

Every oracle takes q [L, Hq, D] and k [L, Hkv, D] of the tokens run so far and returns one ascending
list of positions per KV head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Rows = list[list[int]]


def best(scores: Sequence[float], count: int) -> list[int]:
    """Larger score first, then smaller index; ascending."""
    return sorted(sorted(range(len(scores)), key=lambda j: (-scores[j], j))[: max(count, 0)])


def forced(length: int, budget: int, sink: int, recent: int) -> set[int]:
    """Sinks (at most half of the budget) and the newest tokens."""
    sink = min(sink, budget // 2)
    recent = min(recent, budget - sink)
    return {*range(sink), *range(length - recent, length)}


def evict(scores: Sequence[Sequence[float]], budget: int, sink: int, recent: int) -> Rows:
    """Forced tokens, then the best of the rest up to the budget, per head."""
    rows = []
    for row in scores:
        if len(row) <= budget:
            rows.append(list(range(len(row))))
            continue
        must = forced(len(row), budget, sink, recent)
        rows.append(best([math.inf if j in must else s for j, s in enumerate(row)], budget))
    return rows


def knorm_scores(q: Tensor, k: Tensor) -> list[list[float]]:
    return [[-math.sqrt(sum(x * x for x in key)) for key in k[:, h].tolist()] for h in _heads(k)]


def keydiff_scores(q: Tensor, k: Tensor) -> list[list[float]]:
    out = []
    for h in _heads(k):
        unit = [[x / math.hypot(*key) for x in key] for key in k[:, h].double().tolist()]
        mean = [sum(c) for c in zip(*unit, strict=True)]
        out.append(
            [-sum(a * b for a, b in zip(u, mean, strict=True)) / math.hypot(*mean) for u in unit]
        )
    return out


def expected_attention_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    sink: int,
    epsilon: float = 0.0,
    first: int | None = None,
) -> list[list[float]]:
    """Closed form of E[exp(q.k)] for Gaussian queries; of a model that does not rotate.

    first: of the keys that share the attention; the sinks' are left out by default.
    """
    length, group, out = len(k), q.shape[1] // k.shape[1], []
    first = sink if first is None else first
    for h in _heads(k):
        score = [0.0] * length
        for g in range(h * group, h * group + group):
            seen = q[sink:, g].double()
            mean = seen.sum(0) / max(len(seen), 1)
            cov = sum((torch.outer(x, x) for x in seen), torch.zeros_like(torch.outer(mean, mean)))
            cov = cov / max(len(seen), 1) - torch.outer(mean, mean)
            z = [
                (key @ mean / k.shape[2] ** 0.5 + key @ cov @ key / (2 * k.shape[2])).item()
                for key in k[first:, h].double()
            ]
            top = max(z, default=0.0)
            total = sum(math.exp(x - top) for x in z)
            for j, x in enumerate(z):
                score[first + j] += (math.exp(x - top) / total + epsilon) / group
        norms = [1.0] * length if v is None else [math.hypot(*x) for x in v[:, h].tolist()]
        out.append([a * b for a, b in zip(score, norms, strict=True)])
    return out


def snapkv_scores(
    q: Tensor, k: Tensor, window: int, kernel: int, pooling: str = "max"
) -> list[list[float]]:
    """Window queries, softmax over all keys, mean, pooling before the window, group mean."""
    length, group = len(k), q.shape[1] // k.shape[1]
    window = min(window, length)
    out = []
    for h in _heads(k):
        per_query_head = []
        for g in range(h * group, h * group + group):
            mean = [0.0] * (length - window)
            for i in range(length - window, length):
                logits = (k[: i + 1, h].double() @ q[i, g].double()) / k.shape[2] ** 0.5
                for j, p in enumerate(logits.softmax(0).tolist()[: length - window]):
                    mean[j] += p / window
            half = kernel // 2
            near = [mean[max(0, j - half) : j + half + 1] for j in range(len(mean))]
            per_query_head.append([max(n) if pooling == "max" else sum(n) / kernel for n in near])
        out.append([sum(c) / group for c in zip(*per_query_head, strict=True)] + [0.0] * window)
    return out


def snapkv_blocks(
    q: Tensor, k: Tensor, budget: int, block: int, window: int, kernel: int, sink: int
) -> Rows:
    """Block by block: its own last queries choose among its tokens; earlier survivors are safe."""
    length, group, out = len(k), q.shape[1] // k.shape[1], []
    for h in _heads(k):
        row: list[int] = []
        for first in range(0, length, block):
            stop = min(first + block, length)
            row += range(first, stop)
            share = max(1, budget * stop // length) if length > budget else budget
            if len(row) <= share:
                continue
            mean = [0.0] * len(row)
            for g in range(h * group, h * group + group):
                paid = [0.0] * len(row)
                for t in range(max(0, stop - window), stop):
                    seen = [j for j in row if j <= t]
                    logits = k[seen, h].double() @ q[t, g].double() / k.shape[2] ** 0.5
                    for i, p in enumerate(logits.softmax(0).tolist()):
                        if first <= seen[i] and i < len(row) - window:
                            paid[i] += p / min(window, stop)
                half = kernel // 2
                for i, j in enumerate(row):
                    if j >= first and i < len(row) - window:
                        mean[i] += max(paid[max(0, i - half) : i + half + 1]) / group
            score = [1e9 if j < first else x for j, x in zip(row, mean, strict=True)]
            (chosen,) = evict([score], share, sink, window)
            row = [row[i] for i in chosen]
        out.append(row)
    return out


def rkv_scores(
    q: Tensor, k: Tensor, keys: Sequence[int], window: int, kernel: int, weight: float
) -> list[float]:
    """One KV head: the last queries of q [T, g, D], the row `keys` of k [T, D], whole matrices."""
    row, before = k[list(keys)].double(), len(keys) - window
    if before <= 0:
        return [0.0] * len(keys)
    last = q[-window:].double()
    logits = torch.einsum("wgd,ld->gwl", last, row) / k.shape[1] ** 0.5
    mean = logits.amax(0)[:, :before].softmax(-1).mean(0).tolist()
    half = kernel // 2
    important = [max(mean[max(0, j - half) : j + half + 1]) for j in range(before)]
    unit = row / row.norm(dim=1, keepdim=True)
    cosine = unit @ unit.T
    cosine.fill_diagonal_(0)
    for line in cosine:
        line[max((j for j in range(len(keys)) if line[j] > 0.5), default=0)] = 0
    redundant = cosine.mean(0).softmax(0).tolist()
    pairs = zip(important, redundant, strict=False)
    return [weight * i - (1 - weight) * r for i, r in pairs] + [0.0] * window


def rkv(
    q: Tensor,
    k: Tensor,
    budget: int,
    prompt_len: int,
    interval: int = 128,
    window: int = 8,
    kernel: int = 7,
    weight: float = 0.07,
) -> Rows:
    """Cut when the prompt ends and whenever a row has grown to budget + interval."""
    group, out = q.shape[1] // k.shape[1], []
    for h in _heads(k):
        heads = slice(h * group, (h + 1) * group)
        row = list(range(prompt_len))
        for t in range(prompt_len, len(k) + 1):  # t tokens were run
            if t > prompt_len:
                row.append(t - 1)
            if t == prompt_len or len(row) >= budget + interval:
                score = rkv_scores(q[:t, heads], k[:, h], row, window, kernel, weight)
                (chosen,) = evict([score], budget, 0, window)
                row = [row[j] for j in chosen]
        out.append(row)
    return out


def h2o(
    q: Tensor,
    k: Tensor,
    budget: int,
    prompt_len: int,
    interval: int = 64,
    block: int = 0,
    average: bool = False,
) -> Rows:
    """Query by query: add its attention to the sums of what is left; cut when the prompt (or a
    block of it) ends and when a row has grown by `interval`; half of the budget is recent."""
    group, out = q.shape[1] // k.shape[1], []
    for h in _heads(k):
        row: list[int] = []
        mass, seen = [0.0] * len(k), [0] * len(k)
        for t in range(len(k)):
            row.append(t)
            for g in range(h * group, h * group + group):
                logits = (k[row, h].double() @ q[t, g].double()) / k.shape[2] ** 0.5
                for j, p in zip(row, logits.softmax(0).tolist(), strict=True):
                    mass[j] += p
            for j in row:
                seen[j] += 1
            ends = t == prompt_len - 1 or (block > 0 and t < prompt_len and (t + 1) % block == 0)
            full = t >= prompt_len and len(row) >= budget + interval
            if ends or full:
                score = [mass[j] / (seen[j] if average else 1) for j in row]
                (chosen,) = evict([score], budget, 0, (budget + 1) // 2)
                row = [row[j] for j in chosen]
        out.append(row)
    return out


def tova_scores(q: Tensor, k: Tensor) -> list[list[float]]:
    """The newest query's softmax over all keys, mean over all query heads, the same in each row."""
    group, mean = q.shape[1] // k.shape[1], [0.0] * len(k)
    for g in range(q.shape[1]):
        logits = (k[:, g // group].double() @ q[-1, g].double()) / k.shape[2] ** 0.5
        for j, p in enumerate(logits.softmax(0).tolist()):
            mean[j] += p / q.shape[1]
    return [mean for _ in _heads(k)]


def kvzip_scores(
    q: Tensor,
    k: Tensor,
    chunk: int,
    lead: int,
    sink: int,
    prefix: Sequence[int] = (),
    mean: bool = False,
) -> list[list[float]]:
    """Run the prompt again, chunk by chunk; the largest attention that anyone pays to a token.

    mean: of all that is asked, in place of the largest.
    """
    group, out = q.shape[1] // k.shape[1], []
    for h in _heads(k):
        score, asks = [0.0] * len(k), 0
        for first in range(0, len(k), chunk):
            asked = list(range(first, min(first + chunk, len(k))))
            run = [*prefix, *range(max(0, first - lead), first), *asked]
            seen = [*range(min(sink, first)), *asked]
            for i, t in enumerate(run):
                keys = k[[*seen, *run[: i + 1]], h].double()
                for g in range(h * group, h * group + group):
                    paid = (keys @ q[t, g].double() / k.shape[2] ** 0.5).softmax(0).tolist()
                    asks += 1
                    for j, p in zip(seen, paid, strict=False):
                        if j in asked:
                            score[j] = score[j] + p if mean else max(score[j], p)
        out.append([s / asks for s in score] if mean else score)
    return out


def attention(q: Tensor, k: Tensor, last: int) -> Tensor:
    """What the last queries pay to each key, the mean over them: float64 [Hq, L]."""
    length, group = len(k), q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q[-last:].double(), keys) / k.shape[2] ** 0.5
    later = torch.arange(length) > torch.arange(length - len(q[-last:]), length)[:, None]
    return logits.masked_fill(later, -math.inf).softmax(-1).mean(1)


def least_by_error(
    rows: Callable[[int], Rows], masses: Sequence[Sequence[float]], error: float, page: int | None
) -> Rows:
    """Budget by budget: the first whose cut leaves out no more of the masses, row by row in whole
    pages, or without a page in the mean of rows that share it."""
    length = len(masses[0])

    def lost(kept: Rows) -> list[float]:
        both = zip(masses, kept, strict=True)
        return [sum(m for j, m in enumerate(row) if j not in set(some)) for row, some in both]

    found: list[list[int] | None] = [None] * len(masses)
    for budget in range(page or 1, length + (page or 1), page or 1):
        kept = rows(min(budget, length))
        parts = lost(kept) if page else [sum(lost(kept)) / len(kept)] * len(kept)
        for h, part in enumerate(parts):
            if found[h] is None and (part <= error or budget >= length):
                found[h] = kept[h]
    return [row or [] for row in found]


def adakv(
    scores: Sequence[Sequence[float]], budget: int, alpha: float, sink: int, recent: int
) -> Rows:
    """kvpress' form: each head's best alpha * budget are safe, one threshold over the layer."""
    length = len(scores[0])
    must = forced(length, budget, sink, recent)
    if length <= budget:
        return [list(range(length)) for _ in scores]
    ranked = [[math.inf if j in must else s for j, s in enumerate(row)] for row in scores]
    for row in ranked:
        for j in best(row, int(budget * alpha)):
            row[j] = math.inf
    flat = [ranked[h][j] for j in range(length) for h in range(len(scores))]
    chosen = best(flat, len(scores) * budget)
    return [[i // len(scores) for i in chosen if i % len(scores) == h] for h in range(len(scores))]


def streaming(length: int, budget: int, sink: int, page: int, aligned: bool) -> list[int]:
    """Sinks and the newest tokens; whole pages are dropped when there is room for it."""
    if length <= budget:
        return list(range(length))
    first = -(-sink // page) * page
    if not aligned or budget < first + page:
        must = forced(length, budget, sink, length)
        return sorted(must)
    keep = max(n for n in range(budget + 1) if n % page == length % page)
    return [*range(first), *range(length - keep + first, length)]


def duo(
    length: int, budget: int, sink: int, page: int, aligned: bool, retrieval: Sequence[bool]
) -> Rows:
    """Heads that retrieve keep everything, the others sinks and recent tokens."""
    few = streaming(length, budget, sink, page, aligned)
    return [list(range(length)) if is_kept else few for is_kept in retrieval]


def quest(
    q: Tensor, k: Tensor, budget: int, page: int, sink_pages: int = 1, min_pages: int = 3
) -> Rows:
    """Pages with the largest bound of q.k for the newest query; open and sink pages are forced."""
    length, group = len(k), q.shape[1] // k.shape[1]
    if length <= budget:
        return [list(range(length)) for _ in _heads(k)]
    last, count = (length - 1) // page, max(min_pages, budget // page)
    rows = []
    for h in _heads(k):
        bounds = []
        for p in range(last):
            low = k[p * page : (p + 1) * page, h].double().amin(0).tolist()
            high = k[p * page : (p + 1) * page, h].double().amax(0).tolist()
            queries = q[-1, h * group : (h + 1) * group].double().tolist()
            bounds.append(
                max(
                    sum(max(a * b, a * c) for a, b, c in zip(qq, low, high, strict=True))
                    for qq in queries
                )
            )
        bounds = [
            math.inf if p < min(sink_pages, min_pages - 1) else b for p, b in enumerate(bounds)
        ]
        pages = best([*bounds, math.inf], count)
        rows.append([j for p in pages for j in range(p * page, min(p * page + page, length))])
    return rows


def digest_score(query: list[float], keys: Tensor, digest: str, few: int) -> float:
    """How much a page's digest promises one query; keys [P, D] in float64."""
    mean = keys.mean(0)
    if digest == "representatives":
        unit = keys / keys.norm(dim=1, keepdim=True)
        likeness = (unit @ unit.mean(0)).tolist()
        mean = keys[best([-x for x in likeness], few)].mean(0)
    spread = (keys - mean).abs().mean(0).tolist() if digest == "cuboid" else [0.0] * len(query)
    box = zip(query, mean.tolist(), spread, strict=True)
    return sum(max(x * (m - s), x * (m + s)) for x, m, s in box)


def infllm(
    q: Tensor, k: Tensor, budget: int, page: int, digest: str, few: int, least: tuple[int, int, int]
) -> Rows:
    """Open page and sinks, then recent pages, newest first, then those of the best digests."""
    length, group, (sinks, recent, pages) = len(k), q.shape[1] // k.shape[1], least
    if length <= budget:
        return [list(range(length)) for _ in _heads(k)]
    last, rows = (length - 1) // page, []
    for h in _heads(k):
        queries = q[-1, h * group : (h + 1) * group].double().tolist()
        rank: list[tuple[int, float]] = []
        for p in range(last + 1):
            keys = k[p * page : (p + 1) * page, h].double()
            if p == last or p < min(sinks, pages - 1):
                rank.append((2, 0.0))
            elif p > last - recent:
                rank.append((1, p))
            else:
                rank.append((0, max(digest_score(x, keys, digest, few) for x in queries)))
        first = sorted(range(last + 1), key=lambda p: (-rank[p][0], -rank[p][1], p))
        chosen = sorted(first[: max(pages, budget // page)])
        rows.append([j for p in chosen for j in range(p * page, min(p * page + page, length))])
    return rows


def double_sparsity(
    q: Tensor, k: Tensor, budget: int, page: int, channels: list[int], sink: int
) -> Rows:
    """Softmax of q.k over few channels of the whole pages' keys, the largest of a query group.

    Sinks and the newest token are forced; the other tokens of the open page come next.
    """
    length, group = len(k), q.shape[1] // k.shape[1]
    if length <= budget:
        return [list(range(length)) for _ in _heads(k)]
    opened = (length - 1) // page * page
    rows = []
    for h in _heads(k):
        keys = k[:opened, h][:, channels].double()
        queries = q[-1, h * group : (h + 1) * group][:, channels].double()
        chance = (keys @ queries.T / k.shape[2] ** 0.5).softmax(0)  # [opened, g]
        scores = [*chance.amax(1).tolist(), *range(2, 2 + length - opened)]
        for j in {*range(min(sink, budget // 2)), length - 1}:
            scores[j] = math.inf
        rows.append(best(scores, budget))
    return rows


def omnikv(q: Tensor, k: Tensor, budget: int, sink: int, recent: int) -> Rows:
    """One list for all heads: the largest logit of any; sinks and recent tokens are forced."""
    length, group = len(k), q.shape[1] // k.shape[1]
    if length <= budget:
        return [list(range(length)) for _ in _heads(k)]
    keys = k.double().repeat_interleave(group, 1)  # [L, Hq, D]
    scores = (keys * q[-1].double()).sum(-1).amax(1).tolist()
    must = {*range(min(sink, budget // 4)), *range(length - min(recent, budget // 2), length)}
    for j in {*must, length - 1}:
        scores[j] = math.inf
    return [best(scores, budget)] * k.shape[1]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Dense attention of the newest query under a boolean mask per KV head: [Hq, Dv]."""
    group, out = q.shape[1] // k.shape[1], []
    for g in range(q.shape[1]):
        h = g // group
        mask = torch.zeros(len(k), dtype=torch.bool)
        mask[rows[h]] = True
        logits = (k[:, h] @ q[-1, g]) / k.shape[2] ** 0.5
        out.append(logits.masked_fill(~mask, -math.inf).softmax(0) @ v[:, h])
    return torch.stack(out)


def turned(x: Tensor, distance: float, inv_freq: Sequence[float]) -> Tensor:
    """Keys or queries [..., D] after a rotation by `distance` positions, pair by pair."""
    out, half = x.clone(), len(inv_freq)
    for i, freq in enumerate(inv_freq):
        cos, sin = math.cos(distance * freq), math.sin(distance * freq)
        a, b = x[..., i], x[..., half + i]
        out[..., i], out[..., half + i] = a * cos - b * sin, b * cos + a * sin
    return out


def in_cache(k: Tensor, rows: Rows, inv_freq: Sequence[float]) -> Tensor:
    """Keys as if each head's row ended at the newest position without gaps: [L, Hkv, D]."""
    moved = k.clone()
    for h, row in enumerate(rows):
        for slot, position in enumerate(row):
            wanted = len(k) - len(row) + slot
            moved[position, h] = turned(k[position, h], wanted - position, inv_freq)
    return moved


def blockwise(
    score: Callable[[Tensor, Tensor], list[list[float]]],
    q: Tensor,
    k: Tensor,
    block: int,
    choose: Callable[[list[list[float]]], Rows],
) -> Rows:
    """Evict after each block, scoring survivors and block together."""
    kept: Rows = [[] for _ in _heads(k)]
    for lo in range(0, len(k), block):
        for h in _heads(k):
            rows = [*kept[h], *range(lo, min(lo + block, len(k)))]
            chosen = choose(score(q[rows], k[rows, h : h + 1]))[0]
            kept[h] = [rows[j] for j in chosen]
    return kept


def _heads(k: Tensor) -> range:
    return range(k.shape[1])
