"""The comparison with kvpress notices what differs; kvpress itself is not needed for that."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there for their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return load("parity_kvpress")


def side(parity: ModuleType, scores: torch.Tensor, kept: int) -> object:
    """Two rows in each layer of which the best `kept` stay."""
    best = torch.zeros_like(scores, dtype=torch.bool)
    best.scatter_(1, scores.topk(kept).indices, True)
    layers = range(parity.LAYERS)
    return parity.Side(dict.fromkeys(layers, scores), dict.fromkeys(layers, best))


def test_equal_sides_have_no_faults(parity: ModuleType) -> None:
    scores = torch.rand(2, 40, generator=torch.Generator().manual_seed(0))
    pair = parity.Pair("p", None, "m", {})
    found = parity.compare(pair, side(parity, scores, 10), side(parity, scores, 10))
    assert (found.agreement, found.score, found.spread, found.faults()) == (1.0, 0.0, 0.0, [])
    assert found.row() == "10.0 | 1.0000 | 0.0e+00 | 0.0e+00"
    unscored = parity.Found(1.0, None, 0.0, (8, 8))
    assert unscored.faults() == []
    assert " - " in unscored.row()


def test_rounding_and_ties_are_no_faults_and_more_is(parity: ModuleType) -> None:
    pair = parity.Pair("p", None, "m", {})
    scores = torch.linspace(0, 1, 40).repeat(2, 1)
    near = scores.clone()
    near[:, 30] = near[:, 29] + 1e-6  # either of the two may be the tenth
    other = near.clone()
    other[:, [29, 30]] = near[:, [30, 29]]
    found = parity.compare(pair, side(parity, near, 10), side(parity, other, 10))
    assert found.agreement == 0.9
    assert found.faults() == []
    wrong = scores.flip(1)
    (scored, slots) = parity.compare(
        pair, side(parity, wrong, 10), side(parity, scores, 10)
    ).faults()
    assert "scores differ by 1.0e+00" in scored
    assert "0.0000 of the slots agree" in slots
    (count,) = parity.compare(pair, side(parity, scores, 11), side(parity, scores, 10)).faults()[:1]
    assert "88 slots kept, kvpress keeps 80" in count
    assert parity.Found(0.9, None, 0.0, (8, 8)).faults(), "nothing excuses rows without scores"
    assert parity.Found(1.0, float("nan"), 0.0, (8, 8)).faults()


def test_the_job_fails_on_a_mismatch(
    parity: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["parity_kvpress.py", "--output", str(page)])
    for faults, status in (([], 0), (["p | m | 0.5: scores differ"], 1)):
        monkeypatch.setattr(parity, "table", lambda _, f=faults: (["| a | b |"], f))
        assert parity.main() == status
        assert "| a | b |" in page.read_text()
        assert ("mismatch: p | m" in capsys.readouterr().err) == bool(status)


def test_its_environment_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    job, asked = load("parity"), []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = SimpleNamespace(
        run=lambda command, **_: asked.append(command) or Path(command[-1]).mkdir(parents=True),
        CalledProcessError=OSError,
    )
    monkeypatch.setattr(job.own_env, "subprocess", run)
    monkeypatch.setattr(
        job.own_env.setup_env, "install_torch", lambda python: asked.append("torch")
    )
    monkeypatch.setattr(job.own_env.setup_env, "pip", lambda *arguments: asked.append(arguments))
    old = job.own_env.cache_folder("parity") / "older"
    old.mkdir(parents=True)
    python = job.environment()
    assert python.is_relative_to(tmp_path)
    assert not old.exists()
    assert len(asked) == 3
    assert {*job.PINS, "numpy>=1.26"} <= set(asked[2])
    assert [a for a in asked[2] if a.startswith("transformers")] == ["transformers==5.2.0"]
    assert job.environment() == python
    assert len(asked) == 3, "installed again"


def test_its_job_is_apart_from_the_suite() -> None:
    script = ROOT / ".ci" / "parity"
    assert script.stat().st_mode & 0o100
    assert "make parity" in script.read_text()
    assert "parity" not in (ROOT / ".ci" / "run").read_text()
    assert "\nparity: setup" in (ROOT / "Makefile").read_text()
