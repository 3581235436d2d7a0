"""Launch shapes measured on this device, for `--tuning-file` (see ops/tuned.py).

Each case runs once to see which launch shapes are looked up; then each of these is varied, one
after the other, and kept where it is faster by more than noise and computes the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.attention.caps import device_caps
from sparseengine.attention.triton import TritonBackend
from sparseengine.bench.kernels import HEADS, LATENT, LAYER, head_view, latent_view
from sparseengine.bench.moe import LAYERS
from sparseengine.bench.timing import Bench, relative_error, times_us
from sparseengine.console import note, table
from sparseengine.core.specs import LayerKind, LayerSpec
from sparseengine.errors import ConfigError, nearest
from sparseengine.ops import tuned

GAIN = 0.98  # of the time so far: what a shape must stay below to be taken
TOLERANCE = 1e-2
CHOICES: dict[str, dict[str, Sequence[Any]]] = {
    "decode": {"keys": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)},
    "prefill": {"keys": (64, 128), "pairs": (64, 128), "warps": (4, 8), "stages": (2, 3)},
    "latent": {"keys": (16, 32, 64), "warps": (4, 8), "stages": (2, 3)},
    "moe_up": {"rows": (16, 32, 64, 128), "cols": (64, 128), "depth": (64, 128), "stages": (3, 4)},
    "moe_down": {"cols": (64, 128, 256), "depth": (64, 128), "stages": (3, 4), "warps": (4, 8)},
}
Call = Callable[[], Tensor]
Case = tuple[str, list[Call]]


def _decode_cases(bench: Bench) -> Iterator[Case]:
    for dim in (128, 64) if not bench.small else (32,):
        layer = _layer(dim)
        calls: list[Call] = []
        for spans, length in bench.some((320, 2176), (21, 32768)):
            spans, length = bench.size(spans, 2), bench.size(length, 16)
            view = head_view(bench, [length] * spans, [1] * spans, dim)
            q = bench.normal(spans, layer.q_heads, dim)
            calls.append(partial(TritonBackend().run, q, view, layer, None))
        yield f"decode, {dim} channels", calls


def _prefill_cases(bench: Bench) -> Iterator[Case]:
    for context, chunk in bench.some((32768, 4), (32768, 8192)):
        context, chunk = bench.size(context, 8), bench.size(chunk, 2)
        view = head_view(bench, [context], [chunk])
        q = bench.normal(chunk, LAYER.q_heads, LAYER.head_dim)
        yield f"prefill {chunk} of {context}", [partial(TritonBackend().run, q, view, LAYER, None)]


def _latent_cases(bench: Bench) -> Iterator[Case]:
    spans, length = bench.size(78, 2), bench.size(16384, 16)
    view = latent_view(bench, [length] * spans)
    q = bench.normal(spans, LATENT.q_heads, LATENT.head_dim)
    yield f"latent decode {spans} x {length}", [partial(TritonBackend().run, q, view, LATENT, None)]


def _moe_cases(bench: Bench) -> Iterator[Case]:
    layer = LAYERS[0]
    hidden, inner = bench.size(layer.hidden, 64), bench.size(layer.inner, 32)
    experts, router = layer.router.num_experts, layer.router
    gate_up = bench.normal(experts, 2 * inner, hidden) * hidden**-0.5
    down = bench.normal(experts, hidden, inner) * inner**-0.5
    for tokens in (16, 320, 2048, 8192) if not bench.small else (1,):
        logits = torch.randn(tokens, experts, device=bench.device)
        ids, weights = ops.moe_route(logits, None, router)
        x = bench.normal(tokens, hidden)
        yield f"experts, {tokens} tokens", [partial(_experts, x, gate_up, down, ids, weights)]


def _experts(*args: Tensor) -> Tensor:
    from sparseengine.ops.triton import moe_experts

    return moe_experts(*args)


def _layer(dim: int) -> LayerSpec:
    return LayerSpec(
        kind=LayerKind.FULL, q_heads=8 * HEADS, kv_heads=HEADS, head_dim=dim, value_dim=dim
    )


CASES: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "decode": _decode_cases,
    "prefill": _prefill_cases,
    "latent": _latent_cases,
    "moe": _moe_cases,
}


class Tuner:
    """Better launch shapes found so far, as a tuning file holds them, and rows to report."""

    def __init__(self, choices: dict[str, dict[str, Sequence[Any]]]) -> None:
        self.choices = choices
        self.entries: dict[str, dict[str, dict[str, Any]]] = {}
        self.rows: list[dict[str, Any]] = []

    def tune(self, name: str, calls: Sequence[Call]) -> None:
        """Vary every launch shape that these calls look up."""
        with tuned.using(tuned.Tuned()), tuned.recording() as asked:
            want = [call().float() for call in calls]
        for (op, shape), default in asked.items():
            start = best = _time(calls, want[0].device.type)
            chosen: dict[str, Any] = {}
            for trial in self._trials(op, default):
                time_us = self._measure(op, shape, trial, calls, want)
                if time_us is not None and time_us < best * GAIN:
                    best, chosen = time_us, trial
            if chosen:
                self.entries.setdefault(op, {})[shape] = chosen
            found = {"case": name, "op": op, "shape": shape, "built_in_us": start, "best_us": best}
            self.rows.append({**found, "chosen": chosen, "gain": start / best})
            note(f"{name}, {op}: {start:.1f} -> {best:.1f} us {chosen or '(built in)'}")

    def _trials(self, op: str, default: Any) -> Iterator[dict[str, Any]]:
        """Every combination of choices but the built-in one."""
        names = list(self.choices[op])
        usual = {f.name: getattr(default, f.name) for f in fields(default)}
        for values in product(*self.choices[op].values()):
            trial = dict(zip(names, values, strict=True))
            if any(usual[name] != value for name, value in trial.items()):
                yield trial

    def _measure(
        self,
        op: str,
        shape: str,
        trial: dict[str, Any],
        calls: Sequence[Call],
        want: Sequence[Tensor],
    ) -> float | None:
        """Microseconds with this shape; None when it does not compile, fit or compute the same."""
        from triton.errors import TritonError

        shapes = {**self.entries.get(op, {}), shape: trial}
        with tuned.using(tuned.Tuned(source="trial", entries={**self.entries, op: shapes})):
            try:
                got = [call() for call in calls]
            except (TritonError, RuntimeError) as error:
                note(f"  {trial}: {type(error).__name__}")
                return None
            if any(not relative_error(a, b) < TOLERANCE for a, b in zip(got, want, strict=True)):
                note(f"  {trial}: computes something else")
                return None
            return _time(calls, want[0].device.type)


def _time(calls: Sequence[Call], device: str) -> float:
    return statistics.median(times_us(calls, device=device))


def run(args: argparse.Namespace) -> int:
    """The command. Raises `ConfigError` without a CUDA device or for a file it cannot add to."""
    names = [n.strip() for n in args.only.split(",")] if args.only else list(CASES)
    for name in names:
        if name not in CASES:
            raise ConfigError(f"--only {name!r}: {nearest(name, CASES)}")
    if Path(args.output).exists():
        tuned.read(args.output)
    if not torch.cuda.is_available():
        raise ConfigError("bench tune needs a CUDA device: launch shapes are measured on it")
    torch.manual_seed(0)
    tuner, caps = Tuner(CHOICES), device_caps("cuda")
    for name in names:
        for case, calls in CASES[name](Bench()):
            tuner.tune(case, calls)
    return publish(args.output, tuned.device_key(caps.arch, caps.multiprocessors), tuner)


def publish(path: str, key: str, tuner: Tuner) -> int:
    """Write the file, print what changed, then one JSON line."""
    from sparseengine.report import machine

    facts = machine()
    tuned.write(path, key, tuner.entries, facts)
    print(table([{**row, "chosen": json.dumps(row["chosen"])} for row in tuner.rows]))
    print(f"\n{path}: {sum(map(len, tuner.entries.values()))} shapes for {key}")
    print(json.dumps({"bench": "tune", **facts, "file": path, "rows": tuner.rows}), flush=True)
    return 0
