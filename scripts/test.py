"""Run the test suite: one pytest worker per core, one torch thread per worker.

Further arguments go to pytest: `python scripts/test.py tests/unit -k config`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **threads}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
