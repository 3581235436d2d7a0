"""Choice among attention backends: pure, and it keeps its reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sparseengine.attention import BACKENDS
from sparseengine.core.attention import AttentionNeed, DeviceCaps, Support
from sparseengine.errors import UnsupportedError

# Declared priority, fastest first; the reference runs everything and is always last.
_ORDER = {"cuda": ("cudnn", "flash", "triton", "reference"), "cpu": ("cpu", "reference")}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDecision:
    """Which backend one site uses and why, with every rejected candidate and why.

    `evidence` is always "static_plan": this is what would run, not proof that it ran.
    """

    site: str
    selected: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    evidence: Literal["static_plan"] = "static_plan"

    def to_dict(self) -> dict[str, Any]:
        return {
            "site": self.site,
            "selected": self.selected,
            "reason": self.reason,
            "rejected": [{"route": name, "reason": reason} for name, reason in self.rejected],
            "evidence": self.evidence,
        }


def _candidates(need: AttentionNeed, caps: DeviceCaps, wanted: str) -> tuple[str, ...]:
    if wanted != "auto":
        return (BACKENDS.canonical(wanted),)
    return ("deterministic",) if need.deterministic else _ORDER[caps.kind]


def choose_backend(
    need: AttentionNeed, caps: DeviceCaps, wanted: str = "auto", *, site: str = "attention"
) -> RouteDecision:
    """The first backend that supports `need` on the device, in declared order.

    wanted: a backend's name to insist on it. Raises `UnsupportedError` with every reason when no
    candidate can run, and `ConfigError` for an unknown name.
    """
    names = _candidates(need, caps, wanted)
    rejected: list[tuple[str, str]] = []
    selected: tuple[str, str] | None = None
    for name in names:
        answer = BACKENDS.get(name)().supports(need, caps)
        if not answer.ok:
            rejected.append((name, answer.reason))
        elif selected is None:
            selected = (name, answer.reason)
        else:
            rejected.append((name, f"{selected[0]} comes before it: {answer.reason}"))
    if selected is None:
        raise UnsupportedError(
            f"no attention backend can run {need.layer.kind.name} attention in {need.dtype} on "
            f"{caps.kind} (attention_backend={wanted!r})",
            [f"{name}: {reason}" for name, reason in rejected],
        )
    rejected += [(n, _not_asked(n, need, caps, wanted)) for n in BACKENDS if n not in names]
    return RouteDecision(
        site=site, selected=selected[0], reason=selected[1], rejected=tuple(rejected)
    )


def _not_asked(name: str, need: AttentionNeed, caps: DeviceCaps, wanted: str) -> str:
    if wanted != "auto":
        return f"attention_backend={wanted!r} was asked for"
    if name == "deterministic":
        return "deterministic=False: faster backends are preferred"
    if need.deterministic:
        return "deterministic=True: its bits may depend on batch or chunking"
    answer: Support = BACKENDS.get(name)().supports(need, caps)
    return f"not in the declared order of {caps.kind}" if answer.ok else answer.reason
