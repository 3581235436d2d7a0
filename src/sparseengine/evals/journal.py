"""What an evaluation has measured so far, on disk: a run that was cut short can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseengine.errors import ConfigError

NAME = "progress.jsonl"


class Journal:
    """Finished cells by their key: a row and its samples each, appended as they come.

    The first line has the settings; going on with other settings is refused. Without a folder
    nothing is written.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.samples: dict[str, list[dict[str, Any]]] = {}
        self._file = None if folder is None else folder / NAME
        if resume and self._file is None:
            raise ConfigError("--resume needs the --output of the run that it goes on with")
        if self._file is None:
            return
        if resume and self._file.exists():
            self._read(self._file, settings)
        else:
            self._file.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")

    def __contains__(self, key: Mapping[str, Any]) -> bool:
        return _text(key) in self.rows

    def add(
        self, key: Mapping[str, Any], row: dict[str, Any], samples: Sequence[dict[str, Any]]
    ) -> None:
        self.rows[_text(key)], self.samples[_text(key)] = row, list(samples)
        if self._file is not None:
            line = json.dumps({"key": key, "row": row, "samples": samples})
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def take(
        self, keys: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(rows, samples) of those cells that are finished, in this order."""
        done = [text for text in map(_text, keys) if text in self.rows]
        return [self.rows[t] for t in done], [s for t in done for s in self.samples[t]]

    def _read(self, file: Path, settings: Mapping[str, Any]) -> None:
        whole, _, partial = file.read_text(encoding="utf-8").rpartition("\n")
        lines = whole.splitlines()
        if partial:  # cut off while it was written
            file.write_text(whole + "\n", encoding="utf-8")
        try:
            first, *others = [json.loads(line) for line in lines]
            before = first["settings"]
            cells = [(_text(c["key"]), c["row"], c["samples"]) for c in others]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--resume: {file} is damaged ({error}); start anew") from None
        now = json.loads(json.dumps(settings))
        for name in [*before, *now]:
            if before.get(name) != now.get(name):
                raise ConfigError(
                    f"--resume: {file} was begun with {name}={before.get(name)!r}, not "
                    f"{now.get(name)!r}; give the same settings, or another --output"
                )
        for key, row, samples in cells:
            self.rows[key], self.samples[key] = row, samples


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
