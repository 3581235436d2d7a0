"""Self-attention block of a decoder layer. Storage, selection and kernels are the context's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparseengine import ops
from sparseengine.core.context import StepContext
from sparseengine.core.specs import LayerSpec
from sparseengine.core.view import Wanted
from sparseengine.nn.linear import Linear, MergedLinear
from sparseengine.nn.norm import RMSNorm
from sparseengine.nn.rope import Rotation


class Attention(nn.Module):
    """Projections, optional per-head norm of Q and K, rotation, attention, output projection.

    Head counts come from `spec` and are rank-local. `qk_norm_eps` not None puts an RMS norm over
    each head of Q and K before the rotation (Qwen3), of class `norm` (Gemma 3 has its own). merged:
    the checkpoint holds Q, K and V as one matrix, `qkv_proj`.
    """

    def __init__(
        self,
        layer: int,
        spec: LayerSpec,
        hidden_size: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        norm: type[RMSNorm] = RMSNorm,
        merged: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.layer = layer
        self.spec = spec
        q_size, k_size = spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim
        parts = (q_size, k_size, spec.kv_heads * spec.value_dim)
        self.qk_size, self.v_size = q_size + k_size, parts[2]
        out_size = spec.q_heads * spec.value_dim
        names = () if merged else ("q_proj", "k_proj", "v_proj")
        self.qkv_proj = MergedLinear(
            hidden_size, parts, qkv_bias, names=names, dtype=dtype, device=device
        )
        self.o_proj = Linear(out_size, hidden_size, out_bias, dtype=dtype, device=device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm_eps is not None:
            self.q_norm = norm(spec.head_dim, qk_norm_eps, dtype=dtype, device=device)
            self.k_norm = norm(spec.head_dim, qk_norm_eps, dtype=dtype, device=device)

    def forward(
        self, hidden: Tensor, rotation: Rotation, ctx: StepContext, wanted: Wanted | None = None
    ) -> Tensor:
        """hidden [T, hidden] -> [T, hidden], or [N, hidden] of the tokens that are wanted."""
        spec = self.spec
        heads = [spec.q_heads, spec.kv_heads]
        qk, v = torch.split(self.qkv_proj(hidden), [self.qk_size, self.v_size], dim=-1)
        qk = torch.unflatten(qk, -1, (sum(heads), spec.head_dim))  # [T, Hq + Hkv, D]
        v = torch.unflatten(v, -1, (spec.kv_heads, spec.value_dim))  # [T, Hkv, Dv]
        q, k = torch.split(self._turned(qk, rotation), heads, dim=1)
        out: Tensor = self.o_proj(ctx.attend(self.layer, q, k, v, wanted).flatten(1))
        return out

    def _turned(self, qk: Tensor, rotation: Rotation) -> Tensor:
        """Heads normed and rotated, [T, Hq + Hkv, D]."""
        assert not rotation.interleaved, "no grouped-query family pairs neighbouring channels"
        scales: tuple[Tensor | None, Tensor | None] = (None, None)
        heads, eps = self.spec.q_heads, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            scales, eps = (self.q_norm.scale(), self.k_norm.scale()), self.q_norm.eps
        return ops.norm_rotate(qk, rotation.cos, rotation.sin, heads, *scales, eps)
