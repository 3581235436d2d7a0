"""Engine configuration: nested frozen dataclasses with vLLM's names where vLLM has one.

`PARAMS` is the one table of parameters: flags, keywords of `LLM(...)`, file keys, environment and
the reference page all follow from it. `collect` merges the sources; what lost is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sparseengine import env
from sparseengine.errors import ConfigError, nearest
from sparseengine.params_table import PARAMS as PARAMS
from sparseengine.provenance import Affects, Given, Param, Source, Value, load_file, pick
from sparseengine.server_params import SERVER_BY_KEYWORD, is_server_key, server_values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What to load."""

    model: str = ""
    tokenizer: str | None = None
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    hf_config: str | None = None  # a shipped shape, e.g. qwen3-8b, with load_format=dummy
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    generation_config: str = "auto"
    max_model_len: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How much KV memory and in which pages."""

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_dtype: Literal["auto"] = "auto"
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How requests share steps."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    mix: bool = True  # decodes and prefill chunks share steps; else they alternate
    max_decode_stall_steps: int = 4
    reserve_output_tokens: int | None = None  # None reserves max_tokens in full: never preempts
    under_pressure: Literal["preempt", "shrink"] = "preempt"  # shrink: results depend on the load


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig:
    """The default method of requests that name none, and those that may come."""

    method: str = "full"
    budget: int | None = None
    ratio: float | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)
    enable_methods: tuple[str, ...] = ()
    prefill: str = "dense"  # every query reads all keys before it
    prefill_knobs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Where and how it runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: str = "auto"
    deterministic: bool = False
    enforce_eager: bool = False
    async_scheduling: bool = True
    tuning_file: str | None = None
    max_logprobs: int = 20
    grammar_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that decides how an engine behaves.

    `origins`: for each parameter that `collect` merged, who gave it and what lost; not compared.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sparse: SparseConfig = field(default_factory=SparseConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    origins: Mapping[str, Value] = field(default_factory=dict, compare=False, repr=False)

    def get(self, path: str) -> Any:
        """The value at "section.name"."""
        section, name = path.split(".")
        return getattr(getattr(self, section), name)

    def with_values(self, values: Mapping[str, Any]) -> EngineConfig:
        """A copy with some "section.name" values replaced."""
        config = self
        for path, value in values.items():
            section, name = path.split(".")
            made = replace(getattr(config, section), **{name: value})
            config = replace(config, **{section: made})
        return config

    def digest(self, kind: Affects) -> str:
        """A short hash of every value that affects `kind`; equal digests may share artefacts."""
        return kind.digest({p.path: self.get(p.path) for p in PARAMS if kind in p.affects})


SECTIONS = ("model", "cache", "scheduler", "sparse", "runtime")
BY_PATH: Mapping[str, Param] = {p.path: p for p in PARAMS}
BY_KEYWORD: Mapping[str, Param] = {name: p for p in PARAMS for name in (p.keyword, *p.aliases)}
_RATIO = "sparse.ratio"  # --kv-budget with a point: one parameter with the budget, one winner


def default_of(path: str) -> Any:
    """The value a parameter has when nobody gives it."""
    return EngineConfig().get(path)


def _by_keyword(
    values: Mapping[str, Any], where: str, others: Iterable[str] = ()
) -> dict[str, tuple[Any, str]]:
    """Keywords -> {path: (raw value, origin)}; an unknown one names the nearest, `others` too."""
    found: dict[str, tuple[Any, str]] = {}
    for name, raw in values.items():
        key = name.replace("-", "_")
        if key not in BY_KEYWORD:
            raise ConfigError(f"unknown {where} {name!r}; {nearest(key, (*BY_KEYWORD, *others))}")
        path = BY_KEYWORD[key].path
        if path in found:
            raise ConfigError(f"{where}: {name!r} and {found[path][1]!r} set the same value")
        found[path] = (raw, name)
    return found


def read_file(path: str | Path) -> dict[str, tuple[Any, str]]:
    """YAML or JSON, flags or sections; `serve`'s are left out -> {path: (raw value, origin)}."""
    file = Path(path)
    data = load_file(file)
    server_values_of(data, file)
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if key in SECTIONS and isinstance(value, Mapping):
            for name, inner in value.items():
                flat[_section_keyword(key, str(name), file)] = inner
        elif not is_server_key(str(key)):
            flat[str(key)] = value
    found = _by_keyword(flat, f"key in {file}:", SERVER_BY_KEYWORD)
    return {p: (raw, f"{file}: {name}") for p, (raw, name) in found.items()}


def _section_keyword(section: str, name: str, file: Path) -> str:
    key = name.replace("-", "_")
    if section == "sparse" and key == "ratio":
        return "kv_budget"
    path = f"{section}.{key}"
    if path in BY_PATH:
        return BY_PATH[path].keyword
    if key in BY_KEYWORD and BY_KEYWORD[key].path.startswith(f"{section}."):
        return BY_KEYWORD[key].keyword
    known = [p.split(".")[1] for p in BY_PATH if p.startswith(f"{section}.")]
    raise ConfigError(f"unknown key {name!r} in section {section} of {file}; {nearest(key, known)}")


def collect(
    *,
    cli: Mapping[str, Any] | None = None,
    api: Mapping[str, Any] | None = None,
    file: str | Path | None = None,
) -> EngineConfig:
    """Merge command line, Python keywords, config file and environment over the defaults.

    `cli` and `api` map keywords (`max_model_len`) to raw values. Raises `ConfigError` for unknown
    names and wrong values, also for those that lose.
    """
    env.warn_unknown()
    inputs: list[tuple[Source, dict[str, tuple[Any, str]]]] = []
    if cli:
        given = _by_keyword(cli, "flag")
        flags = {p: (raw, f"--{name.replace('_', '-')}") for p, (raw, name) in given.items()}
        inputs.append((Source.CLI, flags))
    if api:
        inputs.append((Source.API, _by_keyword(api, "engine argument")))
    if file is not None:
        inputs.append((Source.FILE, read_file(file)))
    inputs.append((Source.ENV, dict(env.config_values())))
    origins: dict[str, Value] = {}
    for param in PARAMS:
        given_here = [Given(default_of(param.path), Source.DEFAULT, "built in")]
        for source, values in inputs:
            if param.path in values and values[param.path][0] is not None:
                raw, origin = values[param.path]
                given_here.append(Given(param.parse(raw, origin), source, origin))
        origins[param.path] = pick(given_here)
    return _build(origins)


def _build(origins: Mapping[str, Value]) -> EngineConfig:
    values = {path: value.value for path, value in origins.items()}
    budget = values["sparse.budget"]
    values[_RATIO] = budget if isinstance(budget, float) else None
    values["sparse.budget"] = None if isinstance(budget, float) else budget
    return replace(EngineConfig().with_values(values), origins=dict(origins))


def config_from_kwargs(**flat: Any) -> EngineConfig:
    """The config behind `LLM(**engine_args)`: vLLM's names, checked; environment below them."""
    return collect(api=flat)


def origins_of(config: EngineConfig) -> dict[str, Value]:
    """Provenance of a config, also of one built by hand: what differs from a default is API."""
    if config.origins:
        return dict(config.origins)
    found: dict[str, Value] = {}
    for param in PARAMS:
        value, default = config.get(param.path), default_of(param.path)
        if param.path == "sparse.budget" and config.sparse.ratio is not None:
            value = config.sparse.ratio
        unset = Given(default, Source.DEFAULT, "built in")
        given = [unset] if value == default else [unset, Given(value, Source.API, param.path)]
        found[param.path] = pick(given)
    return found
