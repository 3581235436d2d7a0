"""A checkpoint's config: what a user overrides in it, and quantisation, which is not read yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparseengine.errors import UnsupportedError

# What a new rope_type keeps of the old rope dictionary: the rest are parameters of the old type.
_ROPE_KEPT = ("rope_theta", "partial_rotary_factor")


def override(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `overrides` merged in: dictionaries key by key, anything else replaced.

    Rotation has two spellings, `rope_parameters` (transformers 5) and `rope_theta` with
    `rope_scaling`. The config is put into the one that the overrides use first, so that none of
    them is silently outranked by the other spelling. A new rope_type starts from the base frequency
    alone, without the parameters of the old type.
    """
    return _merge(_respell(config, overrides), overrides)


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    kind = new.get("rope_type", new.get("type"))
    if kind is not None and kind != old.get("rope_type", old.get("type")) and _is_rope(old):
        old = {name: old[name] for name in _ROPE_KEPT if name in old}
    merged = dict(old)
    for name, value in new.items():
        before = merged.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            merged[name] = _merge(before, value)
        else:
            merged[name] = value
    return merged


def _is_rope(values: Mapping[str, Any]) -> bool:
    return "rope_type" in values or "type" in values or "rope_theta" in values


def _respell(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its rotation in the overrides' spelling, unless it has one per layer type."""
    found = dict(config)
    new, wanted = found.get("rope_parameters"), overrides.get("rope_parameters")
    if isinstance(wanted, Mapping) and not _per_layer_type(wanted) and not _per_layer_type(new):
        old = {**(new or {}), **(found.pop("rope_scaling", None) or {})}
        theta = found.pop("rope_theta", None)
        found["rope_parameters"] = old if theta is None else {"rope_theta": theta, **old}
    elif overrides.keys() & {"rope_scaling", "rope_theta"} and new and not _per_layer_type(new):
        scaling = dict(found.pop("rope_parameters"))
        theta = scaling.pop("rope_theta", None)
        if theta is not None:
            found.setdefault("rope_theta", theta)
        found.setdefault("rope_scaling", scaling)
    return found


def _per_layer_type(rope: Any) -> bool:
    return isinstance(rope, Mapping) and any(isinstance(v, Mapping) for v in rope.values())


def refuse_quantised(config: Mapping[str, Any], where: str) -> None:
    """Raises UnsupportedError that names the format of a quantised checkpoint."""
    inner = config.get("text_config") or {}
    found = next(
        (
            holder[name]
            for holder in (config, inner)
            for name in ("quantization_config", "compression_config")
            if holder.get(name)
        ),
        None,
    )
    if found is None:
        return
    values = found if isinstance(found, Mapping) else {}
    kind = str(values.get("quant_method") or values.get("quantization_method") or "unnamed")
    bits = values.get("bits") or values.get("w_bit")
    if kind == "bitsandbytes" or not bits:
        loaded = [b for b in (4, 8) if values.get(f"load_in_{b}bit")]
        bits = loaded[0] if loaded else bits
    detail = [f"{bits} bits"] if bits else []
    detail += [str(values["format"])] if values.get("format") else []
    shown = f"{kind} ({', '.join(detail)})" if detail else kind
    raise UnsupportedError(
        f"{where} is a quantised checkpoint of the format {shown}, which is not supported yet; "
        "unquantised safetensors (bfloat16, float16, float32) and GGUF files can be loaded"
    )
