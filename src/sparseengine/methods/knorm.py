"""Key-norm eviction (arXiv:2406.11430): keys of small norm attract attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparseengine.core.method import LayerStep
from sparseengine.core.specs import LayerKind
from sparseengine.methods.families import EvictionConfig, EvictionMethod
from sparseengine.methods.knobs import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class KnormConfig(EvictionConfig):
    """Knobs of key-norm eviction."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "authors": {"skip_layers": (0, 1), "sink": 0, "recent": 0},
            "kvpress": {"skip_layers": (), "sink": 0, "recent": 0},
        }
    )

    skip_layers: tuple[int, ...] = knob(
        (0, 1), "layers that stay dense, by index in the model", low=0, high=1 << 16
    )


class Knorm(EvictionMethod):
    """Retains the keys of smallest L2 norm per KV head (arXiv:2406.11430). Looks at no query.

    Deviations: sinks and recent tokens are forced; of a latent only the value channels count, the
    rotary part is left out (not validated by the paper).
    """

    name = "knorm"
    config_class = KnormConfig
    keys_suffice = True

    def dense_layers(self) -> frozenset[int]:
        return super().dense_layers() | frozenset(self.config.skip_layers)

    def score(self, at: LayerStep, chunk: int) -> Tensor:
        """Negative norm: fp32 [Hkv, L]."""
        norm: Tensor = torch.linalg.vector_norm(content_keys(at, chunk), dim=-1)
        return -norm


def content_keys(at: LayerStep, chunk: int) -> Tensor:
    """Stored keys without a latent's rotary channels: fp32 (fp64 stays) [Hkv, L, D]."""
    keys = at.gather("keys", chunk)
    if at.spec.kind is LayerKind.LATENT:
        keys = keys[..., : at.spec.value_dim]
    return keys if keys.element_size() == 8 else keys.float()
