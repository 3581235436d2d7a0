"""The sizes of a decoder with grouped-query attention, from the fields that all families share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparseengine.core.specs import LayerKind, LayerSpec, ModelSpec
from sparseengine.models import fields
from sparseengine.models.decoder import Config


def dense_spec(
    config: Config,
    dtype: torch.dtype,
    *,
    windows: Sequence[int | None],
    head_dim: int | None = None,
    scale: float = 0.0,
    softcap: float = 0.0,
) -> ModelSpec:
    """A layer for each of `windows` (None: full attention), alike but for that.

    head_dim: channels per head when the config does not say; None shares `hidden_size` out.
    scale, softcap: see LayerSpec. Raises ConfigError for a missing or impossible field.
    """
    heads = fields.count(config, "num_attention_heads")
    kv_heads = fields.count(config, "num_key_value_heads", default=heads)
    fields.require_divides(config, kv_heads, heads)
    hidden = fields.count(config, "hidden_size")
    channels = fields.count(config, "head_dim", default=head_dim or hidden // heads)
    layers = tuple(
        LayerSpec(
            kind=LayerKind.FULL if window is None else LayerKind.WINDOW,
            q_heads=heads,
            kv_heads=kv_heads,
            head_dim=channels,
            value_dim=channels,
            window=window,
            scale=scale,
            softcap=softcap,
        )
        for window in windows
    )
    return ModelSpec(
        layers=layers,
        vocab_size=fields.count(config, "vocab_size"),
        hidden_size=hidden,
        max_position=fields.count(config, "max_position_embeddings"),
        dtype=dtype,
        architecture=fields.architecture(config),
    )
