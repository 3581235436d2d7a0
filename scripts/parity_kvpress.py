"""Compare what our methods keep with what kvpress 0.5.5 keeps: docs/results/parity-kvpress.md.

kvpress needs transformers < 5.3, so `scripts/parity.py` runs this in an environment of its own.
Both sides run one random llama in fp32 on one prompt. kvpress scores what its forward hooks see, we
score what the cache holds: nothing is shared but the weights. Exits with 1 where they disagree by
more than rounding.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor

from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.llm import LLM
from sparseengine.methods.families import EvictionMethod

PAGE = Path(__file__).parents[1] / "docs" / "results" / "parity-kvpress.md"
LENGTH, VOCAB, LAYERS, KV_HEADS = 512, 128, 4, 2
REMOVED = (0.25, 0.5, 0.75, 0.875)
ROUNDING = 1e-4  # of scores, relative to the largest
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}7{% endif %}"
)


@dataclass
class Side:
    """Per layer: scores [Hkv, L] and what is kept, bool [Hkv, L]."""

    scores: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """A press and our method; `skip` slots (first, last) are protected, so scores differ there."""

    name: str
    press: Callable[[float], Any]
    method: str
    knobs: dict[str, Any]
    skip: tuple[int, int] = (0, 0)
    attention: str = "sdpa"
    scale: float = 1.0  # theirs over ours


@dataclass(frozen=True)
class Found:
    """One comparison.

    agreement: share of kept slots that both sides keep. score: largest difference of two scores
    over the largest score; None: there are none. spread: how far apart the scores are of slots that
    one side alone keeps, over the largest score. kept: slots that each side keeps.
    """

    agreement: float
    score: float | None
    spread: float
    kept: tuple[int, int]

    def row(self) -> str:
        """The cells of the table."""
        per_row = max(self.kept) / (LAYERS * KV_HEADS)
        score = "-" if self.score is None else f"{self.score:.1e}"
        return f"{per_row:.1f} | {self.agreement:.4f} | {score} | {self.spread:.1e}"

    def faults(self) -> list[str]:
        """What is more than rounding; slots of equal scores may go either way."""
        found = []
        if self.kept[0] != self.kept[1]:
            found.append(f"{self.kept[0]} slots kept, kvpress keeps {self.kept[1]}")
        if self.score is not None and not self.score <= ROUNDING:
            found.append(f"scores differ by {self.score:.1e}")
        if self.agreement < 1 and (self.score is None or not self.spread <= ROUNDING):
            found.append(f"{self.agreement:.4f} of the slots agree, spread {self.spread:.1e}")
        return found


def presses() -> list[Pair]:
    import kvpress

    ada, snap = kvpress.AdaKVPress, kvpress.SnapKVPress
    expected = kvpress.ExpectedAttentionPress
    preset = {"preset": "kvpress"}
    return [
        Pair("StreamingLLMPress", kvpress.StreamingLLMPress, "streaming_llm", preset),
        Pair("KnormPress", kvpress.KnormPress, "knorm", preset),
        Pair("KeyDiffPress", kvpress.KeyDiffPress, "keydiff", preset),
        Pair("SnapKVPress", snap, "snapkv", preset, (0, 64)),
        Pair("PyramidKVPress", kvpress.PyramidKVPress, "pyramidkv", preset, (0, 64)),
        Pair("TOVAPress", kvpress.TOVAPress, "tova", preset, (0, 1)),
        Pair(
            "ExpectedAttentionPress(epsilon=0.01)",
            lambda r: expected(r, epsilon=1e-2),
            "expected_attention",
            preset,
            (4, 0),
        ),
        Pair(
            "AdaKVPress(KnormPress)",
            lambda r: ada(kvpress.KnormPress(r)),
            "adakv",
            {"scorer": "knorm", **preset},
        ),
        Pair("AdaKVPress(SnapKVPress)", lambda r: ada(snap(r)), "adakv", preset, (0, 64)),
        Pair(
            "AdaKVPress(ExpectedAttentionPress(epsilon=0.01))",
            lambda r: ada(expected(r, epsilon=1e-2)),
            "adakv",
            {"scorer": "expected_attention", **preset},
            (4, 0),
        ),
        Pair(  # theirs is the mean of a head's query group, ours the sum
            "ObservedAttentionPress",
            kvpress.ObservedAttentionPress,
            "h2o",
            preset,
            attention="eager",
            scale=0.25,
        ),
        *(
            Pair(
                f"KVzipPress(chunk_size=200, layerwise={form == 'layer'})",
                partial(kvpress.KVzipPress, chunk_size=200, layerwise=form == "layer"),
                "kvzip",
                {**preset, "chunk": 200, "form": form},
                (4, 0),
            )
            for form in ("pair", "layer")
        ),
    ]


def same_rows(before: Tensor, after: Tensor) -> Tensor:
    """Which rows of [H, L, D] are among those of [H, n, D]: bool [H, L]."""
    exact = "donot_use_mm_for_euclid_dist"
    return (torch.cdist(before, after, compute_mode=exact) < 1e-5).any(-1)


def theirs(model: Any, press: Any, tokens: Tensor) -> Side:
    """Scores and kept slots of a press; kept ones are found again in the cache by their keys."""
    side = Side()
    watch(getattr(press, "press", press), side)
    dense, cache = (transformers.DynamicCache(config=model.config) for _ in range(2))
    model(tokens, past_key_values=dense)
    for module in (layer.self_attn for layer in model.model.layers):
        module.masked_key_indices = None
    with press(model):
        model(tokens, past_key_values=cache)
    for index, layer in enumerate(cache.layers):
        masked = model.model.layers[index].self_attn.masked_key_indices
        if masked is not None:
            kept = torch.ones(layer.keys.shape[1:3], dtype=torch.bool)
            kept[masked[1], masked[2]] = False
            side.kept[index] = kept
            continue
        before, after = dense.layers[index].keys[0], layer.keys[0]  # [Hkv, L, D]
        side.kept[index] = same_rows(before, after)
    return side


def watch(press: Any, side: Side) -> None:
    """Copy the scores of a press: those of each layer, or of all layers when it cuts."""
    if not hasattr(press, "score"):
        cut = press.compress_post

        def before(model: Any) -> None:
            side.scores.update(enumerate(press.score_val[:, 0].clone()))
            cut(model)

        press.compress_post = before
        return
    score = press.score

    def spy(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        found = score(module, *args, **kwargs)
        side.scores[module.layer_idx] = found[0].clone()
        return found

    press.score = spy


def ours(folder: str, pair: Pair, budget: int, tokens: Tensor) -> Side:
    """Scores and kept slots of a method in a running engine."""
    side = Side()
    options: dict[str, Any] = {"max_model_len": LENGTH + 8, "kv_cache_memory_bytes": 64 << 20}
    options |= {"sparse_method": pair.method, "sparse_config": pair.knobs}
    with LLM(folder, quiet=True, **options) as llm:
        sparse = SparseParams(pair.method, budget=budget, **pair.knobs)
        (method,) = llm.engine.controller.methods.values()
        evict, length = method.evict, len(tokens[0])

        def keep(plan: Any) -> Any:
            scorers = (method, getattr(method, "scorer", None))  # which waits with the scores
            for scorer in (s for s in scorers if isinstance(s, EvictionMethod)):
                for layer, found in chain(*(p.items() for p in scorer._pending.values())):
                    side.scores[layer] = found.scores.expand(KV_HEADS, -1).clone()
            keeps = evict(plan)
            for one in keeps:
                for layer in range(LAYERS) if one.layer is None else (one.layer,):
                    rows = torch.stack(list(one.masks))
                    side.kept.setdefault(layer, rows.expand(KV_HEADS, -1).clone())
            return keeps

        method.evict = keep
        two = SamplingParams(max_tokens=2, ignore_eos=True)  # some cut after the first token
        llm.generate([tokens[0].tolist()], two, sparse, use_tqdm=False)
    assert all(m.shape[1] == length for m in side.kept.values()), "one cut of the whole prompt"
    return side


def spread(a: Side, b: Side) -> float:
    """How far apart the scores of slots are that one side alone keeps, over the largest score."""
    worst = 0.0
    for layer in a.scores.keys() & b.scores.keys():
        for h, differs in enumerate(a.kept[layer] ^ b.kept[layer]):
            scores = b.scores[layer][h]
            if differs.any():
                found = scores[differs]
                worst = max(worst, float((found.max() - found.min()) / scores.abs().max()))
    return worst


def compare(pair: Pair, a: Side, b: Side) -> Found:
    """Ours and theirs, over all layers and KV heads."""
    both = sum(int((a.kept[i] & b.kept[i]).sum()) for i in range(LAYERS))
    kept = tuple(sum(int(s.kept[i].sum()) for i in range(LAYERS)) for s in (a, b))
    first, last = pair.skip
    worst: float | None = None
    for layer in a.scores.keys() & b.scores.keys():
        x, y = (s.scores[layer][:, first:] for s in (a, b))
        width = x.shape[1] - last
        x, y = x[:, :width] * pair.scale, y[:, :width]
        worst = max(worst or 0.0, float((x - y).abs().max() / y.abs().max()))
    return Found(both / max(kept), worst, spread(a, b), (kept[0], kept[1]))


def table(folder: str) -> tuple[list[str], list[str]]:
    """One line per press and ratio, and one per mismatch."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=KV_HEADS, head_dim=16,
        max_position_embeddings=LENGTH * 2, initializer_range=0.3,
    )  # fmt: skip
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    words = tokenizers.models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    model.config.name_or_path = folder  # where a press looks for the tokenizer
    tokens = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    lines, faults = [], []
    for pair in presses():
        model.set_attn_implementation(pair.attention)
        knobs = ", ".join(f"{k}={v}" for k, v in pair.knobs.items())
        for removed in REMOVED:
            reference = theirs(model, pair.press(removed), tokens)
            mine = ours(folder, pair, int(LENGTH * (1 - removed)), tokens)
            found = compare(pair, mine, reference)
            where = f"{pair.name} | {pair.method} ({knobs}) | {1 - removed:.3f}"
            lines.append(f"| {where} | {found.row()} |")
            faults += [f"{where}: {fault}" for fault in found.faults()]
    return lines, faults


HEAD = f"""# Parity with kvpress

What our methods keep under `preset="kvpress"`, next to what the presses of kvpress 0.5.5 keep, on a
random llama ({LAYERS} layers, 8 query and {KV_HEADS} KV heads, fp32) and {LENGTH} random tokens.
*agreement* is the share of kept slots that both sides keep, over all layers and KV heads;
*score* the largest difference of two scores over the largest score, protected slots left out;
*spread* how far apart the scores are of slots that one side alone keeps, over the largest score.

```bash no-run
make parity
```

makes the table anew, in an environment of its own in the user's cache folder, and fails where more
than rounding differs: other numbers of slots, scores that are more than {ROUNDING:.0e} of the
largest apart, or slots that one side alone keeps though their scores differ by more than that.

| press | method | ratio kept | kept per row | agreement | score | spread |
|---|---|---|---|---|---|---|
"""

TAIL = """
- Key norms: a rotation keeps a key's norm, so equal tokens have equal norms in the first layer, but
  for rounding. Which of them stays at the cut is decided by rounding and by the order of equal
  scores; the spread says that no other slots differ.
- Ties: ours go to the smaller position, `torch.topk` promises no order.
- The score of ObservedAttentionPress is the mean of a head's query group, that of `h2o` the sum: it
  is divided by the group's size here.
- AdaKVPress masks keys and frees no memory; `adakv` frees the pages of what it drops.
- KVzipPress masks, too. Its repetitions begin with what a chat template puts behind the text, as
  ours do.
- PyramidKVPress falls back to uniform budgets where its window does not fit; `form="kvpress"`
  reproduces that.

Not compared: BlockPress, which runs the whole prompt before it evicts block by block, where
`keydiff` with `block_tokens` attends to what was retained; presses that have no method here.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        lines, faults = table(folder)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(HEAD + "\n".join(lines) + "\n" + TAIL)
    print("\n".join(lines))
    for fault in faults:
        print(f"mismatch: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
