"""Config + checkpoint + device -> `Resolved`: every choice made once, with its provenance.

Everything that can fail before weights are read fails here: unknown names, wrong values, methods
that a model cannot carry, backends that cannot run. Nothing after this reads the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

from sparseengine.attention import BACKENDS
from sparseengine.attention.caps import device_caps
from sparseengine.attention.routes import RouteDecision, choose_backend
from sparseengine.cache.plan import merge_plans
from sparseengine.config import EngineConfig, origins_of
from sparseengine.core.attention import AttentionNeed, DeviceCaps
from sparseengine.core.method import SparseMethod
from sparseengine.core.params import SparseParams
from sparseengine.core.prefill import PrefillPattern
from sparseengine.core.specs import CacheGroup, LayerKind, ModelSpec, Ragged
from sparseengine.errors import ConfigError, RequestError
from sparseengine.methods import METHODS, check_model, make_method, resolve_budget
from sparseengine.methods.compose import describe_pipeline
from sparseengine.methods.prefill import PATTERNS, check_pattern, make_pattern
from sparseengine.models import model_spec
from sparseengine.ops.tuned import Tuned, device_key, load
from sparseengine.provenance import Source, Value
from sparseengine.weights.fingerprint import fingerprint
from sparseengine.weights.source import ModelSource, open_model

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """All that `build_engine` needs.

    methods: canonical names of the enabled methods, the default one first.
    groups: the merged cache plan. needs, routes: what each layer asks for, and the decision.
    provenance: "section.name" -> the value in force, who gave it and what lost.
    tuned: launch shapes of kernels.
    """

    config: EngineConfig
    provenance: Mapping[str, Value]
    source: ModelSource
    spec: ModelSpec
    device: torch.device
    caps: DeviceCaps
    dtype: torch.dtype
    methods: tuple[str, ...]
    groups: tuple[CacheGroup, ...]
    needs: tuple[AttentionNeed, ...]
    routes: tuple[RouteDecision, ...]
    max_model_len: int
    tuned: Tuned = field(default_factory=Tuned)

    @property
    def sparse(self) -> SparseParams:
        """What a request gets that names no method."""
        default = self.config.sparse
        return SparseParams(
            self.methods[0],
            budget=default.budget,
            ratio=default.ratio,
            prefill=PATTERNS.canonical(default.prefill),
            prefill_config=default.prefill_knobs,
            **default.knobs,
        )

    @property
    def dense_prefill(self) -> str | None:
        """Why no prompt can be prefilled sparsely here; None if a request may ask for it."""
        for need, route in zip(self.needs, self.routes, strict=True):
            if need.layer.kind is LayerKind.FULL:
                backend = BACKENDS.get(route.selected)()
                answer = backend.supports(replace(need, block_masks=True), self.caps)
                if not answer.ok:
                    return f"attention backend {route.selected}: {answer.reason}"
        return None


def resolve(config: EngineConfig, origins: Mapping[str, Value] | None = None) -> Resolved:
    """Choose device, dtype, lengths, methods, cache plan and routes. Raises `ConfigError`.

    `origins` defaults to what the config carries; a config built by hand counts as API.
    """
    known = dict(origins) if origins is not None else origins_of(config)
    device = _device(config, known)
    _check_names(config)
    source = open_model(config.model)
    dtype = _dtype(config, known, source, device)
    spec = replace(model_spec(source.hf_config, dtype), fingerprint=fingerprint(source))
    max_model_len = _max_model_len(config, known, spec)
    methods = _methods(config, spec)
    groups = tuple(merge_plans(spec, [m.cache_plan() for m in methods]))
    _check_budget(config, methods[0], max_model_len)
    pattern = _pattern(config, spec)
    caps = device_caps(device)
    needs = _needs(config, spec, groups, pattern)
    return Resolved(
        config=config,
        provenance=known,
        source=source,
        spec=spec,
        device=device,
        caps=caps,
        dtype=dtype,
        methods=tuple(m.name for m in methods),
        groups=groups,
        needs=needs,
        routes=_routes(config, known, needs, caps),
        max_model_len=max_model_len,
        tuned=_tuned(config.runtime.tuning_file, caps),
    )


def _tuned(path: str | None, caps: DeviceCaps) -> Tuned:
    """What the tuning file says of this kind of device."""
    return Tuned() if path is None else load(path, device_key(caps.arch, caps.multiprocessors))


def _fill(known: dict[str, Value], path: str, value: Any, source: Source, origin: str) -> None:
    """A stronger answer than "auto": recorded on top of what was asked."""
    asked = known[path]
    text = f"{origin} (asked: {asked.value!r})" if asked.source is not Source.DEFAULT else origin
    known[path] = asked.outrank(value, source, text)


def _device(config: EngineConfig, known: dict[str, Value]) -> torch.device:
    wanted = config.runtime.device
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError(
            f"device='cuda' ({known['runtime.device'].origin}): torch {torch.__version__} sees no "
            "CUDA device here; use device='cpu' (--device cpu)"
        )
    if wanted == "auto":
        wanted = "cuda" if has_cuda else "cpu"
        origin = f"torch.cuda.is_available() is {has_cuda}"
        _fill(known, "runtime.device", wanted, Source.DEVICE, origin)
    return torch.device(wanted)


def _check_names(config: EngineConfig) -> None:
    """Names of methods and patterns, before a checkpoint is opened."""
    for name in (config.sparse.method, *config.sparse.enable_methods):
        METHODS.canonical(name)
    PATTERNS.canonical(config.sparse.prefill)
    if not config.model.model and config.model.hf_config is None:
        raise ConfigError(
            "model='' is not allowed; give a folder, a GGUF file, a hub id, or a name that "
            "`sparseengine pull` lists (--model)"
        )


def _dtype(
    config: EngineConfig, known: dict[str, Value], source: ModelSource, device: torch.device
) -> torch.dtype:
    wanted = config.model.dtype
    if wanted == "auto":
        if device.type == "cpu":
            wanted = "float32"
            _fill(known, "model.dtype", wanted, Source.DEVICE, "float32 on the CPU")
        else:
            stored = source.hf_config.get("dtype") or source.hf_config.get("torch_dtype")
            stored = str(stored or "bfloat16").removeprefix("torch.")
            wanted = "bfloat16" if stored not in ("float16", "bfloat16") else stored  # type: ignore[assignment]
            _fill(known, "model.dtype", wanted, Source.MODEL, f"config.json says {stored}")
    return _DTYPES[wanted]


def _max_model_len(config: EngineConfig, known: dict[str, Value], spec: ModelSpec) -> int:
    wanted, limit = config.model.max_model_len, spec.max_position
    if wanted is None:
        _fill(known, "model.max_model_len", limit, Source.MODEL, "max_position_embeddings")
        return limit
    if wanted > limit:
        raise ConfigError(
            f"max_model_len={wanted} is above the model's limit of {limit} positions; lower "
            "--max-model-len, or raise the limit with --hf-overrides "
            f"'{{\"max_position_embeddings\": {wanted}}}' if the model was scaled for it"
        )
    return wanted


def _methods(config: EngineConfig, spec: ModelSpec) -> list[SparseMethod]:
    """Instances of the enabled methods, the default first; the default gets the knobs."""
    default = METHODS.canonical(config.sparse.method)
    names = dict.fromkeys([default, *map(METHODS.canonical, config.sparse.enable_methods)])
    methods: list[SparseMethod] = []
    for name in names:
        given = config.sparse.knobs if name == default else {}
        try:
            knobs = SparseParams(name, **given).knobs  # without what is no method's own
            method = make_method(name, knobs, spec, page_size=config.cache.block_size)
        except RequestError as error:
            raise ConfigError(f"--sparse-config: {error}") from None
        check_model(method, spec)
        methods.append(method)
    return methods


def _pattern(config: EngineConfig, spec: ModelSpec) -> PrefillPattern:
    """The default pattern of prefill."""
    try:
        pattern = make_pattern(config.sparse.prefill, config.sparse.prefill_knobs, spec)
    except RequestError as error:
        raise ConfigError(f"--sparse-prefill-config: {error}") from None
    check_pattern(pattern, spec)
    return pattern


def _check_budget(config: EngineConfig, method: SparseMethod, max_model_len: int) -> None:
    sparse = config.sparse
    try:
        params = SparseParams(method.name, budget=sparse.budget, ratio=sparse.ratio, **sparse.knobs)
        resolve_budget(method, params, max_model_len)
    except RequestError as error:
        flag = "--kv-budget" if "kv_error" not in sparse.knobs else "--sparse-config"
        raise ConfigError(f"{flag}: {error}") from None


def _needs(
    config: EngineConfig,
    spec: ModelSpec,
    groups: tuple[CacheGroup, ...],
    pattern: PrefillPattern,
) -> tuple[AttentionNeed, ...]:
    """What attention of each layer has to do."""
    by_layer = {layer: group for group in groups for layer in group.layers}
    chooses = type(pattern).pattern is not PrefillPattern.pattern
    needs = []
    for index, layer in enumerate(spec.layers):
        group = by_layer.get(index, CacheGroup(layers=(index,)))
        need = AttentionNeed(
            layer=layer,
            dtype=spec.dtype,
            page_size=group.page_size,
            per_head=group.ragged is Ragged.HEAD,
            codec=group.codec,
            deterministic=config.runtime.deterministic,
            block_masks=chooses and layer.kind in pattern.traits.kinds,
        )
        needs.append(need)
    return tuple(needs)


def _routes(
    config: EngineConfig,
    known: dict[str, Value],
    needs: tuple[AttentionNeed, ...],
    caps: DeviceCaps,
) -> tuple[RouteDecision, ...]:
    wanted = config.runtime.attention_backend
    routes = [choose_backend(need, caps, wanted) for need in needs]
    if wanted == "auto" and routes:
        names = ", ".join(dict.fromkeys(r.selected for r in routes))
        origin = f"best route on {caps.kind}"
        _fill(known, "runtime.attention_backend", names, Source.DEVICE, origin)
    return tuple(routes)


def explain(resolved: Resolved, *, prompt_len: int | None = None, max_tokens: int = 128) -> Any:
    """The resolution as JSON-ready data: values, methods, cache plan, routes, demand."""
    length = prompt_len or max(1, resolved.max_model_len - max_tokens)
    return {
        "model": {
            "name": resolved.config.model.model or resolved.config.model.hf_config,
            "architecture": resolved.spec.architecture,
            "layers": len(resolved.spec.layers),
            "vocab_size": resolved.spec.vocab_size,
            "hidden_size": resolved.spec.hidden_size,
            "max_model_len": resolved.max_model_len,
        },
        "values": {
            path: {
                "value": _plain(value.value),
                "source": str(value.source),
                "origin": value.origin,
                "shadowed": [
                    {"value": _plain(g.value), "source": str(g.source), "origin": g.origin}
                    for g in value.shadowed
                ],
            }
            for path, value in resolved.provenance.items()
        },
        "methods": [_explain_method(resolved, n, length, max_tokens) for n in resolved.methods],
        "prefill": _explain_prefill(resolved),
        "cache_plan": [_plain(g) for g in resolved.groups],
        "routes": _explain_routes(resolved),
        "launch_shapes": str(resolved.tuned),
    }


def _explain_method(resolved: Resolved, name: str, length: int, max_tokens: int) -> dict[str, Any]:
    is_default = name == resolved.methods[0]
    params = resolved.sparse if is_default else SparseParams(name)
    size = resolved.config.cache.block_size
    method = make_method(name, params.knobs, resolved.spec, page_size=size)
    budget = resolve_budget(method, params, length)
    demand = method.demand(length, max_tokens, budget)
    return {
        "name": name,
        "default": is_default,
        "config": _plain(method.config),
        "pipeline": describe_pipeline(method),
        "traits": _plain(method.traits),
        "demand": {
            "prompt_tokens": length,
            "max_tokens": max_tokens,
            "budget_tokens": budget,
            "peak_tokens": demand.peak_tokens,
            "steady_tokens": demand.steady_tokens,
        },
    }


def _explain_prefill(resolved: Resolved) -> dict[str, Any]:
    sparse = resolved.sparse
    pattern = make_pattern(sparse.prefill, sparse.prefill_config, resolved.spec)
    return {
        "name": pattern.name,
        "config": _plain(pattern.config),
        "traits": _plain(pattern.traits),
        "possible": resolved.dense_prefill or "yes",
    }


def _explain_routes(resolved: Resolved) -> list[dict[str, Any]]:
    """Route decisions, equal ones of several layers joined."""
    joined: dict[str, dict[str, Any]] = {}
    for layer, route in enumerate(resolved.routes):
        data = _plain(route.to_dict())
        joined.setdefault(repr(data), {**data, "layers": []})["layers"].append(layer)
    return list(joined.values())


def _plain(value: Any) -> Any:
    """Dataclasses, enums, dtypes and sets as JSON types."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(v) for v in value)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "name", str(value)).lower()
