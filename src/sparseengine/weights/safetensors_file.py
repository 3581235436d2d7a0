"""Safetensors checkpoints: one file or indexed shards, streamed tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparseengine.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def find_shards(folder: Path) -> tuple[Path, ...]:
    """The files of a checkpoint folder, in name order.

    Raises ConfigError when there are none, or when the index lists a file that is missing.
    """
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    if (folder / INDEX).is_file():
        return _indexed(folder)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return (files[0],)
    if files:
        names = ", ".join(f.name for f in files)
        raise ConfigError(
            f"model folder {folder} holds several safetensors files ({names}) and no {INDEX}; "
            "which of them belong together is unknown"
        )
    others = sorted(p.name for pattern in ("*.bin", "*.pth", "*.pt") for p in folder.glob(pattern))
    hint = f"; {', '.join(others)} would have to be converted to safetensors" if others else ""
    raise ConfigError(f"model folder {folder} holds no weights ({SINGLE} or {INDEX}){hint}")


def _indexed(folder: Path) -> tuple[Path, ...]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{folder / INDEX} has no weight_map")
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"model folder {folder} misses {len(missing)} of {len(shards)} weight files that "
            f"{INDEX} lists: {', '.join(missing)}; download the model again"
        )
    return tuple(folder / name for name in shards)


def read_tensors(shards: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each file in turn; a tensor is read from disk when it is yielded.

    Raises ConfigError for a file that is truncated or damaged and for a tensor in two of them.
    """
    found: dict[str, Path] = {}
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    if name in found:
                        raise ConfigError(
                            f"model folder {shard.parent} holds the tensor {name} twice: in "
                            f"{found[name].name} and in {shard.name}"
                        )
                    found[name] = shard
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{shard} ({shard.stat().st_size:,} bytes) is truncated or damaged: {error}; "
                "download the file again"
            ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model folder; ConfigError says what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
