"""Compare with kvpress in an environment of its own, and fail where what is kept differs.

Further arguments go to `parity_kvpress.py`: `python scripts/parity.py --output table.md`. kvpress
needs an older transformers than the checkout's .venv has, so the environment lies in the user's
cache folder: made when there is none for these versions, which takes minutes, and then reused.
Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import own_env

ROOT = Path(__file__).resolve().parent.parent
PINS = ("kvpress==0.5.5", "transformers==5.2.0")
SCRIPT = ROOT / "scripts" / "parity_kvpress.py"


def main() -> int:
    try:
        python = environment()
    except subprocess.CalledProcessError as error:
        print(f"parity: failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        print("A package index that has kvpress is needed.", file=sys.stderr)
        return 1
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables = {**os.environ, **threads, "PYTHONPATH": str(ROOT / "src")}
    command = [str(python), str(SCRIPT), *sys.argv[1:]]
    return subprocess.run(command, env=variables, check=False).returncode


def environment() -> Path:
    """The interpreter of an environment with kvpress and what this package needs."""
    return own_env.environment("parity", (*PINS, *requirements()), torch=True)


def requirements() -> tuple[str, ...]:
    """What the package needs, but for what the pins decide."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        found = tomllib.load(file)["project"]["dependencies"]
    return tuple(r for r in found if not r.startswith("transformers"))


if __name__ == "__main__":
    sys.exit(main())
