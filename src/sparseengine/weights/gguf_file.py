"""GGUF files: header, config and tensors under Hugging Face names.

The header is parsed here and not by gguf-py's reader, which takes seconds for the vocabulary; the
block formats are decoded by gguf-py. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from sparseengine.errors import ConfigError, nearest

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_SHORT_ARRAY = 64  # longer arrays (the vocabulary) are skipped; their length is kept

FORMATS = frozenset({"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"})

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
_ROPE_FACTORS = "rope_freqs.weight"


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
        if self.family not in _FAMILIES:
            raise ConfigError(
                f"{self.path}: GGUF architecture {self.family!r} is not supported; "
                f"{nearest(self.family, _FAMILIES)}"
            )
        model_type, architecture = _FAMILIES[self.family]
        names = {t.name for t in self.tensors}
        hidden, heads = self._field("embedding_length"), self._field("attention.head_count")
        rope_dim = self._field("rope.dimension_count", hidden // heads)
        config = {
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_size": hidden,
            "intermediate_size": self._field("feed_forward_length"),
            "num_hidden_layers": self._field("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._field("attention.head_count_kv", heads),
            "head_dim": self._field("attention.key_length", rope_dim),
            "max_position_embeddings": self._field("context_length"),
            "rms_norm_eps": self._field("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._field("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(names),
            "vocab_size": self._vocab_size(),
            "attention_bias": any(n.endswith("attn_q.bias") for n in names),
            "mlp_bias": any(n.endswith("ffn_up.bias") for n in names),
            "tie_word_embeddings": "output.weight" not in names,
        }
        for key in ("bos", "eos", "padding", "eot"):
            value = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
            if value is not None:
                config[f"{'pad' if key == 'padding' else key}_token_id"] = value
        if "eot_token_id" in config and "eos_token_id" in config:
            config["eos_token_id"] = sorted({config["eos_token_id"], config.pop("eot_token_id")})
        return config

    def _field(self, name: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.family}.{name}", default)
        if value is None:
            raise ConfigError(f"{self.path}: GGUF field {self.family}.{name} is missing")
        return value

    def _vocab_size(self) -> int:
        for tensor in self.tensors:
            if tensor.name == "token_embd.weight":
                return tensor.shape[0]
        raise ConfigError(f"{self.path}: GGUF tensor token_embd.weight is missing")

    def _rope_scaling(self, names: set[str]) -> dict[str, Any] | None:
        if _ROPE_FACTORS in names:
            # llama.cpp stores Llama 3 scaling as one divisor per frequency instead of its formula.
            (entry,) = [t for t in self.tensors if t.name == _ROPE_FACTORS]
            factors = _read_tensor(self, entry).tolist()
            return {"rope_type": "factors", "factors": factors}
        kind = self.metadata.get(f"{self.family}.rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": self._field("rope.scaling.factor")}
        original = self.metadata.get(f"{self.family}.rope.scaling.original_context_length")
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        return scaling


class _Cursor:
    """Reads little-endian values; running past the end means that the file is truncated."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

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
            if length <= _SHORT_ARRAY:
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
    if path.stat().st_size < 24:
        raise ConfigError(f"{path}: truncated GGUF file of {path.stat().st_size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ConfigError(f"{path} is not a GGUF file: it starts with {bytes(data[:4])!r}")
        cursor = _Cursor(data, path)
        cursor.at = 4
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise ConfigError(f"{path}: GGUF version {version} is not supported (2 and 3 are)")
        num_tensors, num_fields = cursor.scalar("<Q"), cursor.scalar("<Q")
        metadata = {}
        for _ in range(num_fields):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("<I"))
        entries = [_entry(cursor) for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        base = -(-cursor.at // alignment) * alignment
        tensors = tuple(_directory(path, base, len(data), entries))
    return GgufHeader(path, metadata, tensors)


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


def hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; an unknown one keeps its name and fails at loading."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{parts[3]}"
    return name


def read_tensors(header: GgufHeader) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor), one at a time; block formats are decoded to float32.

    Llama files store the rows of Q and K in llama.cpp's interleaved RoPE order; it is undone.
    """
    heads = header.metadata.get(f"{header.family}.attention.head_count", 0)
    kv_heads = header.metadata.get(f"{header.family}.attention.head_count_kv", heads)
    for entry in header.tensors:
        if entry.name == _ROPE_FACTORS:
            continue
        tensor = _read_tensor(header, entry)
        if header.family == "llama" and ".attn_q." in entry.name:
            tensor = _half_split_rows(tensor, heads)
        elif header.family == "llama" and ".attn_k." in entry.name:
            tensor = _half_split_rows(tensor, kv_heads)
        yield hf_name(entry.name), tensor


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
