"""Where a value came from: sources and their priority, parameter descriptors, text to value."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Literal

from sparseengine.errors import ConfigError


class Source(StrEnum):
    """Who gave a value."""

    CLI = "cli"
    API = "api"
    FILE = "file"
    ENV = "env"
    MODEL = "model"
    DEVICE = "device"
    DEFAULT = "default"

    @property
    def priority(self) -> int:
        """Smaller wins; the command line and Python calls rank alike."""
        order = (Source.FILE, Source.ENV, Source.MODEL, Source.DEVICE, Source.DEFAULT)
        return order.index(self) + 1 if self in order else 0


class Affects(Enum):
    """What changes when a parameter changes; decides which digests it enters."""

    NUMERICS = "numerics"
    LAYOUT = "layout"
    GRAPH = "graph"

    @staticmethod
    def digest(values: Mapping[str, Any]) -> str:
        """A short hash of parameters' values, by name."""
        text = json.dumps(values, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Given:
    """One input: what somebody asked for, who, and where exactly (flag, file, variable ...)."""

    value: Any
    source: Source
    origin: str


@dataclass(frozen=True, slots=True)
class Value:
    """The winning input of one parameter and those it beat, in order of priority."""

    value: Any
    source: Source
    origin: str
    shadowed: tuple[Given, ...] = ()

    def outrank(self, value: Any, source: Source, origin: str) -> Value:
        """The same parameter after one more, weaker input filled in for a default."""
        lost = (Given(self.value, self.source, self.origin), *self.shadowed)
        return Value(value, source, origin, lost)

    def __str__(self) -> str:
        lost = "".join(f"; over {g.value!r} from {g.origin}" for g in self.shadowed)
        return f"{self.value!r} ({self.source}: {self.origin}{lost})"


def pick(inputs: list[Given]) -> Value:
    """The strongest input (the first of equals); the rest are kept as shadowed."""
    ranked = sorted(inputs, key=lambda g: g.source.priority)
    best = ranked[0]
    return Value(best.value, best.source, best.origin, tuple(ranked[1:]))


Kind = Literal["str", "int", "size", "float", "bool", "json", "names", "budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter of the engine: where it lives, what it is called, what it may be.

    `flag` is the command-line name and, with underscores, the keyword of `LLM(...)`; `aliases` are
    further keywords. `kind` says how text is read; `auto` lets "auto" and "" mean "decide for me"
    (None). `env` follows from `env.VARIABLES`.
    """

    path: str
    flag: str
    kind: Kind
    doc: str
    default: Any = None
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    check: Callable[[Any], str | None] | None = None
    auto: bool = False
    affects: frozenset[Affects] = frozenset()

    @property
    def keyword(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")

    def parse(self, raw: Any, origin: str) -> Any:
        """Text, JSON or Python value -> checked value. Raises `ConfigError` naming the knob."""
        if raw is None or (self.auto and raw in ("auto", "")):
            return self.default if raw is None else None
        try:
            value = _READERS[self.kind](raw)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{origin}: {raw!r} is not allowed; it must be {error}") from None
        if self.choices is not None and value not in self.choices:
            allowed = ", ".join(self.choices)
            raise ConfigError(f"{origin}: {raw!r} is not allowed; it must be one of {allowed}")
        problem = self.check(value) if self.check is not None else None
        if problem is not None:
            raise ConfigError(f"{origin}: {raw!r} is not allowed; it must be {problem}")
        return value


_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def read_size(raw: Any) -> int:
    """An integer, or text such as 4096, 12k (12,000), 12K (12,288), 1.5g, 2GiB."""
    if isinstance(raw, bool) or not isinstance(raw, (int, str)):
        raise ValueError("an integer, or text such as '4096', '12K' or '2GiB'")
    if isinstance(raw, int):
        return raw
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*(?:([kmgtKMGT])(?:iB|B)?)?\s*", raw)
    if match is None:
        raise ValueError("an integer, or text such as '4096', '12K' or '2GiB'")
    number, unit = match.groups()
    scale = {**_DECIMAL, **_BINARY}.get(unit or "", 1)
    value = float(number) * scale
    if value != int(value):
        raise ValueError("a whole number")
    return int(value)


def _read_int(raw: Any) -> int:
    if isinstance(raw, str) and re.fullmatch(r"\s*[+-]?\d+\s*", raw):
        return int(raw)
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    raise ValueError("an integer")


def _read_float(raw: Any) -> float:
    if isinstance(raw, (int, float, str)) and not isinstance(raw, bool):
        try:
            value = float(raw)
        except ValueError:
            raise ValueError("a number") from None
        if math.isfinite(value):
            return value
    raise ValueError("a finite number")


def _read_bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(raw, str) and raw.lower() in words:
        return words[raw.lower()]
    raise ValueError("true or false")


def _read_str(raw: Any) -> str:
    if isinstance(raw, (str,)) or hasattr(raw, "__fspath__"):
        return str(raw)
    raise ValueError("text")


def _read_json(raw: Any) -> dict[str, Any]:
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except json.JSONDecodeError as error:
            raise ValueError(f"a JSON object ({error})") from None
    if not isinstance(raw, Mapping) or not all(isinstance(k, str) for k in raw):
        raise ValueError("a JSON object with names as keys")
    return dict(raw)


def _read_names(raw: Any) -> tuple[str, ...]:
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, (list, tuple, set, frozenset)):
        raise ValueError("a list of names, or names joined by commas")
    if not all(isinstance(p, str) for p in parts):
        raise ValueError("a list of names, or names joined by commas")
    names = [p.strip() for p in parts]
    return tuple(dict.fromkeys(n for n in names if n))


def read_budget(raw: Any) -> int | float:
    """Tokens for an integer ("512", "2K"); the kept fraction for a number with a point ("0.25")."""
    wanted = "a number of tokens >= 1, or a kept fraction in (0, 1] written with a point"
    value: int | float
    if isinstance(raw, str) and re.fullmatch(r"\s*[+-]?(\d*\.\d*|\d+e-?\d+)\s*", raw):
        try:
            value = float(raw)
        except ValueError:
            raise ValueError(wanted) from None
    elif isinstance(raw, float):
        value = raw
    else:
        try:
            value = read_size(raw)
        except ValueError:
            raise ValueError(wanted) from None
    ok = 0 < value <= 1 if isinstance(value, float) else value >= 1
    if not ok:
        raise ValueError(wanted)
    return value


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "str": _read_str,
    "int": _read_int,
    "size": read_size,
    "float": _read_float,
    "bool": _read_bool,
    "json": _read_json,
    "names": _read_names,
    "budget": read_budget,
}


def load_file(file: Path) -> Mapping[Any, Any]:
    """The names and values of a YAML or JSON file. Raises `ConfigError`."""
    import yaml

    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"--config {file}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: not YAML or JSON: {error}") from None
    if not isinstance(data, Mapping):
        raise ConfigError(f"--config {file}: must hold names and values, not {type(data).__name__}")
    return data


# ── checks of a parameter: None, or what it must be ──────────────────────────────────────────────


def at_least(low: int) -> Callable[[Any], str | None]:
    return lambda v: None if v >= low else f"{low} or more"


def fraction(value: float) -> str | None:
    return None if 0 < value <= 1 else "in (0, 1]"


def page_size(value: int) -> str | None:
    ok = 1 <= value <= 256 and value & (value - 1) == 0
    return None if ok else "a power of two in [1, 256]"


def seed(value: int) -> str | None:
    return None if -(1 << 63) <= value < 1 << 63 else "a 64-bit integer"
