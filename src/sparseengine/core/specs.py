"""What exists: layers, cache groups, side tensors. Every count is rank-local."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

import torch


class LayerKind(Enum):
    """How a layer remembers."""

    FULL = auto()
    WINDOW = auto()
    LATENT = auto()
    RECURRENT = auto()


class Ragged(Enum):
    """The axes along which rows may retain different tokens. Ordered from coarse to fine."""

    REQUEST = 0
    LAYER = 1
    HEAD = 2


class Per(Enum):
    """What one entry of a side tensor belongs to."""

    SLOT = auto()
    PAGE = auto()
    REQUEST = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer as the cache and the attention backends see it.

    `kv_heads` is 1 for LATENT, whose values are the first `value_dim` channels of its keys.
    `scale` multiplies q.k; 0 means head_dim ** -0.5 (read it through `softmax_scale`). `softcap` c
    not 0 bounds the scaled logits x before masking: c * tanh(x / c).
    """

    kind: LayerKind
    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    scale: float = 0.0
    softcap: float = 0.0
    state: tuple[tuple[int, ...], ...] = ()

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def softmax_scale(self) -> float:
        return self.scale or self.head_dim**-0.5

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """Channel counts of the stored tensors: (K, V), or (latent,) when V is a prefix of K."""
        if self.kind is LayerKind.LATENT:
            return (self.head_dim,)
        return (self.head_dim, self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """How a layer turns the first channels of Q and K by their position, for whoever undoes it.

    A channel and its pair turn by position * inv_freq[i] (float32) and are multiplied by `factor`.
    The pair of channel i is channel i + len(inv_freq); with `interleaved`, neighbours are pairs.
    by_length: the frequencies depend on the text's length, too; these are the short texts'.
    """

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    interleaved: bool = False
    by_length: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """All that the engine, the cache and the methods know of a model.

    rotaries: one per layer, or none at all for a model that does not rotate.
    fingerprint: of the checkpoint, for files that belong to one model; "" if nobody asked.
    """

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    hidden_size: int
    max_position: int
    dtype: torch.dtype = torch.float32
    architecture: str = ""
    rotaries: tuple[Rotary, ...] = field(default=(), compare=False, repr=False)
    fingerprint: str = field(default="", compare=False, repr=False)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers that store KV (all but RECURRENT)."""
        return tuple(i for i, s in enumerate(self.layers) if s.kind is not LayerKind.RECURRENT)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers a sparse method acts on: FULL and LATENT."""
        kinds = (LayerKind.FULL, LayerKind.LATENT)
        return tuple(i for i, s in enumerate(self.layers) if s.kind in kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxSpec:
    """A side tensor that the cache allocates, zeroes, accounts for and moves with its slots.

    `shape` holds LayerSpec field names or integers, so that one spec fits every group. SLOT and
    PAGE tensors live per *head page*: do not list kv_heads. REQUEST tensors live per (request,
    layer); `lifetime="prefill"` ones are dropped when the prompt's last chunk has been handled.
    ring: a REQUEST tensor [w, ...] of what belongs to the newest w tokens, that of position p at
    index p modulo w; captured steps may `push` into it, for those of all requests lie together.
    rewritten: entries of a SLOT tensor change in later steps too. A request that writes it owns its
    pages from then on: in its next step it copies those that it shares with a fork.
    """

    name: str
    per: Per
    shape: tuple[str | int, ...] = ()
    dtype: torch.dtype = torch.float32
    lifetime: Literal["request", "prefill"] = "request"
    rewritten: bool = False
    ring: bool = False

    def dims(self, layer: LayerSpec) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else int(getattr(layer, d)) for d in self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share a page-table geometry. A cache plan is a tuple of these."""

    layers: tuple[int, ...]
    page_size: int = 16
    ragged: Ragged = Ragged.REQUEST
    codec: tuple[str, ...] = ()
    raw_tail_pages: int = 0
    aux: tuple[AuxSpec, ...] = ()
