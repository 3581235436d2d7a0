"""Launch shapes of kernels: a built-in choice, unless a tuning file measured better ones here.

The built-in choice is made by capability probes (shared memory, multiprocessors, element size). A
tuning file (`sparseengine bench tune`) overrides it for kinds of devices it was measured on, told
apart by what was probed and by Triton's version, never by a product's name:

    {"format": 1, "devices": {"cuda 9.0, 132 multiprocessors, triton 3.6.0":
        {"decode": {"256 channels of 2 bytes": {"keys": 64, "warps": 8}}}}}

Whatever a file says is cut down to the shared memory there is, as the built-in choice is.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from sparseengine.errors import ConfigError

FORMAT = 1
BUILT_IN = "built in"
# What may be set of each op, and to what: powers of two up to a bound, or flags.
_SIZES = {"keys": 512, "pairs": 256, "rows": 256, "cols": 512, "depth": 512, "warps": 16}
_STAGES, _FLAGS = 8, ("swap", "tma", "half")
OPS: Mapping[str, tuple[str, ...]] = {
    "decode": ("keys", "warps", "stages"),
    "prefill": ("keys", "pairs", "warps", "stages"),
    "latent": ("keys", "warps", "stages"),
    "moe_up": ("rows", "cols", "depth", "warps", "stages", *_FLAGS),
    "moe_down": ("cols", "depth", "warps", "stages", *_FLAGS),
}

Entries = Mapping[str, Mapping[str, Mapping[str, Any]]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Launch shapes in force: by op and kind of shape. ignored: why a file's were not taken."""

    source: str = BUILT_IN
    entries: Entries = field(default_factory=dict)
    ignored: str = ""

    def __str__(self) -> str:
        if self.ignored:
            return f"{BUILT_IN}; {self.source} ignored: {self.ignored}"
        count = sum(len(shapes) for shapes in self.entries.values())
        return self.source if self.source == BUILT_IN else f"{self.source} ({count} tuned)"


def device_key(arch: tuple[int, int] | None, multiprocessors: int) -> str:
    """What launch shapes were measured for."""
    kind = "host" if arch is None else f"cuda {arch[0]}.{arch[1]}"
    found = importlib.util.find_spec("triton") is not None
    version = importlib.metadata.version("triton") if found else "none"
    return f"{kind}, {multiprocessors} multiprocessors, triton {version}"


def load(path: str, key: str) -> Tuned:
    """The shapes of a file for this kind of device; none, with the reason, when it has no such.

    Raises `ConfigError` for a file that cannot be read or holds anything else.
    """
    devices = read(path)
    if key in devices:
        return Tuned(source=path, entries=devices[key])
    return Tuned(source=path, ignored=f"it was made for {', '.join(devices)}; this is {key}")


def read(path: str) -> dict[str, Entries]:
    """All of a tuning file, checked."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"tuning_file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"tuning_file {path}: not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f"tuning_file {path}: wanted an object with format {FORMAT}")
    devices = data.get("devices")
    if not isinstance(devices, dict) or not devices:
        raise ConfigError(f"tuning_file {path}: wanted shapes by device under 'devices'")
    for key, entries in devices.items():
        for op, shape, values in _flat(path, entries):
            _check(f"tuning_file {path}, {key}, {op}, {shape}", op, values)
    return devices


def _flat(path: str, entries: Any) -> Iterator[tuple[str, str, Any]]:
    if not isinstance(entries, dict) or not all(isinstance(v, dict) for v in entries.values()):
        raise ConfigError(f"tuning_file {path}: wanted ops, and under each kinds of shapes")
    for op, shapes in entries.items():
        if op not in OPS:
            raise ConfigError(f"tuning_file {path}: unknown op {op!r}; it knows {', '.join(OPS)}")
        for shape, values in shapes.items():
            yield op, shape, values


def _check(where: str, op: str, values: Any) -> None:
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{where}: wanted some of {', '.join(OPS[op])}")
    for name, value in values.items():
        if name not in OPS[op]:
            raise ConfigError(f"{where}: unknown {name!r}; it takes {', '.join(OPS[op])}")
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if name in _FLAGS:
            ok, wanted = isinstance(value, bool), "true or false"
        elif name == "stages":
            ok, wanted = is_number and 1 <= value <= _STAGES, f"1 to {_STAGES}"
        else:
            least = 1 if name == "warps" else 16
            ok = is_number and least <= value <= _SIZES[name] and value & (value - 1) == 0
            wanted = f"a power of two from {least} to {_SIZES[name]}"
        if not ok:
            raise ConfigError(f"{where}: {name}={value!r} is not allowed; it must be {wanted}")


def write(path: str, key: str, entries: Entries, about: Mapping[str, Any]) -> None:
    """Put a device's shapes into a file; those of other devices, and of other ops, stay."""
    devices = dict(read(path)) if Path(path).exists() else {}
    devices[key] = {**devices.get(key, {}), **entries}
    data = {"format": FORMAT, "devices": devices, "made": dict(about)}
    try:
        Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from None


class _InForce:
    """The shapes of this process, and those already worked out from them."""

    def __init__(self) -> None:
        self.tuned = Tuned()
        self.made: dict[tuple[str, str, Any], Any] = {}
        self.asked: dict[tuple[str, str], Any] | None = None


_IN_FORCE = _InForce()


def use(tuned: Tuned) -> None:
    """Launch by these shapes from now on."""
    _IN_FORCE.tuned = tuned
    _IN_FORCE.made = {}


def in_force() -> Tuned:
    return _IN_FORCE.tuned


@contextmanager
def using(tuned: Tuned) -> Iterator[None]:
    """Launch by these shapes for a while."""
    before = _IN_FORCE.tuned
    use(tuned)
    try:
        yield
    finally:
        use(before)


@contextmanager
def recording() -> Iterator[dict[tuple[str, str], Any]]:
    """What is looked up meanwhile: (op, kind of shape) -> the built-in choice."""
    before, _IN_FORCE.asked = _IN_FORCE.asked, {}
    try:
        yield _IN_FORCE.asked
    finally:
        _IN_FORCE.asked = before


def launch_shape(op: str, shape: str, default: T) -> T:
    """The one place where launch parameters are looked up: the built-in `default`, with whatever a
    tuning file says of this op and kind of shape put over it."""
    if _IN_FORCE.asked is not None:
        _IN_FORCE.asked[op, shape] = default
    shapes = _IN_FORCE.tuned.entries.get(op)
    values = None if shapes is None else shapes.get(shape)
    if values is None:
        return default
    key = (op, shape, default)
    if key not in _IN_FORCE.made:
        known = {f.name for f in fields(default)}  # type: ignore[arg-type]
        chosen = {name: value for name, value in values.items() if name in known}
        _IN_FORCE.made[key] = replace(default, **chosen)  # type: ignore[type-var]
    made: T = _IN_FORCE.made[key]
    return made
