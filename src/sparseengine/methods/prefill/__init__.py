"""Patterns of sparse prefill, one file each, and the registry that lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from inspect import getdoc
from typing import Any

from sparseengine.core.prefill import PrefillPattern
from sparseengine.core.specs import ModelSpec
from sparseengine.errors import UnsupportedError
from sparseengine.registry import Registry

PATTERNS = Registry(
    "prefill pattern",
    {
        "dense": "sparseengine.methods.prefill.dense:Dense",
        "a_shape": "sparseengine.methods.prefill.a_shape:AShape",
        "minference": "sparseengine.methods.prefill.minference:MInference",
        "xattention": "sparseengine.methods.prefill.xattention:XAttention",
        "flexprefill": "sparseengine.methods.prefill.flexprefill:FlexPrefill",
    },
)


def make_pattern(name: str, knobs: Mapping[str, Any], model: ModelSpec) -> PrefillPattern:
    """An instance of a pattern with these knobs for this model.

    Raises `ConfigError` for an unknown pattern and `RequestError` for an unknown or wrong knob,
    both naming the nearest.
    """
    pattern_class = PATTERNS.get(name)
    config = pattern_class.config_class.from_knobs(PATTERNS.canonical(name), knobs)
    pattern: PrefillPattern = pattern_class(config, model)
    return pattern


def check_pattern(pattern: PrefillPattern, model: ModelSpec) -> None:
    """Raise `UnsupportedError` with the reason if the pattern can do nothing for this model."""
    present = {spec.kind for spec in model.layers}
    if not present & pattern.traits.kinds and type(pattern).pattern is not PrefillPattern.pattern:
        acts = ", ".join(sorted(k.name for k in pattern.traits.kinds))
        has = ", ".join(sorted(k.name for k in present))
        raise UnsupportedError(
            f"prefill pattern {pattern.name!r} cannot run on this model",
            [f"it acts on layers of kind {acts}; the model has {has} layers only"],
        )


def describe_patterns() -> list[dict[str, Any]]:
    """Every registered pattern as JSON-ready data, from code alone.

    Keys: name, aliases, summary, text (all of the docstring), family ("prefill"), traits, knobs
    (name, type, default, doc, allowed).
    """
    rows = []
    for name in PATTERNS:
        pattern = PATTERNS.get(name)
        traits = {f.name: _plain(getattr(pattern.traits, f.name)) for f in fields(pattern.traits)}
        rows.append(
            {
                "name": name,
                "aliases": list(PATTERNS.aliases(name)),
                "summary": (getdoc(pattern) or "").split("\n\n")[0].replace("\n", " "),
                "text": getdoc(pattern) or "",
                "family": "prefill",
                "traits": traits,
                "knobs": pattern.config_class.describe(),
            }
        )
    return rows


def _plain(value: Any) -> Any:
    return sorted(kind.name for kind in value) if isinstance(value, frozenset) else value
