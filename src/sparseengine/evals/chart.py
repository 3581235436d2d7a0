"""Quality against measured bytes, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparseengine.plots import Axis, grid, line_plot, write_plot

_BYTES = (("resident", "KV bytes held per token"), ("read", "KV bytes read per step and token"))
_LEAST = 1e-4  # what is smaller is drawn here where the axis is logarithmic


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One method with one budget in one panel (a protocol and a length, say).

    Bytes are per token that dense attention would hold; None where nothing was measured.
    """

    panel: str
    method: str
    resident: float | None
    read: float | None
    quality: float


def draw(path: Path, points: Sequence[Point], *, quality: str, log: bool = False) -> None:
    """Two pictures for each panel: quality over bytes held, and over bytes read.

    Points of one method are joined. `log` suits what is 0 for dense. No points: no picture.
    """
    y = Axis(label=quality, base=10 if log else None)
    note = f"values below {_LEAST:g} are drawn there" if log else ""
    plots = []
    for panel in dict.fromkeys(point.panel for point in points):
        for name, label in _BYTES:
            series: dict[str, list[tuple[float, float]]] = {}
            for point in points:
                size: float | None = getattr(point, name)
                if point.panel == panel and size is not None:
                    height = max(point.quality, _LEAST) if log else point.quality
                    series.setdefault(point.method, []).append((size, height))
            if series:
                plots.append(line_plot(panel, Axis(label=label), y, series, note))
    if plots:
        write_plot(path, grid(plots, 2))
