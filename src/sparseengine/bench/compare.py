"""`--compare PATH`: this run's rows against those of an earlier run, ours or another engine's.

A path is a result folder, a folder of such folders, an aggregate.json, or a file of JSON lines (a
saved last line of a `bench` command; any tool's rows with our names). Rows match when every name in
`IDENTITY` that both have is equal. A row without a method is another engine's: it is compared with
all of ours of that model and prompt length, at our batch if it ran at it, else at its fastest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseengine.errors import ConfigError

Row = Mapping[str, Any]

IDENTITY = ("model", "method", "budget", "input_len", "batch", "load", "op")
SHAPES = (("input_len", "batch"), ("input_len", "requests"), ("load",), ("op",))
HIGHER_IS_BETTER = {
    "requests": True,
    "decode_tok_s": True,
    "prefill_tok_s": True,
    "output_tok_s": True,
    "ttft_ms": False,
    "itl_ms": False,
    "time_us": False,
}
_SYNONYMS = {"prompt_len": "input_len"}


class Earlier:
    """The rows behind one --compare path, read before anything is measured."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.rows = [_renamed(row) for row in _read(Path(path))]
        if not self.rows:
            raise ConfigError(f"--compare {path}: holds no result rows")

    def ratios(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """One entry per row of ours that has a match: ratios, above 1 where ours is better."""
        found = []
        for row in rows:
            other = self._match(row)
            values = {} if other is None else _ratios(row, other)
            if other is None or not values:
                continue
            entry = {k: row[k] for k in IDENTITY if row.get(k) is not None}
            entry["with"] = self.path
            if other.get("batch") != row.get("batch"):
                entry["with_batch"] = other.get("batch")
            found.append({**entry, **values})
        return found

    def _match(self, row: Row) -> Row | None:
        same = [r for r in self.rows if _alike(row, r, IDENTITY)]
        if same:
            return same[-1]
        looser = [name for name in IDENTITY if name != "batch"]
        others = [r for r in self.rows if "method" not in r and _alike(row, r, looser)]
        return max(others, key=lambda r: r.get("decode_tok_s") or 0.0, default=None)


def _renamed(row: Row) -> dict[str, Any]:
    return {_SYNONYMS.get(name, name): value for name, value in row.items()}


def _alike(a: Row, b: Row, names: Sequence[str]) -> bool:
    shaped = any(all(n in a and n in b for n in shape) for shape in SHAPES)
    return shaped and all(a[n] == b[n] for n in names if n in a and n in b)


def _ratios(row: Row, other: Row) -> dict[str, float]:
    found = {}
    for name, higher in HIGHER_IS_BETTER.items():
        mine, base = _number(row.get(name)), _number(other.get(name))
        if mine and base:
            found[name] = mine / base if higher else base / mine
    return found


def _number(value: Any) -> float | None:
    """A figure, or the first (the median) of several."""
    value = value[0] if isinstance(value, list) and value else value
    return float(value) if isinstance(value, (int, float)) else None


def _read(path: Path) -> Iterator[Row]:
    if path.is_dir():
        files = sorted(path.rglob("aggregate.json"))
        if not files:
            raise ConfigError(f"--compare {path}: no aggregate.json in this folder")
        for file in files:
            yield from _read(file)
        return
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--compare {path}: {error.strerror}") from None
    yield from _rows_of(path, _documents(text))


def _documents(text: str) -> list[Any]:
    """The file as one JSON document, else the lines of it that are."""
    try:
        return [json.loads(text)]
    except ValueError:
        pass
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # a table above the last line
    return found


def _rows_of(path: Path, documents: Sequence[Any]) -> Iterator[Row]:
    for document in documents:
        rows = document.get("rows", [document]) if isinstance(document, dict) else document
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigError(f"--compare {path}: wanted a list of result rows")
        yield from (row for row in rows if HIGHER_IS_BETTER.keys() & row.keys())
