"""GGUF files: header, config and tensors under Hugging Face names.

The header is parsed here and not by gguf-py's reader, which takes seconds for the vocabulary; the
block formats are decoded by gguf-py. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from sparseengine.errors import ConfigError
from sparseengine.weights.gguf_families import (
    GgufFields,
    expert_names,
    family_config,
    family_of,
    hf_name,
)

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_SHORT_ARRAY = 64  # longer arrays (the vocabulary) are skipped; their length is kept

# gguf-py decodes two more: IQ1_M, whose scattered scale no test writes, and NVFP4, which needs a
# second tensor of scales.
FORMATS = frozenset(
    {
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
        *("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    }
)
_ROPE_FACTORS = "rope_freqs.weight"
_EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class Skipped:
    """Stands for a long array whose values were not kept."""

    length: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor directory. `shape` is in torch's order, `offset` within the file."""

    name: str
    shape: tuple[int, ...]
    format: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All of a GGUF file but the tensors' bytes."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def family(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def hf_config(self) -> dict[str, Any]:
        """The model's config under Hugging Face field names.

        Raises ConfigError for an architecture without a mapping and for a missing field.
        """
        family_of(self.path, self.family)
        entries = {tensor.name: tensor for tensor in self.tensors}
        if _EMBEDDING not in entries:
            raise ConfigError(f"{self.path}: GGUF tensor {_EMBEDDING} is missing")
        factors = entries.get(_ROPE_FACTORS)
        fields = GgufFields(
            path=self.path,
            family=self.family,
            metadata=self.metadata,
            tensor_names=entries.keys(),
            rope_factors=None if factors is None else _read_tensor(self, factors).tolist(),
        )
        return family_config(fields, vocab_size=entries[_EMBEDDING].shape[0])


class _Cursor:
    """Reads little-endian values; running past the end means that the file is truncated."""

    def __init__(self, data: mmap.mmap, path: Path, longest: float = _SHORT_ARRAY) -> None:
        self.data, self.path, self.at, self.longest = data, path, 0, longest

    def scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        if self.at + size > len(self.data):
            raise ConfigError(
                f"{self.path}: truncated GGUF file: the header ends past byte {len(self.data):,}; "
                "download the file again"
            )
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += size
        return value

    def string(self) -> str:
        start, end = self.at + 8, self.at + 8 + self.scalar("<Q")
        if end > len(self.data):
            raise ConfigError(
                f"{self.path}: truncated or damaged GGUF file: a string in the header claims to "
                f"end at byte {end:,} of {len(self.data):,}; download the file again"
            )
        self.at = end
        return self.data[start:end].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, length = self.scalar("<I"), self.scalar("<Q")
            if length <= self.longest:
                return [self.value(item) for _ in range(length)]
            self._skip(item, length)
            return Skipped(length)
        if kind not in _SCALARS:
            raise ConfigError(f"{self.path}: damaged GGUF header: unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def _skip(self, item: int, length: int) -> None:
        if item in _SCALARS:
            self.at += struct.calcsize(_SCALARS[item]) * length
            return
        for _ in range(length):
            self.value(item)


def read_header(path: Path) -> GgufHeader:
    """Parse a GGUF file's header. Raises ConfigError for a truncated, damaged or other file."""
    with _mapped(path) as data:
        cursor = _Cursor(data, path)
        num_tensors, metadata = _metadata(cursor)
        entries = [_entry(cursor) for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        base = -(-cursor.at // alignment) * alignment
        tensors = tuple(_directory(path, base, len(data), entries))
    return GgufHeader(path, metadata, tensors)


def read_metadata(path: Path) -> dict[str, Any]:
    """All fields of a GGUF file, the vocabulary's long arrays included."""
    with _mapped(path) as data:
        return _metadata(_Cursor(data, path, longest=float("inf")))[1]


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    if path.stat().st_size < 24:
        raise ConfigError(f"{path}: truncated GGUF file of {path.stat().st_size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ConfigError(f"{path} is not a GGUF file: it starts with {bytes(data[:4])!r}")
        yield data


def _metadata(cursor: _Cursor) -> tuple[int, dict[str, Any]]:
    """(number of tensors, fields); leaves the cursor at the tensor directory."""
    cursor.at = 4
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise ConfigError(f"{cursor.path}: GGUF version {version} is not supported (2 and 3 are)")
    num_tensors, num_fields = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    return num_tensors, metadata


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dims = cursor.string(), cursor.scalar("<I")
    dims = tuple(cursor.scalar("<Q") for _ in range(num_dims))
    return name, dims[::-1], cursor.scalar("<I"), cursor.scalar("<Q")


def _directory(
    path: Path, base: int, file_bytes: int, entries: list[tuple[str, tuple[int, ...], int, int]]
) -> Iterator[GgufTensor]:
    """The tensor directory, each entry checked against the file's size."""
    known = {int(kind): kind for kind in GGMLQuantizationType}
    for name, shape, kind, offset in entries:
        found = known[kind].name if kind in known else f"number {kind}"
        if found not in FORMATS:
            raise ConfigError(
                f"{path}: tensor {name} has the GGUF format {found}, which is not supported "
                f"({', '.join(sorted(FORMATS))} are); convert the file to one of these"
            )
        block, block_bytes = GGML_QUANT_SIZES[known[kind]]
        num_bytes = prod(shape) // block * block_bytes
        end = base + offset + num_bytes
        if end > file_bytes:
            raise ConfigError(
                f"{path}: truncated GGUF file: tensor {name} ends at byte {end:,}, the file has "
                f"{file_bytes:,}; download the file again"
            )
        yield GgufTensor(name, shape, found, base + offset, num_bytes)


def read_tensors(header: GgufHeader) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor), one at a time; block formats are decoded to float32.

    What llama.cpp's converter did is undone: the order of the rows of Q and K, the 1 that norm
    weights are shifted by, the stacking of experts (each is decoded and yielded alone).
    """
    family = family_of(header.path, header.family)
    heads = header.metadata.get(f"{header.family}.attention.head_count", 0)
    kv_heads = header.metadata.get(f"{header.family}.attention.head_count_kv", heads)
    for entry in header.tensors:
        if entry.name == _ROPE_FACTORS:
            continue
        names = expert_names(entry.name)
        if names is not None:
            for expert in range(entry.shape[0]):
                yield names(expert), _read_tensor(header, _slice(entry, expert))
            continue
        tensor = _read_tensor(header, entry)
        if family.permuted and ".attn_q." in entry.name:
            tensor = _half_split_rows(tensor, heads)
        elif family.permuted and ".attn_k." in entry.name:
            tensor = _half_split_rows(tensor, kv_heads)
        elif family.shifted_norms and entry.name.endswith("norm.weight"):
            tensor = tensor.float() - 1.0
        yield hf_name(entry.name, family), tensor


def _slice(entry: GgufTensor, index: int) -> GgufTensor:
    """One entry of a stacked tensor's first axis."""
    num_bytes = entry.num_bytes // entry.shape[0]
    offset = entry.offset + index * num_bytes
    return replace(entry, shape=entry.shape[1:], offset=offset, num_bytes=num_bytes)


def _half_split_rows(rows: Tensor, num_heads: int) -> Tensor:
    """Interleaved (x0 y0 x1 y1 ...) rows of each head to half-split (x0 x1 ... y0 y1 ...)."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [H, D / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)


def _read_tensor(header: GgufHeader, entry: GgufTensor) -> Tensor:
    raw = np.fromfile(header.path, dtype=np.uint8, count=entry.num_bytes, offset=entry.offset)
    if raw.size < entry.num_bytes:
        raise ConfigError(f"{header.path}: tensor {entry.name} could not be read in full")
    kind = GGMLQuantizationType[entry.format]
    if kind is GGMLQuantizationType.BF16:
        return torch.from_numpy(raw).view(torch.bfloat16).reshape(entry.shape)
    if kind is GGMLQuantizationType.F16:
        return torch.from_numpy(raw).view(torch.float16).reshape(entry.shape)
    rows = raw.reshape(*entry.shape[:-1], -1)
    return torch.from_numpy(dequantize(rows, kind)).reshape(entry.shape)
