"""Line plots: what is drawn where, and what is refused."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from sparseengine.errors import ConfigError
from sparseengine.plots import Axis, line_plot, short, write_plot

SVG = "{http://www.w3.org/2000/svg}"
X, Y = Axis(label="context (tokens)", base=2), Axis(label="step (ms)", base=10)


def lines_of(svg: str) -> list[list[tuple[float, ...]]]:
    root = ElementTree.fromstring(svg)
    drawn = [p.get("points", "").split() for p in root.iter(f"{SVG}polyline")]
    return [[tuple(map(float, p.split(","))) for p in points] for points in drawn]


def test_points_lie_where_their_values_say() -> None:
    dense = [(1024, 1.0), (4096, 10.0), (16384, 100.0)]
    svg = line_plot("a < b", X, Y, {"full": dense[::-1], "<other>": [(1024, 1.0), (16384, 1.0)]})
    first, second = lines_of(svg)
    (x0, y0), (x1, y1), (x2, y2) = first
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # equal ratios, equal distances
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y1 > y2  # larger is higher up
    assert second == [(x0, y0), (x2, y0)]
    texts = [t.text for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert {"a < b", "full", "<other>", "1k", "16k", "100"} <= set(texts)


def test_a_linear_axis_starts_at_zero() -> None:
    svg = line_plot("t", Axis(label="x"), Axis(label="y"), {"a": [(0, 0), (50, 7), (100, 14)]})
    ((x0, y0), (x1, y1), (x2, y2)) = lines_of(svg)[0]
    assert (x2 - x0) == pytest.approx(2 * (x1 - x0), abs=0.2)
    assert (y0 - y2) == pytest.approx(2 * (y0 - y1), abs=0.2)
    assert [short(v) for v in (0.5, 12, 1000, 131072, 50000, 1 << 20)] == [
        *("0.5", "12", "1000", "128k", "50k", "1M")
    ]


@pytest.mark.parametrize("value", [0.003, 1.0, 7.0, 1234.5])
@pytest.mark.parametrize("base", [None, 2, 10])
def test_one_point_is_drawn_inside(value: float, base: int | None) -> None:
    svg = line_plot(
        "t", Axis(label="x", base=base), Axis(label="y", base=base), {"a": [(value,) * 2]}
    )
    ((x, y),) = lines_of(svg)[0]
    assert 0 < x < 760
    assert 0 < y < 440


def test_more_lines_than_colours_differ_in_their_markers() -> None:
    svg = line_plot("t", X, Y, {str(i): [(1, 1), (2, 2)] for i in range(9)})
    assert svg.count("<circle") == 8 * 3
    assert svg.count('width="7"') == 3


def test_nothing_to_plot_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to plot"):
        line_plot("t", X, Y, {"a": []})
    with pytest.raises(ConfigError, match=r"only \.svg"):
        write_plot(tmp_path / "x.png", "")
    with pytest.raises(ConfigError, match="does not exist"):
        write_plot(tmp_path / "none" / "x.svg", "")
