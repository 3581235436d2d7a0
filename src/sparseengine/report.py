"""What a measurement leaves behind: the machine, raw samples, aggregates, a table, a JSON line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sparseengine.errors import ConfigError


class Spread(NamedTuple):
    """Median and the 10th and 90th percentile of samples in one unit."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        tenths = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), tenths[0], tenths[-1])


def machine() -> dict[str, Any]:
    """Facts about where the run happened."""
    import torch
    import transformers

    from sparseengine import __version__

    facts: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["sparseengine", *sys.argv[1:]]),
        "sparseengine": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
        facts["cuda"] = torch.version.cuda
        facts["driver"] = _driver()
    if importlib.util.find_spec("triton") is not None:
        facts["triton"] = importlib.metadata.version("triton")
    return facts


def _commit() -> str | None:
    """The commit that this package runs from; None for an installed one."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if here.parent.name == "src" else None


def _driver() -> str | None:
    """The NVIDIA driver's version where the kernel module tells it."""
    version = Path("/sys/module/nvidia/version")
    return version.read_text(encoding="utf-8").strip() if version.exists() else None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def make_folder(path: str) -> Path:
    """The folder for artefacts, made before anything is measured. Raises `ConfigError`."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be a folder ({error.strerror})") from None
    return folder


def write_artefacts(
    folder: Path,
    info: Mapping[str, Any],
    raw: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """run_info.json (machine, command, config), raw.jsonl (every sample), aggregate.json (rows)."""
    (folder / "run_info.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    lines = "".join(json.dumps(sample) + "\n" for sample in raw)
    (folder / "raw.jsonl").write_text(lines, encoding="utf-8")
    (folder / "aggregate.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
