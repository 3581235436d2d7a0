"""A hybrid toy model: FULL, WINDOW, LATENT and RECURRENT layers, random seeded weights, fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseengine.core.context import StepContext
from sparseengine.core.specs import LayerKind, LayerSpec, ModelSpec, Rotary

HIDDEN, VOCAB = 32, 61
ROTARY = 4  # rotated channels of a latent
WINDOW = 24

KINDS = {
    "f": LayerSpec(kind=LayerKind.FULL, q_heads=4, kv_heads=2, head_dim=8, value_dim=8),
    "g": LayerSpec(kind=LayerKind.FULL, q_heads=4, kv_heads=1, head_dim=8, value_dim=8),
    "w": LayerSpec(
        kind=LayerKind.WINDOW, q_heads=4, kv_heads=2, head_dim=8, value_dim=8, window=WINDOW
    ),
    "l": LayerSpec(kind=LayerKind.LATENT, q_heads=4, kv_heads=1, head_dim=16, value_dim=12),
    "r": LayerSpec(kind=LayerKind.RECURRENT, state=((HIDDEN,),)),
}


def _rotary(channels: int) -> Rotary:
    return Rotary(inv_freq=tuple(_frequencies(channels // 2).tolist()))


def _frequencies(half: int) -> Tensor:
    return 100.0 ** (-torch.arange(half) / half)


ROTATED = {"l": ROTARY, "r": 0}  # channels; of other layers all


def toy_spec(kinds: str, dtype: torch.dtype = torch.float32) -> ModelSpec:
    """A model of the layers named by letters: f and g FULL, w WINDOW, l LATENT, r RECURRENT."""
    return ModelSpec(
        layers=tuple(KINDS[c] for c in kinds),
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        max_position=4096,
        dtype=dtype,
        architecture="Toy",
        rotaries=tuple(_rotary(ROTATED.get(c, KINDS[c].head_dim)) for c in kinds),
    )


class Toy:
    """Embedding, attention or a linear recurrence per layer, residuals, a head."""

    def __init__(self, kinds: str = "fw", seed: int = 0) -> None:
        self.spec = toy_spec(kinds)
        rng = torch.Generator().manual_seed(seed)

        def weight(rows: int, cols: int, gain: float = 1.0) -> Tensor:
            return torch.randn(rows, cols, generator=rng) * (gain / rows**0.5)

        self.embedding = torch.randn(VOCAB, HIDDEN, generator=rng)
        self.head = weight(HIDDEN, VOCAB)
        self.weights: list[dict[str, Tensor]] = []
        for spec in self.spec.layers:
            if spec.kind is LayerKind.RECURRENT:
                self.weights.append({"a": weight(HIDDEN, HIDDEN)})
                continue
            self.weights.append(
                {
                    "q": weight(HIDDEN, spec.q_heads * spec.head_dim, 2.0),
                    "k": weight(HIDDEN, spec.kv_heads * spec.head_dim, 2.0),
                    "v": weight(HIDDEN, spec.kv_heads * spec.value_dim),
                    "o": weight(spec.q_heads * spec.value_dim, HIDDEN),
                }
            )

    def __call__(self, ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """ids, positions [T] -> hidden [T, hidden], of the tokens that are wanted."""
        x = self.embedding[ids]
        for layer, (spec, w) in enumerate(zip(self.spec.layers, self.weights, strict=True)):
            h = torch.nn.functional.rms_norm(x, (HIDDEN,))
            if spec.kind is LayerKind.RECURRENT:
                x = x + _recur(layer, h @ w["a"], ctx)
                continue
            q = (h @ w["q"]).view(len(ids), spec.q_heads, spec.head_dim)
            k = (h @ w["k"]).view(len(ids), spec.kv_heads, spec.head_dim)
            if spec.kind is LayerKind.LATENT:
                q, k = _rotate(q, positions, ROTARY), _rotate(k, positions, ROTARY)
                v = k[..., : spec.value_dim]
            else:
                q, k = _rotate(q, positions, 8), _rotate(k, positions, 8)
                v = (h @ w["v"]).view(len(ids), spec.kv_heads, spec.value_dim)
            wanted = ctx.wanted_behind(layer)
            x = x if wanted is None else x[wanted.rows]
            x = x + ctx.attend(layer, q, k, v, wanted).flatten(1) @ w["o"]
            ctx.layer_end(x)
        return ctx.wanted_of(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head


def _rotate(x: Tensor, positions: Tensor, channels: int) -> Tensor:
    """Rotary embedding of the last `channels` channels: x [T, H, D]."""
    half = channels // 2
    angle = positions[:, None, None] * _frequencies(half)  # [T, 1, half]
    a, b = x[..., -channels:-half], x[..., -half:]
    turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.cat((x[..., :-channels], *turned), -1)


def _recur(layer: int, u: Tensor, ctx: StepContext) -> Tensor:
    """h_t = 0.9 h_(t-1) + u_t, carried over chunks by the cache."""
    (state,) = ctx.cache.state(layer)  # [B, hidden]
    out, new, at = torch.empty_like(u), state.clone(), 0
    for i, chunk in enumerate(ctx.plan.chunks):
        for t in range(at, at + len(chunk.tokens)):
            new[i] = 0.9 * new[i] + u[t]
            out[t] = new[i]
        at += len(chunk.tokens)
    ctx.cache.set_state(layer, (new,))
    return out
