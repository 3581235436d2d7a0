"""Take docs/images/ui.png: the page of `sparseengine serve` after a real answer by SmolLM2.

python scripts/ui_screenshot.py [OUTPUT.png]   (needs a Chromium: scripts/browser.py)
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

import browser

ROOT = Path(__file__).resolve().parent.parent
PORT = 8139
METHOD, RATIO, TOKENS = "snapkv", "0.25", "48"
TEXT = """Here are the notes of a walk. The harbour opens at six, when the fishing boats come back \
with mackerel and crab. The old lighthouse was built in 1871 from granite that was shipped from \
the north. Behind it a path climbs through gorse and heather to the chapel, where a bell is rung \
once a year for sailors who did not return. The keeper, whose name is Marta, grows potatoes and \
keeps eleven goats. She says that the light can be seen from twenty miles away, and that in winter \
storms the spray reaches the windows. From the chapel one sees three islands: the nearest has a \
ruined abbey, the second has seals, and the third belongs to the gulls. On the way down there is \
a bakery that sells bread with seaweed, and a workshop where a man repairs violins. The bus to the \
town leaves every two hours from the stone bridge, and the last one leaves at nine in the evening.

What does the bakery on the way down sell?"""


def main() -> int:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images" / "ui.png"
    path = browser.find()
    if path is None:
        print(browser.MISSING, file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "sparseengine.cli.main", "serve", "smollm2-135m"]
    flags = ["--enable-methods", f"full,{METHOD}", "--max-model-len", "2K", "--port", str(PORT)]
    server = subprocess.Popen([*command, *flags, "--no-access-log"], stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{PORT}/health", server)
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            page = chromium.new_page(viewport={"width": 1280, "height": 880})
            take(page, output)
            chromium.close()
    finally:
        server.terminate()
        server.wait(30)
    print(f"{output}: {output.stat().st_size:,} bytes")
    return 0


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and server.poll() is None:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.3)
    raise SystemExit("the server does not start")


def take(page: Page, output: Path) -> None:
    page.goto(f"http://127.0.0.1:{PORT}/ui")
    page.locator(f"#method option[value={METHOD}]").wait_for(state="attached")
    page.get_by_label("Method", exact=True).select_option(METHOD)
    page.get_by_label("Amount", exact=True).fill(RATIO)
    page.get_by_label("Most tokens").fill(TOKENS)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message", exact=True).fill(TEXT)
    page.get_by_role("button", name="Send").click()
    page.locator("#stop:disabled").wait_for(timeout=120_000)
    page.locator("#talk").evaluate("e => { e.scrollTop = e.scrollHeight; }")
    page.locator(".turn.user").evaluate("e => { e.scrollTop = e.scrollHeight; }")
    box = page.locator("#map").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.55 * box["width"], box["y"] + 0.4 * box["height"])
    output.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=output)


if __name__ == "__main__":
    sys.exit(main())
