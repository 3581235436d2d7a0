"""Prompts for SmolLM2 and the greedy tokens transformers gives for them.

`python tests/golden/smollm2.py` recomputes smollm2_greedy.json with transformers (a minute).
"""

from __future__ import annotations

import hashlib
import json
import random
from inspect import signature
from pathlib import Path
from typing import Any

import torch

ORACLE = Path(__file__).with_name("smollm2_greedy.json")
# Prompt length -> seed of its text. Chosen so that no two logits nearly tie on the way (`min_gap`):
# a tie would be decided by rounding, which no two implementations share.
SEEDS = {30: 4, 700: 4, 4000: 20}
LENGTHS = tuple(SEEDS)
NUM_TOKENS = 64

_WHO = ("A sailor", "The baker", "My neighbour", "An old teacher", "The night guard", "Her cousin")
_DID = ("found", "painted", "lost", "repaired", "described", "measured", "bought", "sketched")
_WHAT = ("a small boat", "the tower clock", "an iron key", "a map of the coast", "seven lamps")
_WHERE = ("near the harbour", "behind the mill", "in the market", "on the hill", "by the river")
_WHEN = ("before dawn", "last winter", "during the storm", "on a quiet Sunday", "years ago")


def prompt_text(num_sentences: int, seed: int) -> str:
    """Plain sentences, the same on every machine."""
    rng = random.Random(seed)
    parts = (_WHO, _DID, _WHAT, _WHERE, _WHEN)
    sentences = (" ".join(rng.choice(p) for p in parts) + "." for _ in range(num_sentences))
    return "A short chronicle of the town. " + " ".join(sentences)


def prompt_ids(tokenizer: Any, length: int) -> list[int]:
    """The first `length` tokens of the chronicle."""
    ids = tokenizer(prompt_text(length // 8 + 8, SEEDS[length])).input_ids
    assert len(ids) >= length
    return list(ids[:length])


def digest(ids: list[int]) -> str:
    """Detects a tokenizer or a generator that has changed since the oracle was written."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def reference_model(gguf: Path) -> torch.nn.Module:
    """SmolLM2 in fp32 by transformers' own GGUF reader."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    loaded = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    model.load_state_dict(
        {"lm_head.weight": loaded["tensors"]["model.embed_tokens.weight"], **loaded["tensors"]}
    )
    return model


@torch.inference_mode()
def greedy(model: Any, ids: list[int], num_tokens: int) -> tuple[list[int], float]:
    """(tokens, smallest gap between the best and the second logit met on the way)."""
    tokens, gap, cache, new = [], float("inf"), None, torch.tensor([ids])
    # transformers 5.2 and 5.24 name it differently
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    for _ in range(num_tokens):
        out = model(new, **{name: cache}, use_cache=True, logits_to_keep=1)
        best = out.logits[0, -1].topk(2)
        gap = min(gap, (best.values[0] - best.values[1]).item())
        tokens.append(int(best.indices[0]))
        cache, new = out[name], best.indices[None, :1]
    return tokens, gap


def main() -> None:
    from sparseengine.config import ModelConfig
    from sparseengine.weights.source import open_model

    source = open_model(ModelConfig(model="smollm2-135m"))
    assert source.path is not None
    tokenizer, model = source.load_tokenizer(), reference_model(source.path)
    oracle = {}
    for length in LENGTHS:
        ids = prompt_ids(tokenizer, length)
        tokens, gap = greedy(model, ids, NUM_TOKENS)
        oracle[str(length)] = {"prompt": digest(ids), "tokens": tokens, "min_gap": round(gap, 4)}
        print(length, round(gap, 4), repr(tokenizer.decode(tokens)))
    ORACLE.write_text(json.dumps(oracle) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
