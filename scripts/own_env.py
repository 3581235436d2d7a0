"""Virtual environments beside the checkout's .venv, in the user's cache folder, for packages that
it cannot or should not hold. Made when there is none for these versions, then reused. Standard
library only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import setup_env


def environment(name: str, wanted: Sequence[str], *, torch: bool) -> Path:
    """The interpreter of an environment with these requirements.

    torch: the same build as .venv's comes first. Raises `subprocess.CalledProcessError`.
    """
    text = "\n".join((*wanted, setup_env.TORCH if torch else "", sys.version))
    folder = cache_folder(name) / hashlib.sha256(text.encode()).hexdigest()[:12]
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = folder / ".ready"
    if ready.exists():
        return python
    print(f"{name}: creating an environment in {folder}", flush=True)
    shutil.rmtree(cache_folder(name), ignore_errors=True)  # those of other versions, too
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if torch:
        setup_env.install_torch(str(python))
    setup_env.pip(str(python), "install", *setup_env.QUIET, *wanted)
    ready.touch()
    return python


def cache_folder(name: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sparseengine" / name
