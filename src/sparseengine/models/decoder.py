"""What decoder-only families share: embedding, layers, one rotation per layer, output head.

A family is a subclass of `CausalLM` that says what its config means (`build_spec`, `rope_specs`)
and what a layer is (`make_layer`). Parameter names are the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparseengine.core.context import StepContext
from sparseengine.core.specs import ModelSpec
from sparseengine.models import fields
from sparseengine.nn.embedding import Embedding
from sparseengine.nn.linear import Linear
from sparseengine.nn.norm import RMSNorm
from sparseengine.nn.rope import RopeSpec, RotaryEmbedding, Rotation, rope_spec

Config = Mapping[str, Any]


def enter(norm: RMSNorm, hidden: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor]:
    """(hidden + extra, its norm), in one pass; extra None is nothing."""
    return (hidden, norm(hidden)) if extra is None else norm.add(extra, hidden)


def attended(
    attention: nn.Module, hidden: Tensor, normed: Tensor, rotation: Rotation, ctx: StepContext
) -> tuple[Tensor, Tensor]:
    """(hidden, attention of its norm), both of the tokens that are of use behind the attention."""
    wanted = ctx.wanted_behind(attention.layer)
    mixed = attention(normed, rotation, ctx, wanted)
    return (hidden if wanted is None else hidden[wanted.rows]), mixed


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream.

    A layer takes the stream as two tensors whose sum it is, and leaves it so: the sum and the norm
    that follows are one pass over memory.
    """

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        attention: nn.Module,
        mlp: nn.Module,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        eps, hidden, dtype = fields.real(config, "rms_norm_eps"), spec.hidden_size, spec.dtype
        self.input_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp = mlp

    def forward(
        self, hidden: Tensor, extra: Tensor | None, rotation: Rotation, ctx: StepContext
    ) -> tuple[Tensor, Tensor]:
        """hidden, extra [T, hidden] -> the same, of `ctx.wanted_behind` this layer's attention.

        extra None is nothing.
        """
        hidden, normed = enter(self.input_layernorm, hidden, extra)
        hidden, mixed = attended(self.self_attn, hidden, normed, rotation, ctx)
        hidden, normed = self.post_attention_layernorm.add(mixed, hidden)
        return hidden, self.mlp(normed)


class Decoder(nn.Module):
    """Everything below the output head: the checkpoint's names after `model.`."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: list[nn.Module],
        norm: RMSNorm,
        ropes: tuple[RopeSpec, ...],
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(
            spec.vocab_size, spec.hidden_size, dtype=spec.dtype, device=device
        )
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        distinct = list(dict.fromkeys(ropes))
        self.ropes = nn.ModuleList(RotaryEmbedding(rope, device=device) for rope in distinct)
        self.rope_of = [distinct.index(rope) for rope in ropes]

    def forward(self, ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """ids, positions int64 [T] -> hidden [T, hidden], after the last norm; see `Model`."""
        hidden, extra = self.embed(ids), None
        rotations = [rope(positions, hidden.dtype, ctx.lengths) for rope in self.ropes]
        for layer, rope in zip(self.layers, self.rope_of, strict=True):
            hidden, extra = layer(hidden, extra, rotations[rope], ctx)
            ctx.layer_end(hidden, extra)
        hidden = ctx.wanted_of(hidden)  # layers may leave it to this
        extra = None if extra is None else ctx.wanted_of(extra)
        return enter(self.norm, hidden, extra)[1]

    def embed(self, ids: Tensor) -> Tensor:
        """ids int64 [T] -> [T, hidden]."""
        hidden: Tensor = self.embed_tokens(ids)
        return hidden


class CausalLM(nn.Module):
    """A decoder with an output head. `tied` models share the embedding with the head."""

    decoder_class: ClassVar[type[Decoder]] = Decoder

    def __init__(
        self, config: Config, spec: ModelSpec, *, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.spec = spec
        self.tied = fields.flag(config, "tie_word_embeddings", default=self.default_tied())
        layers = [self.make_layer(i, config, spec, device) for i in range(len(spec.layers))]
        norm = self.make_norm(config, spec, device)
        ropes = self.rope_specs(config, spec)
        self.model = self.decoder_class(spec, layers, norm, ropes, device)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size, dtype=spec.dtype, device="meta")
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        else:
            self.lm_head.to_empty(device=device)

    @classmethod
    def build_spec(cls, config: Config, dtype: torch.dtype) -> ModelSpec:
        """The model's sizes. Raises ConfigError for a missing field or an unsupported feature."""
        raise NotImplementedError

    @classmethod
    def filled(cls, config: Config) -> Config:
        """The config as `rope_specs` takes it: with the family's defaults where it has nothing."""
        return config

    def make_layer(
        self, layer: int, config: Config, spec: ModelSpec, device: torch.device | str
    ) -> nn.Module:
        """One decoder layer, called as `DecoderLayer` is."""
        raise NotImplementedError

    def make_norm(self, config: Config, spec: ModelSpec, device: torch.device | str) -> RMSNorm:
        """The norm before the output head."""
        eps = fields.real(config, "rms_norm_eps")
        return RMSNorm(spec.hidden_size, eps, dtype=spec.dtype, device=device)

    @classmethod
    def rope_specs(cls, config: Config, spec: ModelSpec) -> tuple[RopeSpec, ...]:
        """The rotation of every layer; equal ones are computed once a step."""
        return (rope_spec(config, spec.layers[0].head_dim),) * len(spec.layers)

    @classmethod
    def default_tied(cls) -> bool:
        """Whether the head is the embedding when the config does not say."""
        return False

    @classmethod
    def ignores(cls, name: str, spec: ModelSpec) -> bool:
        """Whether a checkpoint tensor belongs to a part that is not run (a draft layer, say)."""
        return name.endswith("rotary_emb.inv_freq")  # old exporters; frequencies are the config's

    @classmethod
    def rename(cls, name: str) -> str:
        """A checkpoint's tensor name as this model spells it."""
        return name

    def forward(self, ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """ids, positions int64 [T] -> hidden [T, hidden], after the last norm; see `Model`."""
        hidden: Tensor = self.model(ids, positions, ctx)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] -> float32 [N, vocab]."""
        logits: Tensor = self.lm_head(hidden).float()
        return logits
