"""The only reader of the process environment.

An empty value means "not set". Names that start with SPARSEENGINE_ and are not listed here are
reported with the nearest known one, once per process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparseengine.errors import nearest

PREFIX = "SPARSEENGINE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One environment variable. `path` is the config value it sets, if it sets one."""

    name: str
    doc: str
    path: str | None = None


VARIABLES: tuple[Variable, ...] = (
    Variable(
        name="SPARSEENGINE_CACHE_DIR",
        doc="where `pull` stores models (default: $XDG_CACHE_HOME/sparseengine or "
        "~/.cache/sparseengine)",
    ),
    Variable(name="SPARSEENGINE_API_KEY", doc="a key that clients of `serve` must send"),
    Variable(name="SPARSEENGINE_DEVICE", doc="where to run", path="runtime.device"),
    Variable(
        name="SPARSEENGINE_ATTENTION_BACKEND",
        doc="which attention backend to use",
        path="runtime.attention_backend",
    ),
    Variable(
        name="SPARSEENGINE_DETERMINISTIC",
        doc="results that do not depend on what shares the batch",
        path="runtime.deterministic",
    ),
    Variable(
        name="SPARSEENGINE_TUNING_FILE",
        doc="launch shapes of kernels that `bench tune` has measured",
        path="runtime.tuning_file",
    ),
    Variable(
        name="SPARSEENGINE_KV_CACHE_MEMORY_BYTES",
        doc="memory for the KV cache",
        path="cache.kv_cache_memory_bytes",
    ),
)


def _read(name: str) -> str | None:
    return os.environ.get(name) or None


def config_values() -> Mapping[str, tuple[str, str]]:
    """Config path -> (text, variable name), for the variables that are set."""
    found = {}
    for variable in VARIABLES:
        text = _read(variable.name)
        if variable.path is not None and text is not None:
            found[variable.path] = (text, variable.name)
    return found


def cache_dir() -> Path:
    """The folder that `pull` fills and models are looked up in; it may not exist yet."""
    own = _read("SPARSEENGINE_CACHE_DIR")
    if own is not None:
        return Path(own).expanduser()
    shared = _read("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "sparseengine"


def api_key() -> str | None:
    """The key that clients of a server must send, beside those of --api-key."""
    return _read("SPARSEENGINE_API_KEY")


def bound_kernel_caches() -> None:
    """For processes started from here: torch's CPU kernels are kept for 64 shapes, not 1,024.

    A server meets every shape there is, and each takes a few hundred kilobytes. What the user has
    set stays.
    """
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")


def triton_interpreted() -> bool:
    """True when Triton kernels run in its interpreter, on the CPU."""
    return (_read("TRITON_INTERPRET") or "0") not in ("0", "false", "False")


def unknown() -> list[str]:
    """One message for each variable with our prefix that nothing reads."""
    known = [v.name for v in VARIABLES]
    return [
        f"environment variable {name} is not known; {nearest(name, known)}"
        for name in sorted(os.environ)
        if name.startswith(PREFIX) and name not in known
    ]


def warn_unknown() -> None:
    """Warn about misspelt variables; Python shows the same warning once per process."""
    for message in unknown():
        warnings.warn(message, UserWarning, stacklevel=2)
