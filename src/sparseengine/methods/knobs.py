"""Knobs of a method: documented, validated fields of its frozen Config."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Self

from sparseengine.errors import RequestError, nearest

STAGE_KNOBS: Mapping[str, str] = {
    "allocate": "how rows share the budget of a scored eviction: uniform, pyramid, adakv, "
    "page_quanta",
    "allocate_scope": "which rows share, with adakv and page_quanta: those of a layer (default) or "
    "of the model",
    "select": "the method that selects what decode steps read of what an eviction retained",
    "select_tokens": "tokens per row that such a step reads",
    "select_config": "the selecting method's own knobs",
}


def knob(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] = (),
) -> Any:
    """A dataclass field with a sentence of documentation and the values it allows.

    The default's type is the knob's type: bool, int, float, str or a tuple of integers. `low` and
    `high` are inclusive and hold for each entry of a tuple.
    """
    meta = {"doc": doc, "low": low, "high": high, "choices": choices}
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodConfig:
    """Base of every method's Config. Wrong values raise `RequestError` that says what is allowed.

    presets: a name -> knob values of a published setting; `preset="name"` among the knobs loads it,
    other knobs given beside it win.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})

    def __post_init__(self) -> None:
        for f in fields(self):
            if "doc" not in f.metadata:
                continue
            value = getattr(self, f.name)
            if isinstance(f.default, tuple) and isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, f.name, value)
            if isinstance(f.default, float) and _is_int(value):
                value = float(value)
                object.__setattr__(self, f.name, value)
            if not _is_allowed(f, value):
                raise RequestError(
                    f"sparse knob {f.name}={value!r} is not allowed; it must be {allowed(f)}"
                )

    @classmethod
    def from_knobs(cls, method: str, knobs: Mapping[str, Any]) -> Self:
        """Build from untrusted names; an unknown one raises `RequestError` with the nearest."""
        given = dict(knobs)
        known = cls.knob_names()
        values: dict[str, Any] = {}
        if "preset" in given:
            values.update(cls.preset(method, given.pop("preset")))
        for name in given:
            if name not in known:
                hint = nearest(str(name), (*known, *STAGE_KNOBS)) if known else "it takes none"
                raise RequestError(f"{method}: unknown knob {name!r}; {hint}")
        return cls(**{**values, **given})

    @classmethod
    def preset(cls, method: str, name: object) -> Mapping[str, Any]:
        """The knobs of a published setting; an unknown one raises `RequestError` with all names."""
        if isinstance(name, str) and name in cls.presets:
            return cls.presets[name]
        raise RequestError(f"{method}: {unknown_preset(name, cls.presets)}")

    @classmethod
    def knob_names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls) if "doc" in f.metadata)

    @classmethod
    def describe(cls) -> list[dict[str, Any]]:
        """One JSON-serialisable entry per knob: name, type, default, doc, allowed."""
        out: list[dict[str, Any]] = []
        for f in fields(cls):
            if "doc" in f.metadata and f.default is not MISSING:
                default = list(f.default) if isinstance(f.default, tuple) else f.default
                kind = "list of int" if isinstance(default, list) else type(default).__name__
                entry = {"name": f.name, "type": kind, "default": default}
                out.append({**entry, "doc": f.metadata["doc"], "allowed": allowed(f)})
        if cls.presets:
            names = sorted(cls.presets)
            doc = "a published setting to start from; knobs given beside it win"
            entry = {"name": "preset", "type": "str", "default": "", "doc": doc}
            out.append({**entry, "allowed": "one of " + ", ".join(map(repr, names))})
        return out


def unknown_preset(name: object, known: Collection[str]) -> str:
    """What to say of a preset that there is not."""
    if not known:
        return f"unknown preset {name!r}; it has none"
    names = ", ".join(map(repr, sorted(known)))
    return f"unknown preset {name!r}; {nearest(str(name), known)}; known: {names}"


def allowed(f: Field[Any]) -> str:
    """The values of a knob in words."""
    meta, default = f.metadata, f.default
    if meta["choices"]:
        return "one of " + ", ".join(map(repr, meta["choices"]))
    if isinstance(default, bool):
        return "True or False"
    if isinstance(default, str):
        return "a string"
    noun = "a number" if isinstance(default, float) else "an integer"
    if isinstance(default, tuple):
        noun = "a list of integers"
    low, high = meta["low"], meta["high"]
    if low is not None and high is not None:
        return f"{noun} in [{low}, {high}]"
    return noun if low is None else f"{noun} >= {low}"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_allowed(f: Field[Any], value: Any) -> bool:
    default, meta = f.default, f.metadata
    if meta["choices"]:
        return any(value == c and type(value) is type(c) for c in meta["choices"])
    if isinstance(default, (bool, str)):
        return type(value) is type(default)
    if isinstance(default, tuple):
        return isinstance(value, tuple) and all(_is_int(v) and _in_range(meta, v) for v in value)
    if isinstance(default, float):
        return isinstance(value, float) and math.isfinite(value) and _in_range(meta, value)
    return _is_int(value) and _in_range(meta, value)


def _in_range(meta: Mapping[str, Any], value: float) -> bool:
    low, high = meta["low"], meta["high"]
    return (low is None or value >= low) and (high is None or value <= high)
