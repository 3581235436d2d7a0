"""/ui in a headless Chromium with SmolLM2, its logic in Node, and what its requests rest on."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright._impl._driver import compute_driver_executable
from playwright.sync_api import Browser, Page, expect, sync_playwright

from fixtures.servers import Served, serving
from sparseengine.server.ui import PAGE_PATHS
from sparseengine.weights import hub

ROOT = Path(__file__).resolve().parents[2]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EVICTING = {"method": "streaming_llm", "budget": 12, "record": True}
FACTS = "Plants turn light, water and carbon dioxide into sugar and oxygen. " * 6
QUESTION = f"{FACTS}What do plants make?"


# ── what the page rests on ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", PAGE_PATHS)
def test_every_file_is_served_and_asks_for_nothing_from_elsewhere(
    served: Served, path: str
) -> None:
    found = served.get(path)
    assert found.status_code == 200
    kind = {"css": "text/css", "mjs": "text/javascript"}.get(path.rpartition(".")[2], "text/html")
    assert found.headers["content-type"] == f"{kind}; charset=utf-8"
    assert "default-src 'none'" in found.headers["content-security-policy"]
    assert found.headers["x-content-type-options"] == "nosniff"
    links = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", found.text)
    assert set(links) <= {"http://www.w3.org"}  # the name of SVG, not a place


def test_every_file_of_the_folder_is_served_and_no_other(served: Served) -> None:
    folder = resources.files("sparseengine.server").joinpath("static")
    assert {f.name for f in folder.iterdir()} == set(PAGE_PATHS.values())
    for path in ("/ui/page.html", "/ui/..%2fapp.py", "/ui/app.mjs/"):
        assert served.get(path).status_code in (307, 404)


def chunks(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream's chunks."""
    found = []
    with httpx.stream("POST", served.url + path, json={**body, "stream": True}, timeout=60) as r:
        for line in r.iter_lines():
            if line.startswith("data: {"):
                found += json.loads(line[6:])["choices"]
    return found


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_chunks_carry_the_record_as_it_grows_and_add_up(served: Served, path: str) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    given = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    body = {**given, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "sparse": EVICTING}
    whole = served.post(path, body).json()["choices"][0]["sparse"]
    assert [r["event"] for r in whole["retained"]] == ["prefill", *["evict"] * 5]
    assert len(whole["reads"]) == 5
    news = [c["sparse"] for c in chunks(served, path, body) if "sparse" in c]
    assert [len(n["reads"]) for n in news] == [0, 1, 1, 1, 1, 1]
    for name in ("retained", "reads"):
        assert [entry for n in news for entry in n[name]] == whole[name]
    assert {k: v for k, v in news[-1].items() if k not in ("retained", "reads")} == {
        k: v for k, v in whole.items() if k not in ("retained", "reads")
    }
    assert whole["resident_bytes"] < whole["dense_bytes"]
    assert not any("sparse" in c for c in chunks(served, path, {**body, "sparse": None}))


# ── its logic ─────────────────────────────────────────────────────────────────────────────────────


def test_the_logic_of_the_page_in_node() -> None:
    """With the Node that comes with Playwright."""
    node = compute_driver_executable()[0]
    folder = ROOT / "src" / "sparseengine" / "server" / "static"
    script = Path(__file__).with_name("page_logic.mjs")
    done = subprocess.run([node, script, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well" in done.stdout


# ── in a browser ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    place = ROOT / "scripts" / "browser.py"
    spec = importlib.util.spec_from_file_location("browser", place)
    assert spec is not None
    assert spec.loader is not None
    browser = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(browser)
    path = browser.find()
    if path is None:
        pytest.fail(browser.MISSING)
    with sync_playwright() as playwright:
        # a container's root has no sandbox to use; nothing but our own page is opened
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A page that must not log a single error."""
    context = chromium.new_context(viewport={"width": 1280, "height": 860})
    made = context.new_page()
    errors: list[str] = []
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    yield made
    context.close()
    assert errors == []


@pytest.fixture(scope="module")
def smol() -> Iterator[Served]:
    hub.pull("smollm2-135m")
    engine = {
        "enable_methods": ["full", "snapkv", "quest"],
        "max_model_len": 512,
        "attention_backend": "auto",
    }
    with serving(Path("smollm2-135m"), engine=engine, served_model_names=("smol",)) as running:
        yield running


def open_page(page: Page, served: Served) -> None:
    page.goto(served.url + "/ui")
    expect(page.locator("#served")).to_contain_text("up to")


def ask(page: Page, text: str, *, tokens: int = 8) -> None:
    page.get_by_label("Most tokens").fill(str(tokens))
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def wait_answer(page: Page) -> None:
    expect(page.get_by_role("button", name="Stop")).to_be_disabled(timeout=60_000)


def pixels(page: Page) -> int:
    """How many colours the picture has."""
    return page.locator("#map").evaluate(
        "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height)"
        ".data.buffer)).size"
    )


def test_a_real_answer_and_what_it_kept(page: Page, smol: Served) -> None:
    assert smol.post("/reset_prefix_cache", {}).json() == {"reset": True}
    open_page(page, smol)
    page.get_by_label("Method", exact=True).select_option("snapkv")
    page.get_by_label("Amount").fill("0.5")
    ask(page, QUESTION)
    wait_answer(page)
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 8,
        "temperature": 0,
        "sparse": {"method": "snapkv", "ratio": 0.5, "record": True},
    }
    found = smol.post(CHAT, body).json()
    choice, sparse = found["choices"][0], found["choices"][0]["sparse"]
    assert len(choice["message"]["content"]) > 10
    answer = page.locator(".turn.assistant span").last
    assert answer.text_content() == choice["message"]["content"]
    expect(page.locator("#prompt-tokens")).to_have_text(str(found["usage"]["prompt_tokens"]))
    expect(page.locator("#answer-tokens")).to_have_text("8")
    expect(page.locator("#cached")).to_have_text("0")
    expect(page.locator("#miss")).to_have_text("cold")
    expect(page.locator("#step-shown")).to_have_text("7 of 7")
    share = 100 * sparse["resident_bytes"] / sparse["dense_bytes"]
    assert share < 80
    expect(page.locator("#resident")).to_contain_text(f"({share:.0f} %)")
    check_layers(page, sparse, step=7)
    page.get_by_label("Decode step").press("Home")
    expect(page.locator("#step-shown")).to_contain_text("0 (the prompt is done)")
    check_layers(page, sparse, step=0)
    check_words(page, sparse)
    again = smol.post(CHAT, body).json()["usage"]["prompt_tokens_details"]
    assert again["cached_tokens"] > 16, "the second post began with the rows of the first"
    ask(page, "And now?", tokens=2)
    wait_answer(page)
    assert int(page.locator("#cached").text_content()) >= again["cached_tokens"]
    expect(page.locator("#miss")).to_have_text("none")


def check_layers(page: Page, sparse: dict[str, Any], *, step: int) -> None:
    """The table has what the API says: tokens kept by the heads of every layer."""
    kept = sparse["retained"][0]["positions"]
    rows = page.locator("#layers tr")
    expect(rows).to_have_count(len(kept))
    cells = rows.evaluate_all("rows => rows.map(r => [...r.cells].map(c => c.textContent))")
    for layer, heads in kept.items():
        counts = sorted({len(h) + step for h in heads})
        text = " to ".join(
            str(n) for n in (counts if len(counts) == 1 else counts[:: len(counts) - 1])
        )
        assert cells[int(layer)] == [layer, text, text if step else "–"]


def check_words(page: Page, sparse: dict[str, Any]) -> None:
    page.get_by_text("Tokens, darker").click()
    words = page.locator("#text span")
    expect(words).to_have_count(sparse["prompt_tokens"])
    assert FACTS in page.locator("#text").text_content()
    shares = words.evaluate_all("w => w.map(s => Number(s.style.getPropertyValue('--share')))")
    rows = [set(h) for heads in sparse["retained"][0]["positions"].values() for h in heads]
    for position in (0, 40, len(shares) - 1):
        wanted = sum(position in row for row in rows) / len(rows)
        assert shares[position] == pytest.approx(wanted, abs=1e-3)
    assert pixels(page) > 5
    page.locator("#map").hover(position={"x": 40, "y": 2})
    expect(page.locator("#pointed")).to_contain_text("layer 0, head 0, position")


def test_selection_stop_themes_and_narrow_screens(page: Page, smol: Served) -> None:
    open_page(page, smol)
    page.get_by_label("Method", exact=True).select_option("quest")
    page.get_by_label("Budget", exact=True).select_option("budget")
    page.get_by_label("Amount").fill("48")
    ask(page, QUESTION, tokens=300)
    expect(page.locator("#step-shown")).to_contain_text(" of ", timeout=60_000)
    expect(page.locator("#summary")).to_contain_text("100 % of")  # it drops nothing, reads less
    page.get_by_role("button", name="Stop").click()
    wait_answer(page)
    expect(page.locator("#status")).to_contain_text("stopped")
    smol.wait_idle()
    backgrounds = []
    for theme in ("light", "dark"):
        page.get_by_label("Theme").select_option(theme)
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds == ["rgb(246, 247, 249)", "rgb(20, 22, 26)"]
    for width in (320, 768):
        page.set_viewport_size({"width": width, "height": 640})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert pixels(page) > 5
    page.get_by_label("Method", exact=True).select_option("full")
    assert page.get_by_label("Amount").is_disabled()
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0


def test_a_refusal_is_shown_and_the_next_question_works(chromium: Browser, smol: Served) -> None:
    page = chromium.new_page()  # browsers log answers that are not 2xx as errors
    open_page(page, smol)
    page.get_by_label("Method", exact=True).select_option("snapkv")
    page.get_by_label("Amount").fill("5")
    ask(page, "Hello", tokens=2)
    wait_answer(page)
    expect(page.locator(".turn.wrong")).to_contain_text("ratio=5")
    page.get_by_label("record what is kept").uncheck()
    page.get_by_label("Amount").fill("0.5")
    ask(page, "Hello", tokens=2)
    expect(page.locator("#status")).to_contain_text("length", timeout=60_000)
    expect(page.locator("#answer-tokens")).to_have_text("2")
    expect(page.locator("#pointed")).to_have_text("not recorded")
    page.close()


def test_a_server_with_keys_is_asked_for_one(chromium: Browser, checkpoint: Path) -> None:
    with serving(checkpoint, api_keys=("secret",)) as locked:
        assert locked.get("/server_info").status_code == 401
        page = chromium.new_page()
        page.goto(locked.url + "/ui")
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#served")).to_contain_text("up to")
        expect(page.get_by_label("API key")).to_be_hidden()
        ask(page, "fox", tokens=2)
        expect(page.locator("#status")).to_contain_text("length", timeout=60_000)
        page.close()
