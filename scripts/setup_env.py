"""Create .venv and install the package with its development tools. Standard library only.

Without an NVIDIA GPU a CPU build of torch is wanted: the default wheel on Linux brings gigabytes of
CUDA. In order: a CPU wheel that the user's own pip configuration resolves to; PyTorch's public CPU
index; whatever plain pip gives. A stamp in .venv makes a second run quick.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import browser

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST = (3, 11)
QUIET = ["--quiet", "--progress-bar", "off", "--disable-pip-version-check"]


def main() -> int:
    if sys.version_info < OLDEST:
        return restart_with_newer_python()
    stamp = VENV / f".ready-{fingerprint()}"
    if stamp.exists():
        return 0
    python = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    try:
        if not python.exists():
            say(f"creating {VENV.name} with Python {sys.version.split()[0]}")
            subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        install_torch(str(python))
        say("installing sparseengine and its tools")
        pip(str(python), "install", *QUIET, "--editable", ".[dev]")
        if browser.install(str(python)) is None:  # the tests of /ui will say so, too
            print(f"setup: {browser.MISSING}", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        print(f"setup failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        print("Python's venv and pip modules and a package index are needed.", file=sys.stderr)
        return 1
    for old in VENV.glob(".ready-*"):
        old.unlink()
    stamp.touch()
    return 0


def restart_with_newer_python() -> int:
    for minor in (14, 13, 12, 11):
        found = shutil.which(f"python3.{minor}")
        if found:
            return subprocess.run([found, __file__], check=False).returncode
    have = ".".join(map(str, sys.version_info[:2]))
    print(f"Python >= 3.11 is needed; this is {have}. Try: make PYTHON=...", file=sys.stderr)
    return 1


def fingerprint() -> str:
    """Changes when the dependencies, this script, the interpreter or the checkout's place does."""
    files = (ROOT / "pyproject.toml", Path(__file__), Path(browser.__file__))
    parts = [f.read_bytes() for f in files]
    parts.append(f"{ROOT} {sys.version_info[:2]} {has_nvidia_gpu()}".encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def has_nvidia_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    found = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return found.returncode == 0 and "GPU" in found.stdout


def install_torch(python: str) -> None:
    probe = [python, "-c", "import torch"]
    if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return
    if has_nvidia_gpu() or not sys.platform.startswith("linux"):
        say("installing torch")
        pip(python, "install", *QUIET, "torch>=2.11")
        return
    local = resolved_version(python)
    if local.endswith("+cpu"):
        say(f"installing torch {local} from the configured package source")
        pip(python, "install", *QUIET, f"torch=={local}")
        return
    say("installing the CPU build of torch")
    short = ["--timeout", "20", "--retries", "1"]
    cpu = [python, "-m", "pip", "install", *QUIET, *short, "--index-url", CPU_INDEX, TORCH]
    if subprocess.run(cpu, cwd=ROOT, check=False).returncode:
        say("the CPU index cannot be reached: installing the default build (several GB)")
        pip(python, "install", *QUIET, TORCH)


def resolved_version(python: str) -> str:
    """Which torch the user's pip configuration would give; "" if it gives none."""
    command = [python, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed"]
    found = subprocess.run(
        [*command, "--quiet", "--disable-pip-version-check", "--report", "-", TORCH],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        return ""
    items = json.loads(found.stdout)["install"]
    return str(items[0]["metadata"]["version"]) if items else ""


def pip(python: str, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", *arguments], cwd=ROOT, check=True)


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
