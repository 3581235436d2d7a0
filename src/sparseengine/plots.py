"""Line plots as SVG text: benchmarks and evals draw them, browsers and README pages show them.

No plotting library: a GPU machine often has no network, and lines with markers are all we need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from sparseengine.errors import ConfigError

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 190, 44, 56
_INK, _MUTED, _GRID, _SURFACE = "#1f2328", "#57606a", "#e4e7eb", "#ffffff"
# Told apart by readers with colour vision deficiencies too (Okabe and Ito), and by their markers.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
_MARKERS = ("circle", "square", "diamond")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """label: with its unit. base: of a logarithmic axis; None: linear from zero."""

    label: str
    base: int | None = None


class _Scale:
    """Data to pixels along one axis."""

    def __init__(self, axis: Axis, values: Sequence[float], first: float, last: float) -> None:
        self.axis, self._first, self._last = axis, first, last
        self.ticks = _log_ticks(values, axis.base) if axis.base else _linear_ticks(max(values))
        low, high = min(values), max(values)
        self._low = self._at(min(low, self.ticks[0]))
        self._high = self._at(max(high, self.ticks[-1]))

    def _at(self, value: float) -> float:
        return math.log(value) if self.axis.base else value

    def __call__(self, value: float) -> float:
        span = self._high - self._low or 1.0
        return self._first + (self._at(value) - self._low) / span * (self._last - self._first)


def _linear_ticks(high: float) -> list[float]:
    step = 10 ** math.floor(math.log10(high or 1.0))
    size = next(s for s in (step / 5, step / 2, step, 2 * step) if high / s <= 6)
    return [i * size for i in range(math.ceil(high / size) + 1)]


def _log_ticks(values: Sequence[float], base: int | None) -> list[float]:
    if base == 2:
        first, last = (round(math.log2(v)) for v in (min(values), max(values)))
        step = max(1, (last - first) // 10)
        return [2.0**e for e in range(first, last + 1, step)]
    low, high = (math.floor(math.log10(v)) for v in (min(values), max(values)))
    steps = [m * 10.0**e for e in range(low, high + 2) for m in (1, 2, 5)]
    start = max((i for i, s in enumerate(steps) if s <= min(values) * 1.0001), default=0)
    stop = next(i for i, s in enumerate(steps) if s >= max(values) * 0.9999)
    return steps[start : max(stop, start + 1) + 1]


def short(value: float) -> str:
    """A tick: 1k for 1,024 as for 1,000, 0.5, 12."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= unit and value % unit == 0:
            return f"{value / unit:g}{name}"
    return f"{value / 1000:g}k" if value >= 10000 else f"{value:g}"


def line_plot(title: str, x: Axis, y: Axis, series: Mapping[str, Points], note: str = "") -> str:
    """An SVG document with one line and marker per series, and a legend beside it.

    Values on logarithmic axes must be above 0. Raises `ConfigError` when there is no point.
    """
    shown = {name: sorted(points) for name, points in series.items() if points}
    if not shown:
        raise ConfigError(f"{title}: there is nothing to plot")
    points = [p for some in shown.values() for p in some]
    to_x = _Scale(x, [p[0] for p in points], _LEFT, WIDTH - _RIGHT)
    to_y = _Scale(y, [p[1] for p in points], HEIGHT - _BOTTOM, _TOP)
    parts = [*_frame(title, to_x, to_y, note)]
    for i, (name, line) in enumerate(shown.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        marker = _MARKERS[i // len(_COLOURS) % len(_MARKERS)]
        at = [(to_x(a), to_y(b)) for a, b in line]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            _marker(marker, a, b, colour, f"{name}: {short(px)}, {py:.4g}")
            for (a, b), (px, py) in zip(at, line, strict=True)
        ]
        apart = min(20.0, (HEIGHT - _TOP - 20) / len(shown))
        row, left = _TOP + 10 + apart * i, WIDTH - _RIGHT + 20
        parts.append(_marker(marker, left, row, colour, name))
        parts.append(_text(left + 12, row + 4, name, anchor="start"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="{_SURFACE}"/>\n{body}\n</svg>\n'
    )


def grid(plots: Sequence[str], columns: int) -> str:
    """Several plots in one document, row by row."""
    rows = -(-len(plots) // columns)
    cells = "".join(
        plot.replace("<svg ", f'<svg x="{WIDTH * (i % columns)}" y="{HEIGHT * (i // columns)}" ', 1)
        for i, plot in enumerate(plots)
    )
    width, height = WIDTH * min(columns, len(plots)), HEIGHT * rows
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">\n{cells}</svg>\n'
    )


def _frame(title: str, to_x: _Scale, to_y: _Scale, note: str) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = [_text(_LEFT, 24, title, anchor="start", extra=' font-size="15" font-weight="600"')]
    for tick in to_y.ticks:
        at = to_y(tick)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{right}" stroke="{_GRID}"/>')
        parts.append(_text(_LEFT - 8, at + 4, short(tick), anchor="end", fill=_MUTED))
    for tick in to_x.ticks:
        parts.append(_text(to_x(tick), bottom + 18, short(tick), fill=_MUTED))
    parts.append(f'<path d="M{_LEFT} {bottom}H{right}" stroke="{_MUTED}"/>')
    middle = (_TOP + bottom) / 2
    turn = f' transform="rotate(-90 18 {middle:.1f})"'
    parts.append(_text((_LEFT + right) / 2, bottom + 38, to_x.axis.label))
    parts.append(_text(18, middle, to_y.axis.label, extra=turn))
    return [*parts, _text(_LEFT, HEIGHT - 4, note, anchor="start", fill=_MUTED)]


def _text(
    x: float, y: float, text: str, *, anchor: str = "middle", fill: str = _INK, extra: str = ""
) -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{extra}'
    return f"<text {at}>{escape(text)}</text>"


def _marker(kind: str, x: float, y: float, colour: str, label: str) -> str:
    tip = f"<title>{escape(label)}</title>"
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{tip}</circle>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if kind == "diamond" else ""
    at = f'x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"'
    return f'<rect {at} fill="{colour}"{turn}>{tip}</rect>'


def check_plot(path: str | Path) -> Path:
    """The file that a plot may be written to. Raises `ConfigError` when it may not."""
    file = Path(path)
    if file.suffix != ".svg":
        raise ConfigError(f"--plot {path}: only .svg is written; browsers show and convert it")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {file.parent} does not exist")
    return file


def write_plot(path: str | Path, svg: str) -> None:
    """Write an SVG file. Raises `ConfigError` where it cannot."""
    try:
        check_plot(path).write_text(svg, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}") from None
