"""Pages of methods: what is taken from docstrings, and that every method has what a page needs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from sparseengine.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("method_pages", ROOT / "scripts/method_pages.py")
method_pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(method_pages)


def _table(columns: list[str], rows: list[list[object]]) -> str:
    return "\n".join("|".join(map(str, row)) for row in [columns, *rows])


def test_deviations_leave_the_idea_wherever_they_stand() -> None:
    text = "Does it.\n\nIn this way. Deviations: it is\nslow.\n\nAnd more.\n\nDeviation: none else."
    assert method_pages.split(text) == (
        "Does it.\n\nIn this way.\n\nAnd more.",
        "It is\nslow.\n\nNone else.",
    )
    found = method_pages.sources("A (arXiv:2406.10774; ICLR 2025), arXiv:2406.10774")
    assert found == ["[arXiv:2406.10774](https://arxiv.org/abs/2406.10774)", "ICLR 2025"]


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_says_when_to_use_it_and_what_it_costs(name: str) -> None:
    assert method_pages.WHEN[name].endswith(".")
    page = (ROOT / "docs" / "reference" / "methods" / f"{name}.md").read_text()
    parts = ["Idea", "When to use it", "Deviations", "Budget and knobs", "Costs"]
    parts += ["Kinds of layers", "Measured quality"]
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == parts


def test_figures_come_from_result_files_and_are_missed_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "results" / "model-4k"
    folder.mkdir(parents=True)
    (folder.parent / "model.md").write_text("# Model")
    rows = [
        {"method": m, "kl_mean": kl, "top1_agreement": 0.5, "budget": 64}
        for m, kl in (("full", 0.0), ("quest", 0.125))
    ]
    (folder / "agree.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pages = method_pages.pages(tmp_path, "", _table)
    assert set(pages) == {f"{name}.md" for name in METHODS}
    assert "[model-4k/agree](../../results/model.md)" in pages["quest.md"]
    assert "quest|64|none|none|0.125|0.5" in pages["quest.md"]
    assert pages["snapkv.md"].rstrip().endswith(method_pages.NOT_MEASURED)


def test_costs_are_those_of_the_cache_plan() -> None:
    """Quest stores two keys per page of 16: an eighth of K, a sixteenth of K and V."""
    assert "8,192 bytes per token (6.2% of its 131,072" in method_pages.costs("quest")
    assert "8,448 at the end of the answer" in method_pages.costs("snapkv")
    assert "0 bytes per token" in method_pages.costs("full")
    assert "read per row" not in method_pages.costs("snapkv")
