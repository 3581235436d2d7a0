"""Sparse methods, one file each, and the registry that lists them: one line per method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from inspect import getdoc
from typing import Any

from sparseengine.core.method import SparseMethod, Traits
from sparseengine.core.params import SparseParams
from sparseengine.core.specs import CacheGroup, LayerKind, ModelSpec
from sparseengine.errors import ConfigError, RequestError, UnsupportedError
from sparseengine.registry import Registry

METHODS = Registry(
    "sparse method",
    {
        "full": "sparseengine.methods.full:Full",
        "random": "sparseengine.methods.random:Random",
        "streaming_llm": "sparseengine.methods.streaming_llm:StreamingLLM",
        "duo_attention": "sparseengine.methods.duo_attention:DuoAttention",
        "knorm": "sparseengine.methods.knorm:Knorm",
        "keydiff": "sparseengine.methods.keydiff:KeyDiff",
        "expected_attention": "sparseengine.methods.expected_attention:ExpectedAttention",
        "snapkv": "sparseengine.methods.snapkv:SnapKV",
        "pyramidkv": "sparseengine.methods.pyramidkv:PyramidKV",
        "rkv": "sparseengine.methods.rkv:RKV",
        "skipkv": "sparseengine.methods.skipkv:SkipKV",
        "h2o": "sparseengine.methods.h2o:H2O",
        "tova": "sparseengine.methods.tova:TOVA",
        "adakv": "sparseengine.methods.adakv:AdaKV",
        "kvzip": "sparseengine.methods.kvzip:KVzip",
        "quest": "sparseengine.methods.quest:Quest",
        "infllm": "sparseengine.methods.infllm:InfLLM",
        "omnikv": "sparseengine.methods.omnikv:OmniKV",
        "double_sparsity": "sparseengine.methods.double_sparsity:DoubleSparsity",
    },
    aliases={"dense": "full", "vanilla": "full"},
)

RUNS = "runs"

MEASURES: Mapping[str | None, str] = {
    "window": "attention of the prompt's newest queries",
    "newest": "attention of the newest query",
    "all": "attention of all queries so far",
    "expected": "attention expected of queries yet to come",
    "repetition": "attention of a repetition of the prompt",
    None: "refused: it ranks tokens and measures no attention",
}


def make_method(
    name: str, knobs: Mapping[str, Any], model: ModelSpec, *, page_size: int = 16
) -> SparseMethod:
    """An instance of a method, or of a pipeline that begins with it, for this model.

    knobs: the method's own, and those of further stages (`compose.STAGE_KNOBS`). page_size: slots
    of a page in the cache that will hold its rows. Raises `ConfigError` for an unknown method and
    `RequestError` for an unknown or wrong knob, both naming the nearest, and for stages that do not
    fit together.
    """
    from sparseengine.methods.compose import allocated, composed, split_stages

    stages, own = split_stages(knobs)
    method = allocated(_alone(name, own, model, page_size), stages)
    if stages.select is None:
        return method
    try:
        METHODS.get(stages.select)
    except ConfigError as error:
        raise RequestError(f"select: {error}") from None
    read = _alone(stages.select, stages.select_config, model, page_size)
    return composed(method, read, stages.select_tokens)


def _alone(name: str, knobs: Mapping[str, Any], model: ModelSpec, page_size: int) -> SparseMethod:
    method_class = METHODS.get(name)
    config = method_class.config_class.from_knobs(METHODS.canonical(name), knobs)
    method: SparseMethod = method_class(config, model)
    if hasattr(method, "page_size"):
        method.page_size = page_size
    return method


def resolve_budget(
    method_class: type[SparseMethod] | SparseMethod, sparse: SparseParams, prompt_len: int
) -> int | None:
    """Tokens per row for a prompt: the budget, else max(1, int(ratio * prompt_len)).

    A request that gives neither gets the method's default, or with an error target, whose ceiling
    the budget is, None: no ceiling. None for methods that take no budget; giving them one raises
    `RequestError`.
    """
    name = method_class.name
    for field_name in ("dropped_mass", "compensate"):
        if getattr(sparse, field_name) and method_class.traits.family != "eviction":
            raise RequestError(
                f"{field_name}=True is not allowed with method {name!r}, which evicts nothing; "
                "leave it out or name a method that evicts"
            )
    if sparse.kv_error is not None and method_class.traits.measures is None:
        able = [n for n in METHODS if METHODS.get(n).traits.measures is not None]
        raise RequestError(
            f"kv_error={sparse.kv_error} is not possible with method {name!r} "
            f"({error_target(method_class.traits)}); give a budget or ratio, or name one of "
            f"{', '.join(able)}"
        )
    if method_class.traits.takes == "none":
        for field_name in ("budget", "ratio"):
            value = getattr(sparse, field_name)
            if value is not None:
                raise RequestError(
                    f"{field_name}={value} is not allowed with method {name!r}, which retains and "
                    f"reads everything; leave it out or name a sparse method"
                )
        return None
    if sparse.budget is not None:
        return sparse.budget
    ratio = sparse.ratio
    if ratio is None and sparse.kv_error is not None:
        return None
    if ratio is None:
        budget: int | None = getattr(method_class, "default_budget", None)
        ratio = getattr(method_class, "default_ratio", None)
        if budget is not None or ratio is None:
            return budget
    return max(1, int(ratio * prompt_len))


def check_model(method: SparseMethod, model: ModelSpec) -> None:
    """Raise `UnsupportedError` with the reason if the method can do nothing for this model."""
    present = {spec.kind for spec in model.layers}
    if not present & method.traits.kinds:
        has = ", ".join(sorted(k.name for k in present))
        raise UnsupportedError(
            f"method {method.name!r} cannot run on this model",
            [f"{_acts_on(method.traits)}; the model has {has} layers only"],
        )
    if getattr(method, "layers", None) == ():
        raise UnsupportedError(
            f"method {method.name!r} would leave every layer of this model dense",
            [f"the model has {len(model.layers)} layers and the knobs are {method.config}"],
        )


def check_storage(method: SparseMethod, groups: Sequence[CacheGroup]) -> None:
    """Raise `RequestError` if a running cache lacks what this instance needs.

    A request may bring knobs that change the cache plan (a longer window, say), which is fixed when
    the engine starts.
    """
    have = {layer: group for group in groups for layer in group.layers}
    for group in method.cache_plan():
        for layer in group.layers:
            found = have.get(layer)
            missing = [a.name for a in group.aux if found is None or a not in found.aux]
            if missing or found is None or found.ragged.value < group.ragged.value:
                what = f"side tensors {missing}" if missing else f"rows per {group.ragged.name}"
                raise RequestError(
                    f"method {method.name!r} with these knobs needs {what}, which the cache was "
                    "not started with; start the engine with this method and these knobs as its "
                    "default, or leave the knobs out"
                )


def _acts_on(traits: Traits) -> str:
    return f"it acts on layers of kind {', '.join(sorted(k.name for k in traits.kinds))}"


def kind_matrix() -> dict[str, dict[str, str]]:
    """For every method and kind of layer with KV: RUNS, or why layers of that kind stay dense.

    From traits alone. A model that has no layer a method acts on is refused with the same words.
    """
    kinds = [kind for kind in LayerKind if kind is not LayerKind.RECURRENT]
    return {
        name: {
            kind.name: RUNS
            if kind in traits.kinds
            else f"{_acts_on(traits)}; {kind.name} layers stay dense"
            for kind in kinds
        }
        for name in METHODS
        for traits in (METHODS.get(name).traits,)
    }


def describe_methods() -> list[dict[str, Any]]:
    """Every registered method as JSON-ready data, from code alone.

    Keys: name, aliases, summary, family, takes, default (what a request gets that gives no budget),
    traits, kv_error (the attention of which it is a part, or why it is refused), knobs (name, type,
    default, doc, allowed), presets (name -> knob values).
    """
    return [_describe(name) for name in METHODS]


def _describe(name: str) -> dict[str, Any]:
    method_class = METHODS.get(name)
    traits = {
        f.name: _plain(getattr(method_class.traits, f.name)) for f in fields(method_class.traits)
    }
    default = None
    if getattr(method_class, "default_budget", None) is not None:
        default = {"budget": method_class.default_budget}
    elif getattr(method_class, "default_ratio", None) is not None:
        default = {"ratio": method_class.default_ratio}
    summary = (getdoc(method_class) or "").split("\n\n")[0].replace("\n", " ")
    return {
        "name": name,
        "aliases": list(METHODS.aliases(name)),
        "summary": summary,
        "family": method_class.traits.family,
        "takes": method_class.traits.takes,
        "default": default,
        "traits": traits,
        "kv_error": error_target(method_class.traits),
        "knobs": method_class.config_class.describe(),
        "presets": {k: dict(v) for k, v in sorted(method_class.config_class.presets.items())},
    }


def error_target(traits: Traits) -> str:
    """The attention of which `kv_error` is a part with such a method, or why it is refused."""
    if traits.family != "eviction":
        return "refused: it evicts nothing"
    return MEASURES[traits.measures]


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(getattr(v, "name", v) for v in value)
    return value
