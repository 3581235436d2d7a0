"""Rotary position embedding, with the scaling rules that checkpoints ask for.

Source of the rules: transformers' modeling_rope_utils, whose cos and sin these equal. Two rules
depend on the length of the text: "dynamic" and "longrope" take, for every token of a prompt, the
length of the whole prompt, and for a later token the length of the text up to it, so that a token's
rotation depends neither on its chunk nor on what shares the batch. Deviation: transformers keeps
the longest length it has seen in the module, for whatever text comes next; here nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparseengine.core.specs import Rotary
from sparseengine.errors import ConfigError, nearest
from sparseengine.ops import cpu

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
_ALIASES = {"su": "longrope"}  # Phi-3's first name for it
_DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """What a config says about rotation. `dim` channels of each head are rotated.

    `original_max_position` is the length before any scaling; `parameters` are the other keys of the
    config's rope dictionary. `interleaved`: see `Rotation`.
    """

    rope_type: str
    theta: float
    dim: int
    max_position: int
    original_max_position: int
    parameters: Mapping[str, Any] = field(hash=False)
    interleaved: bool = False

    def number(self, name: str) -> float:
        """A required number of the rope dictionary."""
        value = self.parameters.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"rope_type {self.rope_type!r} needs a number {name!r} in the config's "
                f"rope_parameters, got {value!r}"
            )
        return float(value)


def rope_spec(config: Mapping[str, Any], head_dim: int, interleaved: bool = False) -> RopeSpec:
    """Read both spellings: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling`.

    Where a config has both, `rope_scaling` wins, as in transformers; the base stays that of
    `rope_parameters` if `rope_scaling` has none. Raises ConfigError for an unknown rope_type.
    """
    parameters = rope_parameters(config)
    rope_type = parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"rope_type {rope_type!r} of the model config is not supported; "
            f"{nearest(str(rope_type), ROPE_TYPES)}"
        )
    share = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    max_position = int(config["max_position_embeddings"])
    original = (
        config.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or max_position
    )
    return RopeSpec(
        rope_type=rope_type,
        theta=float(parameters.get("rope_theta") or _DEFAULT_THETA),
        dim=int(head_dim * share),
        max_position=max_position,
        original_max_position=int(original),
        parameters=parameters,
        interleaved=interleaved,
    )


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope dictionary of a config in transformers 5's spelling.

    Raises ConfigError for one dictionary per layer type: `rope_spec` takes one rotation.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    nested = [name for name, value in {**new, **old}.items() if isinstance(value, Mapping)]
    if nested:
        raise ConfigError(
            f"model config: rope_parameters are given per layer type ({', '.join(nested)}), which "
            "this model family does not read"
        )
    parameters = dict(old or new)
    theta = parameters.get("rope_theta") or config.get("rope_theta") or new.get("rope_theta")
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    return parameters | {"rope_type": _ALIASES.get(rope_type, rope_type), "rope_theta": theta}


def mla_scale_factor(config: Mapping[str, Any]) -> float:
    """What DeepSeek's latent attention multiplies its softmax scale by: mscale_all_dim's, squared.

    1.0 unless the rope dictionary is scaled and names `mscale_all_dim`. Source: transformers'
    `yarn_apply_mscale`.
    """
    parameters = rope_parameters(config)
    weight = parameters.get("mscale_all_dim")
    if parameters["rope_type"] == "default" or not weight:
        return 1.0
    spec = rope_spec(config, 2)
    return _mscale(_length_factor(spec), float(weight)) ** 2


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of one step's positions, [T, 1, dim / 2], in the model's dtype.

    The pair of channel i is channel i + dim / 2 (GPT-NeoX order), so one half serves both; with
    `interleaved` channels 2 i and 2 i + 1 are a pair (GPT-J order), and stay where they are.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """Rotate the first `dim` channels of x [T, H, D]; the others pass."""
        if self.interleaved:
            return self._apply_interleaved(x)
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

    def _apply_interleaved(self, x: Tensor) -> Tensor:
        dim = 2 * self.cos.shape[-1]
        first, second = x[..., 0:dim:2], x[..., 1:dim:2]
        turned = torch.stack(
            (first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1
        ).flatten(-2)
        return turned if x.shape[-1] == dim else torch.cat((turned, x[..., dim:]), dim=-1)


class RotaryEmbedding(nn.Module):
    """Positions -> Rotation. Frequencies are float32 whatever the model's dtype."""

    inv_freq: Tensor
    long_inv_freq: Tensor | None

    def __init__(self, spec: RopeSpec, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.spec = spec
        inv_freq, self.attention_factor = frequencies(spec)
        self.register_buffer("inv_freq", inv_freq.to(device), persistent=False)
        long = _divided(spec, "long_factor").to(device) if spec.rope_type == "longrope" else None
        self.register_buffer("long_inv_freq", long, persistent=False)

    def forward(
        self, positions: Tensor, dtype: torch.dtype, lengths: Tensor | None = None
    ) -> Rotation:
        """positions int64 [T] -> cos, sin [T, 1, dim / 2] in `dtype`.

        lengths int64 [T]: see `StepContext`; without them a text ends at its token.
        """
        lengths = positions + 1 if lengths is None else lengths
        inv_freq = self.inv_freq
        if self.spec.rope_type == "dynamic":
            inv_freq = self._grown(lengths)
        elif self.long_inv_freq is not None:
            is_long = lengths > self.spec.original_max_position
            inv_freq = torch.where(is_long[:, None], self.long_inv_freq, inv_freq)
        angles = (positions.float()[:, None] * inv_freq)[:, None, :]  # [T, 1, dim / 2]
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return Rotation(cos.to(dtype), sin.to(dtype), self.spec.interleaved)

    def _grown(self, lengths: Tensor) -> Tensor:
        """NTK base of each text length, [T, dim / 2]; the plain one up to max_position."""
        spec, factor = self.spec, self.spec.number("factor")
        length = lengths.clamp_min(spec.max_position).double()
        growth = factor * length / spec.max_position - (factor - 1)
        base = spec.theta * growth ** (spec.dim / (spec.dim - 2))  # [T]
        exponent = torch.arange(0, spec.dim, 2, device=lengths.device).float() / spec.dim
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
    if spec.rope_type == "longrope":
        return _divided(spec, "short_factor"), _longrope_attention_factor(spec)
    if spec.rope_type == "factors":
        return inv_freq / torch.tensor(spec.parameters["factors"], dtype=torch.float32), 1.0
    return inv_freq, 1.0


def rotary(spec: RopeSpec) -> Rotary:
    """The same rotation as plain numbers."""
    inv_freq, factor = frequencies(spec)
    return Rotary(
        inv_freq=tuple(inv_freq.tolist()),
        factor=factor,
        interleaved=spec.interleaved,
        by_length=spec.rope_type in ("dynamic", "longrope"),
    )


def _llama3(spec: RopeSpec, inv_freq: Tensor) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    factor, length = spec.number("factor"), spec.original_max_position
    low, high = spec.number("low_freq_factor"), spec.number("high_freq_factor")
    wavelength = 2 * math.pi / inv_freq
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    slow = torch.where(wavelength > length / low, inv_freq / factor, between)
    return torch.where(wavelength < length / high, inv_freq, slow)


def _divided(spec: RopeSpec, name: str) -> Tensor:
    """LongRoPE (arXiv:2402.13753): frequencies divided by one stored factor each."""
    factors = spec.parameters.get(name)
    if not isinstance(factors, list) or len(factors) != spec.dim // 2:
        found = len(factors) if isinstance(factors, list) else factors
        raise ConfigError(
            f"rope_type 'longrope' needs {name!r}: {spec.dim // 2} numbers, one for each rotated "
            f"pair of channels; the model config has {found}"
        )
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * spec.theta**exponent)


def _longrope_attention_factor(spec: RopeSpec) -> float:
    """An explicit attention_factor wins; else it grows with the log of the length's factor."""
    given = spec.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor = _length_factor(spec)
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(spec.original_max_position))


def _length_factor(spec: RopeSpec) -> float:
    """How many times longer than originally texts may be: the config's factor, else the ratio."""
    if spec.parameters.get("factor") is None:
        return spec.max_position / spec.original_max_position
    return spec.number("factor")


def _yarn(spec: RopeSpec, periods: Tensor) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): a linear ramp over channels between 1 / factor and no scaling."""
    length, parameters, factor = spec.original_max_position, spec.parameters, _length_factor(spec)
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
    ours, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if ours and all_dim:
        return _mscale(factor, ours) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
