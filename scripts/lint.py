"""Every static check, all of them run even when one fails; the exit status says if any did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CHECKS = (
    [str(BIN / "ruff"), "format", "--check", "."],
    [str(BIN / "ruff"), "check", "."],
    [sys.executable, "-m", "mypy"],
    [str(BIN / "lint-imports")],
    [sys.executable, "scripts/house_rules.py"],
    [sys.executable, "scripts/generate.py", "--check"],
)


def main() -> int:
    failed = []
    for command in CHECKS:
        print("$", " ".join(Path(part).name for part in command[:2]), *command[2:], flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(Path(command[0]).name + " " + " ".join(command[1:]))
    for command_line in failed:
        print("failed:", command_line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
