"""Every code block of the README and of docs/ runs, page by page, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from blocks import ROOT, RUNNABLE, blocks_of, copy_checkout, run

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Commands that a page may show without running them, each because another test or CI runs it.
NOT_RUN = ("make ", "git clone", ".venv/bin/python -m pytest", "sparseengine chat", "#")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    blocks = [b for b in blocks_of(page) if b.runs]
    if any("checkout" in b.words for b in blocks):
        copy_checkout(tmp_path)
    for block in blocks:
        run(block, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_only_known_commands_are_not_run(page: Path) -> None:
    for block in blocks_of(page):
        if block.language not in RUNNABLE or block.runs:
            continue
        for line in filter(None, map(str.strip, block.text.splitlines())):
            assert line.startswith(NOT_RUN), f"{page.name}:{block.line}: {line!r} is never run"


def test_links_between_pages_lead_somewhere() -> None:
    link = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
    pages = [*PAGES, *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for target in link.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
