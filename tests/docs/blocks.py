"""Code blocks of a Markdown page, and how to run them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w+)([^\n`]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
RUNNABLE = ("bash", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block: ```language word word=value ...```."""

    language: str
    words: tuple[str, ...]
    text: str
    line: int

    @property
    def runs(self) -> bool:
        return self.language in RUNNABLE and "no-run" not in self.words

    @property
    def file(self) -> str | None:
        """The file that the block is the content of, instead of a program to run."""
        names = [w.removeprefix("file=") for w in self.words if w.startswith("file=")]
        return names[0] if names else None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            language=m[1],
            words=tuple(m[2].split()),
            text=m[3],
            line=text.count("\n", 0, m.start()) + 1,
        )
        for m in _FENCE.finditer(text)
    ]


def copy_checkout(folder: Path) -> None:
    """What a page may edit: the package and the tests."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)


def environment(folder: Path) -> dict[str, str]:
    """The suite's own environment, with its interpreter and the page's folder first."""
    here = Path(sys.executable).parent
    found = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    found["PATH"] = f"{here}{os.pathsep}{found['PATH']}"
    found["PYTHONPATH"] = str(folder / "src")
    return found


def run(block: Block, folder: Path) -> str:
    """Run one block in `folder`; returns what it printed. Fails with all of its output."""
    if block.file is not None:
        target = folder / block.file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(block.text, encoding="utf-8")
        return ""
    if block.language == "bash":
        command = ["bash", "-euo", "pipefail", "-c", block.text]
    else:
        command = [sys.executable, "-c", block.text]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, f"line {block.line}: status {done.returncode}\n{printed}"
    return done.stdout
