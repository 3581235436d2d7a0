"""Decode steps as captured CUDA graphs: one launch instead of a thousand.

A step of decodes only is padded to a bucket of requests and replayed. Its inputs lie at fixed
addresses: token ids, positions, row lengths, budgets and where each request's page tables are; all
else (slot mapping, selection, attention, the largest logit) is device work inside the graph. Padded
rows read and write the trash page. What a graph depends on beside shapes is its key:

    requests   rounded up to a bucket
    row length rounded up to a bucket, since launch grids are sized by it
    budget     of a selecting method that has something to select, else None
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparseengine.cache.manager import PagedCache
from sparseengine.core.attention import AttentionBackend
from sparseengine.core.context import StepContext
from sparseengine.core.method import SparseController, SparseMethod
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.runnable import Model
from sparseengine.core.specs import LayerKind, ModelSpec
from sparseengine.errors import nearest  # noqa: F401

_FIRST_LEN = 4096
_LEN_GROWTH = 8  # lengths are bucketed by powers of this: few graphs, and empty splits are cheap


class Key(NamedTuple):
    """What tells one captured graph from another."""

    rows: int
    max_len: int
    method: str
    budget: int | None


class Best(NamedTuple):
    """Greedy tokens int64 [S] and their logits fp32 [S], on the device."""

    tokens: Tensor
    logits: Tensor


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    best: Best


def row_buckets(limit: int) -> list[int]:
    """Numbers of requests that are captured: steps of at most an eighth or so."""
    sizes = [1, 2, 4, 8, *range(16, 129, 16), *range(160, 513, 32), *range(576, 4097, 64)]
    return [n for n in sizes if n < limit] + [limit]
