"""Calibration files, and what a method watches in dense runs to make one.

A file is JSON that belongs to one method and one model:

    {"format": "sparseengine-calibration", "version": 1, "method": ..., "model": {"name": ...,
     "fingerprint": ...}, "run": {what was read}, "data": {what the method takes from it}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparseengine.core.method import LayerStep
from sparseengine.core.plan import Purpose
from sparseengine.core.specs import LayerSpec, ModelSpec
from sparseengine.errors import ConfigError, RequestError
from sparseengine.methods.families import Method
from sparseengine.methods.knobs import knob
from sparseengine.registry import Registry

FORMAT = "sparseengine-calibration"
VERSION = 1
_LARGEST_FILE = 64 << 20
_SHOWN = 80  # characters of a file's own words that an error repeats

CALIBRATORS = Registry(
    "method that can be calibrated",
    {
        "omnikv": "sparseengine.methods.calibrators.filters:FilterLayers",
        "duo_attention": "sparseengine.methods.calibrators.gates:Gates",
        "expected_attention": "sparseengine.methods.calibrators.moments:Moments",
        "double_sparsity": "sparseengine.methods.calibrators.channels:Channels",
    },
)


def calibration_knob() -> Any:
    """The knob of every method that can be calibrated."""
    return knob("", "file that `sparseengine calibrate` wrote for this method and this model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a calibrator looks at: `budget` tokens that a row may read or retain, of `length`.

    settings: the method's own knobs, which calibrators take sinks and the like from.
    """

    length: int
    budget: int
    settings: Any


class Calibrator(Method):
    """Watches prompts that run densely, chunk by chunk, and says what it learnt of the model.

    It takes the place of the dense method in an engine. repeats: whether the last quarter of its
    texts must repeat the first.
    """

    name = "calibration"
    repeats: ClassVar[bool] = False

    def __init__(self, reading: Reading, model: ModelSpec) -> None:
        super().__init__(reading, model)
        self.reading = reading

    def watch(self, at: LayerStep, chunk: int) -> None:
        """One chunk of a prompt at one layer, after attention."""
        raise NotImplementedError

    def result(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the file's data, a few figures for people). Raises `ConfigError` if nothing was seen."""
        raise NotImplementedError

    def observe(self, at: LayerStep) -> None:
        for i, chunk in enumerate(at.plan.chunks):
            if chunk.purpose is Purpose.PREFILL:
                self.watch(at, i)


def sampled(at: LayerStep, chunk: int, wanted: range) -> tuple[Tensor, Tensor]:
    """Those queries of a chunk whose positions are wanted: int64 [n], and fp32 [n, Hq, D]."""
    lo, _ = at.span(chunk)
    own = at.plan.chunks[chunk]
    positions = [p for p in wanted if own.start <= p < own.stop]
    index = torch.tensor(positions, dtype=torch.int64, device=at.q.device)
    return index, at.q[lo + index - own.start].float()


def logits(q: Tensor, keys: Tensor, spec: LayerSpec) -> Tensor:
    """Scaled (and soft-capped) q.k: q [n, Hq, D], keys [Hkv, L, D] -> [n, Hq, L]."""
    grouped = torch.unflatten(q, 1, (spec.kv_heads, -1))  # [n, Hkv, g, D]
    found = torch.einsum("nhgd,hld->nhgl", grouped, keys.float()).flatten(1, 2)
    found = found * spec.softmax_scale
    return spec.softcap * torch.tanh(found / spec.softcap) if spec.softcap else found


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def write_calibration(
    path: Path, method: str, name: str, model: ModelSpec, run: Mapping[str, Any], data: Any
) -> None:
    """Raises `ConfigError` if the file cannot be written."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "method": method,
        "model": {"name": name, "fingerprint": model.fingerprint},
        "run": dict(run),
        "data": data,
    }
    try:
        path.write_text(json.dumps(document) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {str(path)!r}: {error.strerror}") from None


def read_calibration(path: str, method: str, model: ModelSpec) -> Mapping[str, Any]:
    """The data of a file. Raises `RequestError`: damaged, or of another version, method or model.

    What is no calibration file is refused in the same words whatever it is, so that nothing is told
    of it.
    """
    document = _document(path)
    if document is None:
        raise damaged(path)
    if document.get("version") != VERSION:
        raise RequestError(
            f"sparse knob calibration={path!r} is not allowed; the file has version "
            f"{_clip(document.get('version'))}, this release reads version {VERSION}; make it anew "
            f"with `sparseengine calibrate`"
        )
    if document.get("method") != method:
        raise RequestError(
            f"sparse knob calibration={path!r} is not allowed; the file is of method "
            f"{_clip(document.get('method'))}, not {method!r}"
        )
    made_for, data = document.get("model"), document.get("data")
    if not isinstance(made_for, dict) or not isinstance(data, dict):
        raise damaged(path)
    if not model.fingerprint or made_for.get("fingerprint") != model.fingerprint:
        raise RequestError(
            f"sparse knob calibration={path!r} is not allowed; the file is of model "
            f"{_clip(made_for.get('name'))} with fingerprint "
            f"{_clip(made_for.get('fingerprint'))}, this model has fingerprint "
            f"{model.fingerprint or 'unknown'!r}; make one for it with `sparseengine calibrate "
            f"MODEL --method {method} --output FILE`"
        )
    return data


def damaged(path: str) -> RequestError:
    """The error for a file whose content cannot be used."""
    return RequestError(
        f"sparse knob calibration={path!r} is not allowed; it must be a whole file that "
        "`sparseengine calibrate` wrote"
    )


def refuse_both(method: str, **knobs: Any) -> None:
    """Raise `RequestError` if knobs that say the same as a calibration are given beside one."""
    given = [f"{name}={value!r}" for name, value in knobs.items() if value]
    if given:
        raise RequestError(
            f"{method}: {given[0]} and a calibration say the same thing; give one of them"
        )


def _document(path: str) -> dict[str, Any] | None:
    try:
        file = Path(path)
        if not file.is_file() or file.stat().st_size > _LARGEST_FILE:
            return None
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return None
    return document


def _clip(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
