"""Find a Chromium for the tests of /ui, or install one. Standard library only.

Looked for: a browser on PATH, then what Playwright has downloaded. Without one: Debian's package
when this runs as root, else Playwright's download. Nothing is removed or upgraded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "chrome-headless-shell",
    "microsoft-edge",
)
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
BINARIES = ("chrome", "chrome-headless-shell", "headless_shell", "Chromium", "chrome.exe")
MISSING = (
    "no Chromium was found or could be installed. Install one (`apt-get install chromium`, or "
    "`.venv/bin/python -m playwright install --with-deps chromium-headless-shell`)"
)


def find() -> str | None:
    """The path of a browser that starts; None if there is none."""
    found = [path for path in map(shutil.which, NAMES) if path]
    if Path(MAC).exists():
        found.append(MAC)
    for name in BINARIES:
        found += map(str, sorted(cache_folder().glob(f"chromium*/**/{name}"), reverse=True))
    return next((path for path in found if starts(path)), None)


def cache_folder() -> Path:
    """Where Playwright keeps what it downloads."""
    given = os.environ.get("PLAYWRIGHT_BROWSERS_PATH")
    if given not in (None, "", "0"):
        return Path(str(given))
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "ms-playwright"
    if os.name == "nt":
        return home / "AppData" / "Local" / "ms-playwright"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "ms-playwright"


def starts(path: str) -> bool:
    """Ubuntu's `chromium-browser` without its snap, and a binary without its libraries, do not."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def install(python: str) -> str | None:
    """The path of a browser, installed if need be with the tools of the `python` environment."""
    found = find()
    if found is not None:
        return found
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    commands: list[list[str]] = []
    if is_root and shutil.which("apt-get"):
        commands.append(["apt-get", "update", "-qq"])
        commands.append(["apt-get", "install", "-qq", "-y", "--no-install-recommends", "chromium"])
    playwright = [python, "-m", "playwright", "install", "chromium-headless-shell"]
    commands.append([*playwright, "--with-deps"] if is_root else playwright)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in commands:
        print(f"setup: {' '.join(command[-4:])}", flush=True)
        try:
            subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=600,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print("setup: gave up after 10 minutes", flush=True)
        if "install" in command and (found := find()) is not None:
            return found
    return None


if __name__ == "__main__":
    browser = install(sys.executable)
    print(browser or MISSING)
    sys.exit(0 if browser else 1)
