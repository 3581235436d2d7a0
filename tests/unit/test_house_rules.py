"""The house rules hold, and the checks notice when they do not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


house = _script("house_rules")


@pytest.mark.parametrize("rule", house.RULES, ids=lambda r: r.__name__)
def test_the_rule_holds(rule) -> None:
    assert rule() == []


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "format", "--check", "."],
        ["ruff", "check", "."],
        ["mypy"],
        ["lint-imports"],
    ],
    ids=lambda c: "-".join(c[:2]),
)
def test_the_tool_is_content(command: list[str]) -> None:
    program = Path(sys.executable).parent / command[0]
    done = subprocess.run(
        [program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/generate.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A package that breaks every rule."""
    package = tmp_path / "src" / "sparseengine"
    package.mkdir(parents=True)
    lines = ["import os", "def long():", *["    x = 1"] * 61, "y = os.environ", "z = 'random'"]
    lines += ["try:", "    z = 1", "except Exception:", "    z = 2", "quest_pages = 3"]
    (package / "bad.py").write_text("\n".join(lines))
    (package / "big.py").write_text("x = 1\n" * 501)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "PACKAGE", package)


@pytest.mark.usefixtures("broken")
def test_each_check_notices_a_breach() -> None:
    assert len(house.sizes()) == 2
    assert ["names the method 'quest'" in m or "'random'" in m for m in house.method_names()] == [
        True,
        True,
    ]
    assert "reads the environment" in house.environment()[0]
    assert "blanket" in house.blanket_excepts()[0]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_make_has_the_promised_targets() -> None:
    text = (ROOT / "Makefile").read_text()
    for target in ("setup", "demo", "lint", "format", "test", "docs", "generate", "bench-smoke"):
        assert f"\n{target}:" in text


def test_setup_is_quick_when_nothing_changed(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    setup = _script("setup_env")
    monkeypatch.setattr(setup, "VENV", tmp_path)
    (tmp_path / f".ready-{setup.fingerprint()}").touch()
    monkeypatch.setattr(setup, "pip", lambda *_: pytest.fail("installed again"))
    assert setup.main() == 0
    assert capsys.readouterr().out == ""
