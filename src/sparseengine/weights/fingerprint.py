"""Which model this is, told from its config and samples of its weights without reading them all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sparseengine.errors import ConfigError
from sparseengine.weights.source import ModelSource

_BLOCK = 4096
_SAMPLES = 64  # blocks of a file that are read, beside its head
# What says nothing of a model's numbers: who wrote the file, and how long or precise it is run.
_BOOKKEEPING = {
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "max_position_embeddings",
}


def fingerprint(source: ModelSource) -> str:
    """16 hex digits of the config, a dash, 16 of the weights; equal for copies of a checkpoint.

    Of each weight file the size, the head (names and places of tensors) and 64 blocks spread evenly
    are hashed: files of a fine-tuned or requantised model differ in them, though one that changed a
    single small tensor may not. The same weights in another format or in other shards count as
    another model. A dummy's weights are its seed. The dtype and the allowed length do not count.
    Raises `ConfigError` if a file cannot be read.
    """
    config = _digest(json.dumps(_meaning(source.hf_config), sort_keys=True, default=str).encode())
    if source.load_format == "dummy":
        return f"{config}-{_digest(f'dummy {source.seed}'.encode())}"
    files = source.shards
    if not files and source.path is not None:
        files = (source.path,)
    return f"{config}-{_digest(b''.join(map(_sampled, files)))}"


def _meaning(config: Any) -> Any:
    if isinstance(config, dict):
        return {k: _meaning(v) for k, v in config.items() if k not in _BOOKKEEPING}
    return config


def _sampled(path: Path) -> bytes:
    found = hashlib.sha256()
    try:
        size = path.stat().st_size
        found.update(str(size).encode())
        with path.open("rb") as file:
            found.update(file.read(16 * _BLOCK))
            for i in range(1, _SAMPLES + 1):
                file.seek(max(0, (size - _BLOCK) * i // _SAMPLES))
                found.update(file.read(_BLOCK))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    return found.digest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
