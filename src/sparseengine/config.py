"""Engine configuration: nested frozen dataclasses with vLLM's names where vLLM has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig:
    """The default method of requests that name none, and those that may come."""

    method: str = "full"
    budget: int | None = None
    ratio: float | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)
    enable_methods: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Where and how it runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: str = "auto"
    deterministic: bool = False
    enforce_eager: bool = False
    max_logprobs: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that decides how an engine behaves."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sparse: SparseConfig = field(default_factory=SparseConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
