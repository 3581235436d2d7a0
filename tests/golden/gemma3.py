"""Prompts and texts for Gemma 3 270M, and what transformers makes of them.

`python tests/golden/gemma3.py` recomputes gemma3_oracle.json with transformers (five minutes). The
reference model is built from our decoded weights and our config, because transformers reads this
file wrongly before 5.24; that its reader agrees from there on is a test.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
import zlib
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
import transformers

from golden.paged import PagedRun
from golden.smollm2 import digest, greedy, prompt_text
from sparseengine.config import ModelConfig
from sparseengine.weights.source import ModelSource, open_model

HERE = Path(__file__).parent
ORACLE = HERE / "gemma3_oracle.json"
# Prompt length -> seed of its text, chosen as for SmolLM2.
SEEDS = {20: 2, 700: 1, 3000: 3}
NUM_TOKENS = 48
TEXT_TOKENS = 8192
SCORED = 8  # the test scores every eighth token of the text
WINDOWS = 16  # their losses are recorded in this many parts, to say where two differ


def open_gemma() -> ModelSource:
    return open_model(ModelConfig(model="gemma3-270m"))


def prompt_ids(tokenizer: Any, length: int) -> list[int]:
    """The first `length` tokens of a chronicle."""
    ids = tokenizer(prompt_text(length // 8 + 8, SEEDS[length])).input_ids
    assert len(ids) >= length
    return list(ids[:length])


class _Page(HTMLParser):
    """Collects what a reader of a page sees."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = 0
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)


def real_text(folder: Path) -> str:
    """The Apache licence, Gemma's terms and technical prose: the same on every machine."""
    page = _Page()
    page.feed((folder / "GEMMA_TERMS.html").read_text(encoding="utf-8"))
    terms = re.sub(r"\s+", " ", " ".join(page.parts)).strip()
    licence = (HERE.parents[1] / "LICENSE").read_text(encoding="utf-8")
    prose = (HERE / "gemma3_text.txt").read_text(encoding="utf-8")
    return f"{licence}\n\n{terms}\n\n{prose}"


def text_ids(tokenizer: Any, folder: Path) -> list[int]:
    ids = tokenizer(real_text(folder)).input_ids
    assert len(ids) >= TEXT_TOKENS
    return list(ids[:TEXT_TOKENS])


def tokenizer_digest(folder: Path) -> str:
    """Of the vocabulary, the merges and the added tokens of a folder's tokenizer.json."""
    values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = [(t["id"], t["content"], t["special"]) for t in values["added_tokens"]]
    whole = [values["model"]["vocab"], values["model"]["merges"], added]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()


def transformers_tokenizer_digest(gguf: Path) -> str:
    """The same of what transformers converts (half a minute)."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
        return tokenizer_digest(Path(folder))


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Of all names, shapes and bits."""
    sums = sorted((n, list(t.shape), zlib.crc32(t.contiguous().numpy())) for n, t in tensors)
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def transformers_weights_digest(gguf: Path, config: dict[str, Any]) -> str:
    """The same of what transformers' own reader makes of the file."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = Gemma3ForCausalLM(Gemma3TextConfig(**config))
    loaded = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    for name in ("head_dim", "sliding_window", "num_key_value_heads", "tie_word_embeddings"):
        assert config[name] == loaded["config"][name], name
    return weights_digest(loaded["tensors"].items())


def losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihoods [N] of `targets` [N] under `logits` [N, V]."""
    return logits.logsumexp(-1) - logits.gather(1, targets[:, None]).squeeze(1)


def reference_model(source: ModelSource) -> torch.nn.Module:
    """transformers' Gemma 3 in fp32, with our weights and our config."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(**source.hf_config, attn_implementation="sdpa")
    model = Gemma3ForCausalLM(config)
    missing, unexpected = model.load_state_dict(dict(source.tensors()), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    return model.eval()


@torch.inference_mode()
def reference_losses(model: Any, ids: list[int], step: int = 512) -> torch.Tensor:
    """Loss of every token but the first; one pass, the head in parts."""
    hidden = model.model(torch.tensor([ids])).last_hidden_state[0, :-1]
    targets = torch.tensor(ids[1:])
    parts = zip(hidden.split(step), targets.split(step), strict=True)
    return torch.cat([losses(model.lm_head(states), wanted) for states, wanted in parts])


@torch.inference_mode()
def engine_losses(gguf: Path, ids: list[int], step: int = 512) -> torch.Tensor:
    """The same by this engine."""
    run, found = PagedRun(gguf, max_tokens=len(ids), backend="cpu"), []
    for start in range(0, len(ids), step):
        logits = run.feed(ids[start : start + step])
        wanted = torch.tensor(ids[start + 1 : start + step + 1])
        found.append(losses(logits[: len(wanted)], wanted))
    return torch.cat(found)


def text_oracle(loss: torch.Tensor) -> dict[str, Any]:
    """What is recorded of the losses: of the scored tokens, in parts, and of all."""
    scored = loss[::SCORED].double()
    parts = [round(part.mean().item(), 5) for part in scored.chunk(WINDOWS)]
    return {"loss": scored.mean().item(), "parts": parts, "all": loss.double().mean().item()}


def main() -> None:
    source = open_gemma()
    assert source.path is not None
    tokenizer, model = source.load_tokenizer(), reference_model(source)
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    assert version >= (5, 24), "an earlier reader gets this file wrong"
    oracle: dict[str, Any] = {
        "tokenizer": transformers_tokenizer_digest(source.path),
        "weights": transformers_weights_digest(source.path, source.hf_config),
    }
    for length in SEEDS:
        ids = prompt_ids(tokenizer, length)
        tokens, gap = greedy(model, ids, NUM_TOKENS)
        oracle[str(length)] = {"prompt": digest(ids), "tokens": tokens, "min_gap": round(gap, 4)}
        print(length, round(gap, 4), repr(tokenizer.decode(tokens)))
    ids = text_ids(tokenizer, source.path.parent)
    oracle["text"] = {"ids": digest(ids), **text_oracle(reference_losses(model, ids))}
    ORACLE.write_text(json.dumps(oracle) + "\n", encoding="utf-8")
    ours = text_oracle(engine_losses(source.path, ids))
    for name, found in (("transformers", oracle["text"]), ("here", ours)):
        print(name, "perplexity", math.exp(found["all"]), found["parts"])


if __name__ == "__main__":
    main()
