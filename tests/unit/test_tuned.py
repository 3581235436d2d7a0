"""Launch shapes: built in, from a tuning file, and when such a file is not taken."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fixtures.engines import save_checkpoint
from sparseengine.attention.caps import device_caps
from sparseengine.cli.main import main
from sparseengine.errors import ConfigError
from sparseengine.llm import LLM
from sparseengine.ops import tuned

SRC = Path(__file__).parents[2] / "src"
HERE = tuned.device_key(device_caps("cpu").arch, device_caps("cpu").multiprocessors)
ENTRIES = {"decode": {"256 channels of 2 bytes": {"keys": 128, "warps": 8}}}


@dataclass(frozen=True)
class Shape:
    keys: int
    warps: int = 4


def saved(path: Path, devices: object) -> str:
    path.write_text(json.dumps({"format": 1, "devices": devices}))
    return str(path)


def test_a_file_for_this_device_overrides_the_shapes_it_names(tmp_path: Path) -> None:
    found = tuned.load(saved(tmp_path / "t.json", {"cuda 7.5": {}, HERE: ENTRIES}), HERE)
    assert "1 tuned" in str(found)
    with tuned.using(found):
        assert tuned.launch_shape("decode", "256 channels of 2 bytes", Shape(64)) == Shape(128, 8)
        assert tuned.launch_shape("decode", "128 channels of 2 bytes", Shape(64)) == Shape(64)
        assert tuned.launch_shape("prefill", "256 channels of 2 bytes", Shape(64)) == Shape(64)
    assert tuned.launch_shape("decode", "256 channels of 2 bytes", Shape(64)) == Shape(64)


def test_a_file_for_another_device_is_ignored_with_the_reason(tmp_path: Path) -> None:
    path = saved(tmp_path / "t.json", {"cuda 7.5, 40 multiprocessors, triton 2.0": ENTRIES})
    found = tuned.load(path, HERE)
    assert found.entries == {}
    assert str(found).startswith(f"built in; {path} ignored: it was made for cuda 7.5")
    assert HERE in str(found)


def test_devices_are_told_apart_by_probes_and_triton() -> None:
    keys = {tuned.device_key(arch, n) for arch, n in (((8, 0), 108), ((9, 0), 132), ((9, 0), 144))}
    assert len({*keys, HERE}) == 4
    assert HERE.startswith("host, 0 multiprocessors, triton ")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not JSON"),
        ('{"format": 2}', "format 1"),
        ('{"format": 1, "devices": {}}', "by device"),
        ('{"format": 1, "devices": {"a": 3}}', "wanted ops"),
        ('{"format": 1, "devices": {"a": {"sort": {}}}}', "unknown op 'sort'"),
        ('{"format": 1, "devices": {"a": {"decode": {"x": {}}}}}', "wanted some of keys"),
        ('{"format": 1, "devices": {"a": {"decode": {"x": {"rows": 2}}}}}', "unknown 'rows'"),
        ('{"format": 1, "devices": {"a": {"decode": {"x": {"keys": 48}}}}}', "a power of two"),
        ('{"format": 1, "devices": {"a": {"decode": {"x": {"stages": 0}}}}}', "1 to 8"),
        ('{"format": 1, "devices": {"a": {"moe_up": {"x": {"swap": 1}}}}}', "true or false"),
    ],
)
def test_broken_files_are_refused(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=match):
        tuned.load(str(tmp_path / "t.json"), HERE)


def test_writing_keeps_what_other_devices_and_ops_had(tmp_path: Path) -> None:
    path = saved(tmp_path / "t.json", {"other": ENTRIES, HERE: ENTRIES})
    tuned.write(path, HERE, {"latent": {"x": {"keys": 32}}}, {"torch": "2"})
    devices = tuned.read(path)
    assert devices["other"] == ENTRIES
    assert devices[HERE] == {**ENTRIES, "latent": {"x": {"keys": 32}}}
    with pytest.raises(ConfigError, match="No such file"):
        tuned.write(str(tmp_path / "none" / "t.json"), HERE, ENTRIES, {})


def test_an_engine_uses_its_file_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(save_checkpoint(tmp_path / "model"))
    path = saved(tmp_path / "t.json", {HERE: ENTRIES})
    with LLM(model, quiet=True, tuning_file=path) as llm:
        assert tuned.in_force().entries == ENTRIES
        assert llm.explain()["launch_shapes"] == f"{path} (1 tuned)"
    with LLM(model, quiet=True):
        assert tuned.in_force() == tuned.Tuned()
    monkeypatch.setenv("SPARSEENGINE_TUNING_FILE", path)
    assert main(["explain", model]) == 0
    assert f"launch shapes of kernels: {path} (1 tuned)" in capsys.readouterr().out
    assert main(["explain", model, "--tuning-file", "none"]) == 2
    assert "tuning_file none: No such file" in capsys.readouterr().err


def test_what_cannot_be_tuned_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "t.json")
    assert main(["bench", "tune", "--output", file, "--only", "dcode"]) == 2
    assert "decode" in capsys.readouterr().err
    (tmp_path / "t.json").write_text("{")
    assert main(["bench", "tune", "--output", file]) == 2
    assert "not JSON" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be measured")
def test_tuning_needs_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tune", "--output", str(tmp_path / "t.json")]) == 2
    assert "CUDA device" in capsys.readouterr().err


def test_no_source_file_names_a_gpu_product() -> None:
    """Choices are made by probes; evidence belongs into docs."""
    names = r"H[12]00|A100|[BGL][234]0S?|GB200|B200|V100|MI\d{3}X?|RTX|GeForce|Tesla|Quadro"
    # Libraries have modules of these names in small letters.
    product = re.compile(rf"\b({names}|Hopper|Ampere|Blackwell|Volta|Turing)\b")
    found = [
        f"{file.relative_to(SRC)}:{number}"
        for file in sorted(SRC.rglob("*.py"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if product.search(line)
    ]
    assert found == []
