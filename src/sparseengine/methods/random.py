"""Evicts at random: the baseline that a scored method has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparseengine.core.method import LayerStep
from sparseengine.core.specs import Ragged
from sparseengine.methods.families import EvictionConfig, EvictionMethod
from sparseengine.methods.knobs import knob

_MASK32 = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomConfig(EvictionConfig):
    """Knobs of random eviction."""

    seed: int = knob(0, "which random choice", low=0, high=_MASK32)


class Random(EvictionMethod):
    """Evicts at random but retains sinks and recent tokens: the baseline a method has to beat.

    The choice is a hash of (seed, layer, position): the same whatever the batch and the chunking,
    another one in each layer, and one for all KV heads of a layer, so that it does not depend on
    how tensor parallelism splits heads.
    """

    name = "random"
    config_class = RandomConfig
    keys_suffice = True
    ragged = Ragged.LAYER

    def score(self, at: LayerStep, chunk: int) -> Tensor:
        """Uniform numbers [1, L], by slot: the position in a row that was never evicted."""
        position = torch.arange(max(at.lens(chunk)), dtype=torch.int64, device=at.k.device)
        return hash_uniform(position, self.config.seed * 0x9E3779B1 + at.layer)[None]


def hash_uniform(values: Tensor, salt: int) -> Tensor:
    """A fixed pseudo-random number in [0, 1) per integer: int64 [...] -> fp32 [...].

    Two rounds of a 32-bit multiply-xorshift mix; 24 bits reach the result, so that fp32 is exact.
    """
    x = (values + (salt * 0x85EBCA6B & _MASK32)) & _MASK32
    for factor in (0x21F0AAAD, 0x735A2D97):
        x = ((x ^ (x >> 16)) * factor) & _MASK32
    x = x ^ (x >> 15)
    return (x >> 8).float() / (1 << 24)
