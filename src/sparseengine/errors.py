"""Errors a user can meet; each names what was asked, what is possible, which knob to turn."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SparseEngineError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(SparseEngineError, ValueError):
    """A value given at start-up (config, model folder, flag) is wrong."""


class RequestError(SparseEngineError, ValueError):
    """One request is wrong; the engine and the other requests go on. `param` may name the field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(RequestError):
    """A request can never fit into the KV memory; carries both numbers."""

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class UnsupportedError(ConfigError):
    """A combination (method x model, dtype x backend ...) cannot run; `reasons` says why."""

    def __init__(self, message: str, reasons: Iterable[str] = ()) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join([message, *self.reasons]))


def nearest(name: str, known: Iterable[str]) -> str:
    """A `did you mean` tail for an error message; lists the known names if none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
