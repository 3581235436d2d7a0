"""Quality against measured bytes, as a picture. Needs matplotlib (the extra `plots`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseengine.console import note

_BYTES = (("resident", "KV bytes held per token"), ("read", "KV bytes read per step and token"))
_LINEAR = 1e-3  # below it a logarithmic axis is linear
_MARKS = "osD^vP*X<>pd"


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

    Points of one method are joined. `log` suits what is 0 for dense. Without matplotlib there is a
    note and no picture.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        note(f"no {path.name}: it needs matplotlib; pip install 'sparseengine[plots]'")
        return
    if not points:
        return
    panels = list(dict.fromkeys(point.panel for point in points))
    methods = list(dict.fromkeys(point.method for point in points))
    figure = Figure(figsize=(11, 0.6 + 3.6 * len(panels)), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(len(panels), 2, squeeze=False, sharey="row")
    colours = matplotlib.colormaps["tab20"]
    for row, panel in zip(axes, panels, strict=True):
        for axis, (name, label) in zip(row, _BYTES, strict=True):
            for i, method in enumerate(methods):
                mine = [p for p in points if (p.panel, p.method) == (panel, method)]
                style = {"color": colours(i % 20), "marker": _MARKS[i % len(_MARKS)]}
                _line(axis, mine, name, method, style)
            axis.set_xlabel(label)
            axis.set_title(panel, fontsize=9)
            axis.grid(visible=True, alpha=0.3)
            axis.set_xlim(left=0)
            if log:
                axis.set_yscale("symlog", linthresh=_LINEAR)  # dense is at 0
                axis.set_ylim(0, 1.5 * max(_LINEAR, *(p.quality for p in points)))
        row[0].set_ylabel(quality)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    # the same picture is the same file
    with matplotlib.rc_context({"svg.hashsalt": "sparseengine"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _line(axis: Any, points: Sequence[Point], name: str, label: str, style: Any) -> None:
    pairs = sorted(
        (x, point.quality) for point in points if (x := getattr(point, name)) is not None
    )
    axis.plot([x for x, _ in pairs], [y for _, y in pairs], label=label, lw=1, ms=5, **style)
