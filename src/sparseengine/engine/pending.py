"""A step that has been launched and not yet booked, and how the next one gets its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sparseengine.cache.tensors import upload
from sparseengine.core.plan import UNKNOWN, Request, StepPlan
from sparseengine.engine.sampling import Drawn


@dataclass(slots=True, kw_only=True)
class Pending:
    """`requests` sample in this step, one row of `drawn` each; None when nothing is sampled."""

    plan: StepPlan
    requests: Sequence[Request]
    drawn: Drawn | None
    rows: dict[int, int] = field(init=False)  # request id -> row

    def __post_init__(self) -> None:
        self.rows = {r.id: i for i, r in enumerate(self.requests)}


def fill_unknown(
    ids: Tensor, host: NDArray[np.int64], plan: StepPlan, before: Pending | None
) -> None:
    """Put the tokens that `before` draws where `host`, the ids [T] of a plan, says UNKNOWN.

    Device work alone: the host need not have seen them. Unknown tokens are decoded ones, whose
    chunks come first and have one token each.
    """
    at = np.flatnonzero(host == UNKNOWN)
    if at.size == 0:
        return
    drawn = None if before is None else before.drawn
    assert before is not None, "a plan with unknown tokens follows the step that samples them"
    assert drawn is not None, "that step samples nothing"
    rows = np.array([before.rows[plan.chunks[i].request.id] for i in at.tolist()], np.int64)
    if np.array_equal(at, rows) and at.size == drawn.tokens.shape[0]:
        ids[: at.size].copy_(drawn.tokens)
    else:
        ids[upload(at, ids.device)] = drawn.tokens[upload(rows, ids.device)]
