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
from sparseengine.provenance import Affects, Given, Param, Source, Value, load_file, pick
from sparseengine.provenance import at_least as _at_least
from sparseengine.provenance import fraction as _fraction
from sparseengine.provenance import page_size as _page
from sparseengine.provenance import seed as _seed
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
_NUMERICS = frozenset({Affects.NUMERICS})
_LAYOUT = frozenset({Affects.LAYOUT})
_BOTH = frozenset({Affects.NUMERICS, Affects.LAYOUT})
_ALL = frozenset(Affects)

PARAMS: tuple[Param, ...] = (
    Param(
        path="model.model",
        flag="--model",
        kind="str",
        aliases=("model_path",),
        affects=_ALL,
        doc="a name that `pull` knows, a folder, a GGUF file, or a hub id",
    ),
    Param(
        path="model.tokenizer",
        flag="--tokenizer",
        kind="str",
        doc="folder or name of the tokenizer (default: the model's own)",
    ),
    Param(
        path="model.revision",
        flag="--revision",
        kind="str",
        affects=_NUMERICS,
        doc="branch, tag or commit of a hub model",
    ),
    Param(
        path="model.dtype",
        flag="--dtype",
        kind="str",
        affects=_ALL,
        choices=("auto", "float32", "bfloat16", "float16"),
        doc="type of weights and KV (auto: float32 on the CPU, the checkpoint's on a GPU)",
    ),
    Param(
        path="model.load_format",
        flag="--load-format",
        kind="str",
        affects=_NUMERICS,
        choices=("auto", "safetensors", "gguf", "dummy"),
        doc="how weights are read; dummy makes random ones",
    ),
    Param(
        path="model.hf_config",
        flag="--hf-config",
        kind="str",
        affects=_ALL,
        doc="with --load-format dummy: a shipped shape (qwen3-8b ...) or a config.json",
    ),
    Param(
        path="model.hf_overrides",
        flag="--hf-overrides",
        kind="json",
        affects=_ALL,
        doc="JSON object laid over the model's config.json",
    ),
    Param(
        path="model.generation_config",
        flag="--generation-config",
        kind="str",
        doc="auto: the model's generation_config.json gives sampling defaults; vllm: it does not",
    ),
    Param(
        path="model.max_model_len",
        flag="--max-model-len",
        kind="size",
        auto=True,
        check=_at_least(1),
        affects=_LAYOUT,
        doc="longest prompt + output in tokens (12K is 12,288; auto: the model's limit)",
    ),
    Param(
        path="model.seed",
        flag="--seed",
        kind="int",
        check=_seed,
        affects=_NUMERICS,
        doc="seed of sampling and of dummy weights",
    ),
    Param(
        path="cache.block_size",
        flag="--block-size",
        kind="int",
        check=_page,
        affects=_LAYOUT,
        aliases=("page_size",),
        doc="tokens in a page",
    ),
    Param(
        path="cache.gpu_memory_utilization",
        flag="--gpu-memory-utilization",
        kind="float",
        check=_fraction,
        doc="fraction of the GPU's memory the engine may take",
    ),
    Param(
        path="cache.kv_cache_memory_bytes",
        flag="--kv-cache-memory-bytes",
        kind="size",
        auto=True,
        check=_at_least(1),
        doc="memory for KV pages (2GiB, 500M ...; auto: from what the device has free)",
    ),
    Param(
        path="cache.num_gpu_blocks_override",
        flag="--num-gpu-blocks-override",
        kind="size",
        auto=True,
        check=_at_least(1),
        doc="number of KV pages, whatever the memory",
    ),
    Param(
        path="cache.kv_cache_dtype",
        flag="--kv-cache-dtype",
        kind="str",
        choices=("auto",),
        affects=_BOTH,
        doc="type of stored KV; auto follows --dtype",
    ),
    Param(
        path="scheduler.max_num_seqs",
        flag="--max-num-seqs",
        kind="size",
        check=_at_least(1),
        doc="most requests in one step",
    ),
    Param(
        path="scheduler.max_num_batched_tokens",
        flag="--max-num-batched-tokens",
        kind="size",
        check=_at_least(1),
        doc="most tokens in one step; longer prompts run in chunks",
    ),
    Param(
        path="scheduler.mix",
        flag="--mix",
        kind="bool",
        doc="prefill chunks and decodes share steps; else they alternate",
    ),
    Param(
        path="scheduler.max_decode_stall_steps",
        flag="--max-decode-stall-steps",
        kind="int",
        check=_at_least(1),
        doc="longest wait of a running decode, in steps",
    ),
    Param(
        path="scheduler.reserve_output_tokens",
        flag="--reserve-output-tokens",
        kind="size",
        auto=True,
        check=_at_least(0),
        doc="output tokens admission reserves per request (auto: all of max_tokens)",
    ),
    Param(
        path="scheduler.under_pressure",
        flag="--under-pressure",
        kind="str",
        choices=("preempt", "shrink"),
        affects=_NUMERICS,
        doc="when pages run out: run the newest request again later, or let methods evict more",
    ),
    Param(
        path="sparse.method",
        flag="--sparse-method",
        kind="str",
        aliases=("method",),
        affects=_ALL,
        doc="method of requests that name none (see `sparseengine methods`)",
    ),
    Param(
        path="sparse.budget",
        flag="--kv-budget",
        kind="budget",
        affects=_NUMERICS,
        doc="an integer is tokens per row; with a point (0.25) the kept fraction of the prompt",
    ),
    Param(
        path="sparse.knobs",
        flag="--sparse-config",
        kind="json",
        affects=_ALL,
        doc='JSON object of the method\'s own knobs, e.g. {"window": 64}',
    ),
    Param(
        path="sparse.enable_methods",
        flag="--enable-methods",
        kind="names",
        affects=_LAYOUT,
        doc="methods that requests may name, joined by commas",
    ),
    Param(
        path="sparse.prefill",
        flag="--sparse-prefill",
        kind="str",
        affects=_NUMERICS,
        doc="pattern of sparse prefill, beside any method (see `sparseengine methods`)",
    ),
    Param(
        path="sparse.prefill_knobs",
        flag="--sparse-prefill-config",
        kind="json",
        affects=_NUMERICS,
        doc='JSON object of the pattern\'s own knobs, e.g. {"min_tokens": 4096}',
    ),
    Param(
        path="runtime.device",
        flag="--device",
        kind="str",
        choices=("auto", "cpu", "cuda"),
        affects=_ALL,
        doc="where to run",
    ),
    Param(
        path="runtime.attention_backend",
        flag="--attention-backend",
        kind="str",
        affects=_NUMERICS,
        doc="which attention backend to use",
    ),
    Param(
        path="runtime.deterministic",
        flag="--deterministic",
        kind="bool",
        affects=_NUMERICS,
        doc="results that do not depend on what shares the batch",
    ),
    Param(
        path="runtime.enforce_eager",
        flag="--enforce-eager",
        kind="bool",
        doc="never replay captured graphs",
    ),
    Param(
        path="runtime.async_scheduling",
        flag="--async-scheduling",
        kind="bool",
        doc="plan and book steps while the device runs others (CUDA devices)",
    ),
    Param(
        path="runtime.tuning_file",
        flag="--tuning-file",
        kind="str",
        doc="launch shapes of kernels that `bench tune` has measured on such a device",
    ),
    Param(
        path="runtime.max_logprobs",
        flag="--max-logprobs",
        kind="int",
        check=_at_least(0),
        doc="most log-probabilities per token a request may ask for",
    ),
    Param(
        path="runtime.grammar_timeout_s",
        flag="--grammar-timeout-s",
        kind="float",
        check=_at_least(1),
        doc="longest time to compile one request's schema, expression or grammar",
    ),
)

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
