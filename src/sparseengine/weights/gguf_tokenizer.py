"""Gemma's tokenizer from a GGUF file: byte-pair encoding whose merges follow from the ids.

transformers converts it, too, but takes half a minute, and before 5.24 its result splits words
wrongly ("Hello world" became five tokens instead of two).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import Split

from sparseengine.errors import ConfigError
from sparseengine.weights.gguf_file import read_metadata

_SPACE = "▁"
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def can_convert(metadata: Mapping[str, Any]) -> bool:
    """Whether `write_tokenizer` knows the file's tokenizer: Gemma's SentencePiece vocabulary."""
    family = str(metadata.get("general.architecture", ""))
    return family.startswith("gemma") and metadata.get("tokenizer.ggml.model") == "llama"


def write_tokenizer(gguf: Path, folder: Path) -> None:
    """Write the tokenizer inside a Gemma GGUF file as one that transformers loads.

    Raises ConfigError for a file without the vocabulary.
    """
    from transformers import PreTrainedTokenizerFast

    metadata = read_metadata(gguf)
    tokens = metadata.get("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    if not tokens or not types:
        raise ConfigError(f"{gguf} holds no vocabulary (tokenizer.ggml.tokens and token_type)")
    special = {
        name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for key, name in _NAMES.items()
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    tokenizer = _build(tokens, types, special)
    if metadata.get("tokenizer.ggml.add_bos_token", True) and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, tokens.index(bos))],
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]
    fast.chat_template = metadata.get("tokenizer.chat_template")
    fast.save_pretrained(folder)


def _build(tokens: Sequence[str], types: Sequence[int], special: Mapping[str, str]) -> Tokenizer:
    # Runs of spaces are stored as such; in a text they are looked up after its normalisation.
    pieces = [_SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(pieces, vocab),
            unk_token=special.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, piece, kind in zip(tokens, pieces, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED) and token == piece
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _merges(pieces: Sequence[str], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others; pieces of smaller id come first.

    SentencePiece keeps no merges: it joins the neighbours whose union has the best score. Gemma's
    ids are in the order of the scores, after what users defined (runs of spaces and line ends).
    """
    found: list[tuple[str, str]] = []
    for piece in pieces:
        halves = ((piece[:cut], piece[cut:]) for cut in range(len(piece) - 1, 0, -1))
        found += [(a, b) for a, b in halves if a in vocab and b in vocab]
    return found
