"""Lazy name -> object registries. A registry lists itself without importing what it lists."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from sparseengine.errors import ConfigError, nearest


class Registry:
    """Maps names (and aliases) to `module:attr`, imported on first use.

    `entries` maps the canonical name to its target, `aliases` maps other names to canonical ones.
    An unknown name raises `ConfigError` that names the nearest known one.
    """

    def __init__(
        self, kind: str, entries: Mapping[str, str], aliases: Mapping[str, str] | None = None
    ) -> None:
        self.kind = kind
        self._entries = dict(entries)
        self._aliases = dict(aliases or {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._aliases

    def canonical(self, name: str) -> str:
        """The registered name behind `name`, which may be an alias."""
        found = self._aliases.get(name, name)
        if found not in self._entries:
            known = [*self._entries, *self._aliases]
            raise ConfigError(f"unknown {self.kind} {name!r}; {nearest(str(name), known)}")
        return found

    def aliases(self, name: str) -> tuple[str, ...]:
        return tuple(a for a, target in self._aliases.items() if target == name)

    def get(self, name: str) -> Any:
        """Import and return the object behind `name`."""
        module, attr = self._entries[self.canonical(name)].split(":")
        return getattr(importlib.import_module(module), attr)
