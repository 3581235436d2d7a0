"""Where a model comes from: a folder, a GGUF file, a pulled name, a hub id, or a dummy shape."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sparseengine import env
from sparseengine.config import ModelConfig
from sparseengine.errors import ConfigError, nearest
from sparseengine.weights import gguf_file, hub, safetensors_file
from sparseengine.weights.dummy import shape_config, shape_names
from sparseengine.weights.hf_config import override, refuse_quantised
from sparseengine.weights.safetensors_file import read_json

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
# Subfolders hold the same weights in other formats; so does what Mistral calls consolidated.
_HUB_IGNORED = ("*/*", "consolidated*")


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that was found and whose config was read; its weights are read when asked for.

    `hf_config` has Hugging Face's field names, for GGUF too, with `hf_overrides` applied. `path` is
    the folder or file, None for a shipped dummy shape. `tokenizer` is the folder or .gguf file that
    the tokenizer is read from, None when there is none.
    """

    name: str
    path: Path | None
    load_format: Literal["safetensors", "gguf", "dummy"]
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer: Path | None
    seed: int = 0
    shards: tuple[Path, ...] = ()
    header: gguf_file.GgufHeader | None = field(default=None, repr=False)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of the whole checkpoint, one tensor at a time, on the host.

        Raises ConfigError for a truncated or damaged file. A dummy yields nothing: its parameters
        are filled where they are.
        """
        if self.header is not None:
            return gguf_file.read_tensors(self.header)
        return safetensors_file.read_tensors(self.shards)

    def load_tokenizer(self) -> Any:
        """The transformers tokenizer, or None when the source has none (a dummy shape).

        A tokenizer inside a GGUF file is converted once (seconds) and kept in the cache folder.
        """
        if self.tokenizer is None:
            return None
        folder = _tokenizer_folder(self.tokenizer)
        advice = "`tokenizer` may name another folder or hub id"
        local = Path(folder)
        # Some versions of transformers make an empty tokenizer of a folder that holds none.
        if local.is_dir() and not any((local / name).exists() for name in _TOKENIZER_FILES):
            files = ", ".join(_TOKENIZER_FILES)
            raise ConfigError(f"cannot load a tokenizer from {folder}: it has no {files}; {advice}")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            detail = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                f"cannot load a tokenizer from {folder}: {detail[0]}; {advice}"
            ) from error
        template = local / "chat_template.json"
        # transformers reads chat_template.jinja itself, the older JSON file for processors alone.
        if not tokenizer.chat_template and template.is_file():
            tokenizer.chat_template = read_json(template).get("chat_template")
        return tokenizer

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends generation: generation_config's, then the model config's."""
        found: list[int] = []
        for config in (self.generation_config, self.hf_config):
            value = config.get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            found += [int(i) for i in ids if i not in found]
        return tuple(found)

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """What the config says the weights were saved in; None when it does not say."""
        value = self.hf_config.get("dtype") or self.hf_config.get("torch_dtype")
        name = str(value).removeprefix("torch.")
        return {
            "float32": torch.float32,
            "float16": torch.float16,
            "bfloat16": torch.bfloat16,
        }.get(name)


def open_model(config: ModelConfig) -> ModelSource:
    """Find a model and read its config; weights stay on disk.

    `config.model` may be a folder (config.json with safetensors, or one .gguf file), a .gguf file,
    a name that `sparseengine pull` knows (pulled when it is not there yet) or a hub id. With
    load_format="dummy" a shape name or a folder with a config.json is enough. Raises ConfigError
    that says what was found and what is possible.
    """
    if config.load_format == "dummy":
        return _open_dummy(config)
    path = _resolve(config.model, config)
    file = _gguf_in(path, config.load_format)
    if file is not None:
        return _open_gguf(file, config)
    if config.load_format == "gguf":
        raise ConfigError(f"load_format='gguf', but {path} holds no .gguf file")
    hf_config = override(_folder_config(path), config.hf_overrides)
    refuse_quantised({**_quantisation_file(path), **hf_config}, f"model {config.model!r}")
    return ModelSource(
        name=config.model,
        path=path,
        load_format="safetensors",
        hf_config=hf_config,
        generation_config=_generation_config(path, config),
        tokenizer=_tokenizer_source(path, config),
        seed=config.seed,
        shards=safetensors_file.find_shards(path),
    )


def _open_gguf(file: Path, config: ModelConfig) -> ModelSource:
    header = gguf_file.read_header(file)
    beside = (file.parent / "tokenizer.json").is_file() and len(_gguf_files(file.parent)) == 1
    return ModelSource(
        name=config.model,
        path=file,
        load_format="gguf",
        hf_config=override(header.hf_config(), config.hf_overrides),
        generation_config=_generation_config(file.parent, config),
        tokenizer=_tokenizer_source(file.parent if beside else file, config),
        seed=config.seed,
        header=header,
    )


def _open_dummy(config: ModelConfig) -> ModelSource:
    wanted = config.hf_config or config.model
    if not wanted:
        shapes = ", ".join(shape_names())
        raise ConfigError(
            f"load_format='dummy' needs a shape: set hf_config to one of {shapes}, or to a folder "
            "that holds a config.json"
        )
    path: Path | None = None
    if wanted in shape_names():
        hf_config = shape_config(wanted)
    else:
        path = _local(wanted) or hub.locate(wanted)
        if path is None:
            raise ConfigError(
                f"unknown model shape {wanted!r}; {nearest(wanted, shape_names())} A folder that "
                "holds a config.json works, too"
            )
        file = _gguf_in(path, "auto")
        hf_config = gguf_file.read_header(file).hf_config() if file else _folder_config(path)
    has_tokenizer = path is not None and path.is_dir() and (path / "tokenizer.json").is_file()
    return ModelSource(
        name=wanted,
        path=path,
        load_format="dummy",
        hf_config=override(hf_config, config.hf_overrides),
        generation_config={},
        tokenizer=_tokenizer_source(path if has_tokenizer else None, config),
        seed=config.seed,
    )


def _local(name: str) -> Path | None:
    path = Path(name).expanduser()
    return path if path.exists() else None


def _resolve(name: str, config: ModelConfig) -> Path:
    """The folder or file behind what the user wrote; downloads it when it is not local."""
    if not name:
        raise ConfigError(
            "no model given: name a folder, a .gguf file, a hub id, or one of "
            f"{', '.join(hub.PULLABLE)}"
        )
    path = _local(name)
    if path is not None:
        return path
    if name in hub.PULLABLE:
        return hub.pull(name)
    if name.endswith(".gguf") or not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise ConfigError(
            f"model {name!r} is not there: no such file or folder, not a hub id (owner/name) and "
            f"not a name that can be pulled; {nearest(name, hub.PULLABLE)}"
        )
    return _snapshot(name, config)


def _snapshot(repo: str, config: ModelConfig) -> Path:
    """Download a hub repository, or find it in huggingface_hub's own cache."""
    from huggingface_hub import snapshot_download

    files = [*_HUB_FILES, "*.gguf"] if config.load_format == "gguf" else list(_HUB_FILES)
    try:
        path = snapshot_download(
            repo,
            revision=config.revision,
            allow_patterns=files,
            ignore_patterns=list(_HUB_IGNORED),
        )
    except hub.hub_errors() as error:
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model {repo!r} is no local folder, and fetching it from the hub failed: {detail}"
        ) from error
    return Path(path)


def _gguf_files(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob("*.gguf"))


def _gguf_in(path: Path, load_format: str) -> Path | None:
    """The GGUF file that `path` is or holds; safetensors win in a folder that has both."""
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ConfigError(f"model {path} is a file, but not a .gguf file; give its folder instead")
    files = _gguf_files(path)
    if load_format == "safetensors" or not files:
        return None
    if load_format == "auto" and any(path.glob("*.safetensors")):
        return None
    if len(files) > 1:
        names = ", ".join(f.name for f in files)
        raise ConfigError(f"{path} holds several GGUF files; name one of them: {names}")
    return files[0]


def _folder_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json" if folder.is_dir() else folder
    if not file.is_file():
        raise ConfigError(
            f"model folder {folder} holds neither a config.json nor a .gguf file; it must be a "
            "checkpoint in Hugging Face's or GGUF format"
        )
    return read_json(file)


def _quantisation_file(folder: Path) -> dict[str, Any]:
    """What older exporters wrote beside config.json, as the field that newer ones write into it."""
    for name, kind in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (folder / name).is_file():
            found = {"quant_method": kind, **read_json(folder / name)}
            return {"quantization_config": found}
    return {}


def _generation_config(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """generation_config="auto": the model's own; "vllm": none; else a folder that holds one."""
    if config.generation_config == "vllm":
        return {}
    if config.generation_config == "auto":
        file = folder / "generation_config.json"
        return read_json(file) if file.is_file() else {}
    file = Path(config.generation_config).expanduser() / "generation_config.json"
    if not file.is_file():
        raise ConfigError(
            f"generation_config={config.generation_config!r} is neither 'auto', 'vllm' nor a "
            "folder that holds a generation_config.json"
        )
    return read_json(file)


def _tokenizer_source(path: Path | None, config: ModelConfig) -> Path | None:
    if config.tokenizer is None:
        return path
    return _resolve(config.tokenizer, config)


def _tokenizer_folder(path: Path) -> Path:
    """A folder transformers can load: `path`, or the converted tokenizer of a GGUF file."""
    if path.is_dir():
        inside = _gguf_files(path)
        if (path / "tokenizer.json").is_file() or len(inside) != 1:
            return path
        path = inside[0]
    stat = path.stat()
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    folder = env.cache_dir() / "tokenizers" / hashlib.sha256(identity.encode()).hexdigest()[:16]
    if not (folder / "tokenizer.json").is_file():
        try:
            hub.convert_tokenizer(path, folder)
        except (KeyError, ValueError, OSError) as error:
            raise ConfigError(f"cannot read the tokenizer inside {path}: {error}") from error
    return folder
