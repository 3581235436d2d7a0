"""Linear layers whose weights are filled from one or several checkpoint tensors.

On a CPU `prepare` packs the weight for oneDNN: measured on two AVX-512 cores, a packed fp32 matrix
is read at 23-26 GB/s for 1 to 16 rows, where `F.linear` reads the plain one at 7-12 GB/s, and 1,024
rows run 5-20 % faster. A packed weight keeps its shape and dtype; `to_dense()` gives it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Packing depends on the row count it is told; 8 and more give one layout that was the fastest, or
# within noise of it, for 1 to 1,024 rows. Told 1, it picks another that is slow for more rows.
_PACK_ROWS = 32
_DETERMINISTIC_ROWS = 16


@cache
def _packed_ops(dtype: torch.dtype) -> tuple[Any, Any] | None:
    """oneDNN's (pack, linear) operators if this build and CPU have them for `dtype`."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    ops = torch.ops.mkldnn
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return None
    if dtype == torch.bfloat16 and not ops._is_mkldnn_bf16_supported():
        return None
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    return ops._reorder_linear_weight.default, ops._linear_pointwise.default


def packs(dtype: torch.dtype) -> bool:
    """Whether linear layers of this dtype are packed on this CPU."""
    return _packed_ops(dtype) is not None


class Linear(nn.Module):
    """y = x W^T + b. `weight` [out, in] and `bias` [out] are uninitialised until loaded.

    row_tile: None, or the fixed number of rows of every matrix product (`make_deterministic`).
    """

    bias: nn.Parameter | None
    row_tile: int | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias:
            empty = torch.empty(out_features, dtype=dtype, device=device)
            self.bias = nn.Parameter(empty, requires_grad=False)
        else:
            self.register_parameter("bias", None)
        self._packed_linear: Any = None

    def prepare(self) -> None:
        """Called once after the weights are in place: on a CPU packs `weight`.

        The plain copy is dropped with the last reference to it: a tied embedding keeps its own.
        """
        ops = _packed_ops(self.weight.dtype)
        if ops is None or self.weight.device.type != "cpu" or self._packed_linear is not None:
            return
        pack, self._packed_linear = ops
        packed = pack(self.weight.detach(), _PACK_ROWS)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        if self.row_tile is not None:
            return self._in_tiles(x, self.row_tile)
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        if self._packed_linear is None:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = self._packed_linear(x, self.weight, self.bias, "none", [], "")
        return y

    def _in_tiles(self, x: Tensor, rows: int) -> Tensor:
        """Products of exactly `rows` rows each, zero-padded: a library picks its summation order by
        the shape, so that a fixed shape makes a row's bits independent of its neighbours."""
        num_rows = x.shape[0]
        y = x.new_empty(num_rows, self.out_features)
        for start in range(0, num_rows, rows):
            tile = x[start : start + rows]
            pad = rows - tile.shape[0]
            y[start : start + rows] = self._product(F.pad(tile, (0, 0, 0, pad)))[: rows - pad]
        return y


class MergedLinear(Linear):
    """Several column-parallel projections of one input as one matrix (Q, K, V or gate, up).

    `parts` are the output sizes, all rank-local. Part i of a checkpoint fills the rows `rows(i)`;
    its name there is names[i], beside the module's own. Without names the checkpoint holds the
    merged matrix under the module's name.
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[int],
        bias: bool = False,
        *,
        names: Sequence[str] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(in_features, sum(parts), bias, dtype=dtype, device=device)
        self.parts, self.names = tuple(parts), tuple(names)
        self._starts = (0, *accumulate(self.parts))

    def rows(self, part: int) -> slice:
        """The output rows that part `part` of a checkpoint fills."""
        return slice(self._starts[part], self._starts[part + 1])

    def places(self, owner: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills; `owner` is the module's own full name."""
        prefix, _, _ = owner.rpartition(".")
        parameters = dict(self.named_parameters(recurse=False))
        if not self.names:
            return {f"{owner}.{leaf}": p.data for leaf, p in parameters.items()}
        return {
            f"{prefix}.{name}.{leaf}": p.data[self.rows(part)]
            for part, name in enumerate(self.names)
            for leaf, p in parameters.items()
        }

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """y [T, sum(parts)] -> one view [T, part] per part."""
        return tuple(torch.split(y, list(self.parts), dim=-1))


def make_deterministic(model: nn.Module) -> None:
    """From now on the bits of each row of every matrix product depend on that row alone, not on
    how many other rows are in the call nor on its place. Costs speed: products have 16 rows."""
    for module in model.modules():
        if hasattr(module, "row_tile"):
            module.row_tile = _DETERMINISTIC_ROWS
