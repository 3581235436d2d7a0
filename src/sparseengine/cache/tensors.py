"""The device tensors of one step of one cache group, built when they are first asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseengine.cache.tables import Index, Ints
from sparseengine.core.view import PackedTable

# Table entries of one step that are gathered at once; more are gathered layer by layer, since a
# long prompt beside many short requests would make the padded table of all layers large.
_EAGER_ENTRIES = 1 << 24


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy on the device, without waiting for what the device is doing.

    On the CPU it is the array's own memory when that is contiguous.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def upload_into(target: Tensor, array: NDArray[np.generic]) -> None:
    """The same into a tensor that exists."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if target.device.type == "cuda":
        target.copy_(host.pin_memory(), non_blocking=True)
    else:
        target.copy_(host)


class Tokens:
    """Which chunk each token of a step belongs to; one for all groups, on the device once asked.

    counts int64 [S]: tokens of each chunk.
    """

    def __init__(self, counts: Index, device: torch.device) -> None:
        self.counts, self._device = counts, device
        self.starts: Ints = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.is_decode = bool((counts == 1).all())
        self._placed: tuple[Tensor, Tensor] | None = None
        self._cu_q: Tensor | None = None

    def owners(self) -> tuple[Tensor, Tensor]:
        """int64 [T]: the chunk of each token, and its index in the chunk."""
        if self._placed is None:
            chunk = np.repeat(np.arange(self.counts.size), self.counts)
            offset = np.arange(chunk.size) - self.starts[chunk]
            self._placed = upload(chunk, self._device), upload(offset, self._device)
        return self._placed

    def place(self, cu_q: Tensor) -> None:
        """Use these offsets instead of uploading them."""
        self._cu_q = cu_q

    def cu_q(self) -> Tensor:
        """int32 [S + 1]."""
        if self._cu_q is None:
            self._cu_q = upload(self.starts, self._device)
        return self._cu_q


@dataclass(slots=True, kw_only=True)
class StepTensors:
    """What one step needs of one group; per-layer views are slices of these.

    lens int32 [S, R], this step's tokens included; slots int64 [R, T] flat slot (page * P + offset)
    of each new token; host_lens is `lens` on the host. arena, base, width: the packed tables and
    where each chunk's is (see cache/tables.py); columns: W of the padded table; max_len: the
    longest row, a host fact. is_decode: every chunk has one token.
    """

    lens: Tensor
    slots: Tensor
    host_lens: Ints
    arena: Tensor
    base: Tensor  # int64 [S]
    width: Tensor  # int64 [S]
    columns: int
    max_len: int
    is_decode: bool
    whole: Tensor | None = None  # int32 [S, R, W]
    last: tuple[slice, Tensor] | None = None

    def packed(self, rows: slice) -> PackedTable:
        """The tables of some rows of every chunk where they are."""
        count = rows.stop - rows.start
        return PackedTable(self.arena, self.base, self.width, rows.start, count, self.columns)

    def table(self, rows: slice) -> Tensor:
        """int32 [S, G, W] page ids of some rows of every chunk, padded with ids in range."""
        total = self.lens.shape[1]
        if self.whole is None and self.lens.numel() * self.columns <= _EAGER_ENTRIES:
            self.whole = self.packed(slice(0, total)).dense()
        if self.whole is not None:
            return self.whole[:, rows]
        if self.last is None or self.last[0] != rows:
            self.last = rows, self.packed(rows).dense()
        return self.last[1]


def build_step(
    *,
    lens: Tensor,
    host_lens: Ints,
    arena: Tensor,
    base: Tensor,
    width: Tensor,
    page_size: int,
    columns: int,
    max_len: int,
    tokens: Tokens | None,
) -> StepTensors:
    """Device work of static shapes. tokens: None when every chunk has one token."""
    row = torch.arange(lens.shape[1], device=lens.device)[:, None]
    if tokens is None or tokens.is_decode:
        position = (lens - 1).T  # [R, T]
        start, stride = base, width
    else:
        owner, offset = tokens.owners()
        first = lens - upload(tokens.counts.astype(np.int32), lens.device)[:, None]
        position = (first[owner] + offset[:, None]).T
        start, stride = base[owner], width[owner]
    column, place = divide(position, page_size)
    page = arena[start + row * stride + column]
    return StepTensors(
        lens=lens,
        slots=page.long() * page_size + place,
        host_lens=host_lens,
        arena=arena,
        base=base,
        width=width,
        columns=columns,
        max_len=max_len,
        is_decode=tokens is None or tokens.is_decode,
    )


def divide(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(index // size, index % size), by bits where size is a power of two."""
    if size & (size - 1) == 0:
        return index >> (size.bit_length() - 1), index & (size - 1)
    return index // size, index % size


class StaticStep:
    """Buffers at fixed addresses for the decode steps of a captured graph.

    Rows past a step's own read one token of the trash page: their table is the arena's last entry.
    """

    def __init__(self, max_rows: int, rows: int, device: torch.device) -> None:
        self.lens = torch.ones(max_rows, rows, dtype=torch.int32, device=device)
        self.places = torch.zeros(2, max_rows, dtype=torch.int64, device=device)
        self.base, self.width = self.places

    def load(self, lens: Ints, base: Index, width: Index, bucket: int, trash: int) -> None:
        """lens [S, R], base and width [S] of a step, padded to `bucket` rows."""
        pad = bucket - lens.shape[0]
        whole = np.concatenate([lens, np.ones((pad, lens.shape[1]), np.int32)])
        places = np.stack([np.pad(base, (0, pad), constant_values=trash), np.pad(width, (0, pad))])
        upload_into(self.lens[:bucket], whole)
        upload_into(self.places[:, :bucket], places)
