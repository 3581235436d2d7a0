"""The small operations between matrix products as one compiled loop each, for float32 on a CPU.

A decode step of a small model runs hundreds of them on a few rows. Right after a matrix product has
swept the caches, each torch operator costs 5 to 15 us, mostly to fetch its own code; one of these
costs 3. Rows are computed one by one: a row's bits do not depend on the others.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_THREADED_ELEMENTS = 1 << 15


@cache
def kernels() -> ModuleType | None:
    """The compiled kernels, or None where numba is not installed."""
    if importlib.util.find_spec("numba") is None:
        return None
    from sparseengine.ops import cpu_kernels

    return cpu_kernels
