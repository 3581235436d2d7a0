"""Train the recall checkpoints of tests/data/recall: minutes on one core each, seeded.

    python scripts/train_recall.py            # all of them
    python scripts/train_recall.py gqa mla    # some

A few layers that look up a key's value in a text (tests/fixtures/recall.py). That takes two steps
of attention: one copies each token to its successor, a later one finds the token behind a key.
Found by chance they take thousands of steps, so at first a second loss asks the heads of the last
but one layer to look at the previous token and those of the last one at the answer; it fades out
halfway. Contexts grow as the accuracy does. Weights are saved as bf16.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from fixtures.recall import (  # noqa: E402
    ASK,
    BOS,
    EOS,
    FILLER,
    KEYS,
    VALUES,
    VOCAB,
    Recall,
    make_recall,
)

FOLDER = ROOT / "tests" / "data" / "recall"
SEED = 0
WARMUP, RATE = 30, 2e-3
GUIDED = 0.5  # part of the steps in which the heads are told where to look
# texts, pairs, tokens of context, questions; the next once this is solved
STAGES = ((64, 8, 24, 8), (32, 12, 64, 8), (24, 16, 128, 8), (16, 16, 192, 8))
SOLVED = 0.9
LAST_STAGES = 2  # alternated when all are solved

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
# name: config class, model class, steps, what differs from _SIZES
MODELS: dict[str, tuple[Any, Any, int, dict[str, Any]]] = {
    "gqa": (LlamaConfig, LlamaForCausalLM, 700, {"num_hidden_layers": 4}),
    "moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        300,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    "mla": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        300,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 48,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "head_dim": 16,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 48,
        },
    ),
    "window": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        300,
        {
            "layer_types": [_SLIDING, _FULL],
            "sliding_window": 32,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
    ),
}


def guide(attentions: tuple[Tensor, ...], data: Recall) -> Tensor:
    """How far the heads are from looking where they should, as a mean -log of attention."""
    previous = attentions[-2].mean(1).diagonal(-1, 1, 2)
    found = attentions[-1][:, :, data.asked].mean(1).gather(2, data.where[..., None])
    return -(previous + 1e-6).log().mean() - (found + 1e-6).log().mean()


def train(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """(the model, its accuracy on texts it has not seen)."""
    config_class, model_class, steps, extra = MODELS[name]
    torch.manual_seed(SEED)
    config = config_class(**{**_SIZES, **extra}, attn_implementation="eager")
    model = model_class(config)
    generator = torch.Generator().manual_seed(SEED + 1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    stage, start = 0, time.monotonic()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP, 1.5 * (1 - step / steps))
        is_last = stage == len(STAGES) - 1
        now = stage - (step % LAST_STAGES if is_last else 0)
        texts, pairs, context, questions = STAGES[now]
        data = make_recall(
            generator, texts=texts, pairs=pairs, context=context, questions=questions
        )
        weight = 0.5 * max(0.0, 1 - step / (GUIDED * steps))
        loss, right, helped = losses(model, data, guided=weight > 0)
        optimiser.zero_grad()
        (loss + weight * helped).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if right > SOLVED and not is_last:
            stage += 1
        if step % 50 == 49:
            seconds = time.monotonic() - start
            print(
                f"{name} {step + 1}: context {context}, loss {loss.item():.3f}, right {right:.3f}, "
                f"{seconds:.0f} s",
                flush=True,
            )
    return model, {"steps": steps, "seed": SEED, "accuracy": accuracy(model)}


def losses(model: torch.nn.Module, data: Recall, *, guided: bool) -> tuple[Tensor, float, Tensor]:
    """(loss at the answers, part of them that is right, the guide's loss)."""
    output = model.model(data.ids, output_attentions=guided, use_cache=False)
    logits = model.lm_head(output.last_hidden_state[:, data.asked])
    target = data.ids[:, data.asked + 1]
    loss = cross_entropy(logits.flatten(0, 1), target.flatten())
    right = (logits.argmax(-1) == target).float().mean().item()
    return loss, right, guide(output.attentions, data) if guided else loss.new_zeros(())


@torch.no_grad()
def accuracy(model: torch.nn.Module) -> dict[str, float]:
    """By length of the context."""
    found = {}
    for context in (128, 192, 256):
        generator = torch.Generator().manual_seed(SEED + 2)
        data = make_recall(generator, texts=32, pairs=16, context=context, questions=8)
        found[str(context)] = losses(model, data, guided=False)[1]
    return found


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word for every token: k0 ... for keys, v0 ... for values, f0 ... for filler."""
    words = {"<pad>": 0, "<s>": BOS, "</s>": EOS, "ask": ASK}
    words |= {f"<{i}>": i for i in range(ASK + 1, KEYS)}
    for letter, first, stop in (("k", KEYS, VALUES), ("v", VALUES, FILLER), ("f", FILLER, VOCAB)):
        words |= {f"{letter}{i - first}": i for i in range(first, stop)}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def main() -> int:
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(MODELS)
    for name in names:
        model, facts = train(name)
        model.to(torch.bfloat16).save_pretrained(FOLDER / name)
        make_tokenizer().save_pretrained(FOLDER / name)
        (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
        text = json.dumps(facts, indent=2) + "\n"
        (FOLDER / name / "training.json").write_text(text, encoding="utf-8")
        print(f"{name}: {facts['accuracy']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
