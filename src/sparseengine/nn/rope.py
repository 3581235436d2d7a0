"""Rotary position embedding, with the scaling rules that checkpoints ask for.

Source of the rules: transformers' modeling_rope_utils, whose cos and sin these equal. Deviation:
"dynamic" beyond max_position rotates each token by its own position's base, so that a token's
rotation depends neither on its chunk nor on what shares the batch; that is what transformers does
token by token, while its prefill uses the base of the whole prompt's length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparseengine.errors import ConfigError, nearest
from sparseengine.ops import cpu

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "factors")
_DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """What a config says about rotation. `dim` channels of each head are rotated.

    `original_max_position` is the length before any scaling; `parameters` are the other keys of the
    config's rope dictionary.
    """

    rope_type: str
    theta: float
    dim: int
    max_position: int
    original_max_position: int
    parameters: Mapping[str, Any] = field(hash=False)

    def number(self, name: str) -> float:
        """A required number of the rope dictionary."""
        value = self.parameters.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"rope_type {self.rope_type!r} needs a number {name!r} in the config's "
                f"rope_parameters, got {value!r}"
            )
        return float(value)


def rope_spec(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """Read both spellings: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling`.

    Raises ConfigError for an unknown rope_type.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"rope_type {rope_type!r} of the model config is not supported; "
            f"{nearest(str(rope_type), ROPE_TYPES)}"
        )
    theta = parameters.get("rope_theta") or config.get("rope_theta") or _DEFAULT_THETA
    share = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    max_position = int(config["max_position_embeddings"])
    original = (
        config.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or max_position
    )
    return RopeSpec(
        rope_type=rope_type,
        theta=float(theta),
        dim=int(head_dim * share),
        max_position=max_position,
        original_max_position=int(original),
        parameters=parameters,
    )


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of one step's positions, [T, 1, dim / 2], in the model's dtype.

    The pair of channel i is channel i + dim / 2 (GPT-NeoX order), so one half serves both.
    """

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotate the first `dim` channels of x [T, H, D]; the others pass."""
        if x.device.type == "cpu":
            turned_here = cpu.rotate(x, self.cos, self.sin)
            if turned_here is not None:
                return turned_here
        half = self.cos.shape[-1]
        first, second = x[..., :half], x[..., half : 2 * half]
        turned = (
            first * self.cos - second * self.sin,
            second * self.cos + first * self.sin,
        )
        rest = () if x.shape[-1] == 2 * half else (x[..., 2 * half :],)
        return torch.cat((*turned, *rest), dim=-1)


class RotaryEmbedding(nn.Module):
    """Positions -> Rotation. Frequencies are float32 whatever the model's dtype."""

    inv_freq: Tensor

    def __init__(self, spec: RopeSpec, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.spec = spec
        inv_freq, self.attention_factor = frequencies(spec)
        self.register_buffer("inv_freq", inv_freq.to(device), persistent=False)

    def forward(
        self, positions: Tensor, dtype: torch.dtype, lengths: Tensor | None = None
    ) -> Rotation:
        """positions int64 [T] -> cos, sin [T, 1, dim / 2] in `dtype`.

        lengths int64 [T]: see `StepContext`; without them a text ends at its token.
        """
        inv_freq = self.inv_freq
        if self.spec.rope_type == "dynamic":
            inv_freq = self._grown(positions)
        angles = (positions.float()[:, None] * inv_freq)[:, None, :]  # [T, 1, dim / 2]
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return Rotation(cos.to(dtype), sin.to(dtype))

    def _grown(self, positions: Tensor) -> Tensor:
        """NTK base of each position, [T, dim / 2]; the plain one up to max_position."""
        spec, factor = self.spec, self.spec.number("factor")
        length = (positions + 1).clamp_min(spec.max_position).double()
        growth = factor * length / spec.max_position - (factor - 1)
        base = spec.theta * growth ** (spec.dim / (spec.dim - 2))  # [T]
        exponent = torch.arange(0, spec.dim, 2, device=positions.device).float() / spec.dim
        return 1.0 / (base.float()[:, None] ** exponent)


def frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    """(inverse frequencies [dim / 2] in float32, factor on cos and sin)."""
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim
    inv_freq = 1.0 / (spec.theta**exponent)
    if spec.rope_type == "linear":
        return inv_freq / spec.number("factor"), 1.0
    if spec.rope_type == "llama3":
        return _llama3(spec, inv_freq), 1.0
    if spec.rope_type == "yarn":
        return _yarn(spec, spec.theta**exponent)
    if spec.rope_type == "factors":
        return inv_freq / torch.tensor(spec.parameters["factors"], dtype=torch.float32), 1.0
    return inv_freq, 1.0


def _llama3(spec: RopeSpec, inv_freq: Tensor) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    factor, length = spec.number("factor"), spec.original_max_position
    low, high = spec.number("low_freq_factor"), spec.number("high_freq_factor")
    wavelength = 2 * math.pi / inv_freq
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    slow = torch.where(wavelength > length / low, inv_freq / factor, between)
    return torch.where(wavelength < length / high, inv_freq, slow)


def _yarn(spec: RopeSpec, periods: Tensor) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): a linear ramp over channels between 1 / factor and no scaling."""
    length, parameters = spec.original_max_position, spec.parameters
    if parameters.get("factor") is None:
        factor = spec.max_position / length
    else:
        factor = spec.number("factor")
    fast, slow = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1

    def channel(rotations: float) -> float:
        """The (fractional) frequency index that turns `rotations` times over the length."""
        return spec.dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = channel(fast), channel(slow)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(spec.dim // 2).float() - low) / width).clamp(0, 1)
    keep = 1 - ramp  # 1: fast channel, not scaled
    inv_freq = 1.0 / (factor * periods) * (1 - keep) + 1.0 / periods * keep
    return inv_freq, _yarn_attention_factor(factor, parameters)


def _yarn_attention_factor(factor: float, parameters: Mapping[str, Any]) -> float:
    """An explicit attention_factor wins; else the ratio of both mscales; else the paper's rule."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    ours, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if ours and all_dim:
        return mscale(ours) / mscale(all_dim)
    return mscale(1.0)
