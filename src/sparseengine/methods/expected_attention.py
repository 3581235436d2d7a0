"""Expected Attention (arXiv:2510.00636): what queries yet to come will look at, on average."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sparseengine.core.method import LayerStep, Traits
from sparseengine.core.specs import AuxSpec, LayerKind, ModelSpec, Per, Rotary
from sparseengine.errors import UnsupportedError
from sparseengine.methods.calibration import calibration_knob, damaged, read_calibration
from sparseengine.methods.families import EvictionConfig, EvictionMethod
from sparseengine.methods.knobs import knob

_BLOCK = 2048  # keys scored at once, which bounds scratch memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAttentionConfig(EvictionConfig):
    """Knobs of Expected Attention."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "authors": {"epsilon": 0.01},
            "kvpress": {"epsilon": 0.01},
        }
    )

    sink: int = knob(
        4,
        "first tokens of the prompt: always retained, and their queries do not count",
        low=0,
        high=1 << 20,
    )
    recent: int = knob(0, "newest tokens that are always retained", low=0, high=1 << 20)
    future: int = knob(
        512, "positions after the prompt over which rotations are averaged", low=1, high=1 << 16
    )
    covariance: bool = knob(True, "let the spread of queries count, not their mean alone")
    value_norm: bool = knob(True, "weight the expected attention by the norm of the value")
    epsilon: float = knob(
        0.0, "added to the expected attention before the value norm", low=0.0, high=1.0
    )
    calibration: str = calibration_knob()


class ExpectedAttention(EvictionMethod):
    """Retains the keys that queries yet to come are expected to attend to (arXiv:2510.00636).

    Queries before rotation are taken for draws from a Gaussian per query head. Its moments m and C
    come from the prompt's queries without those of the sinks; R is the mean of the rotations of the
    `future` positions after the prompt. A key k (rotated) and its value v then score

        z = s R m.k + s^2 k'R C R'k / 2       the log of the mean of exp(s q.k), s = softmax scale
        (softmax of z over all keys but the sinks, mean over the query group, + epsilon) |v|

    Answers to no question in particular, so the question need not be known. Queries are taken back
    from their rotation with the positions of their chunk; moments are sums in fp32, so that chunks
    add up. They take q_heads * head_dim * (head_dim + 1) * 4 bytes per layer while a prompt runs.
    With a calibration the moments are those of other texts and nothing is gathered: what a prompt
    retains then depends on its keys and values alone.

    Deviations: queries that were rounded to the model's dtype after their rotation are turned back,
    where the authors keep those from before; the prompt is evicted once, when it ends, and tokens
    generated later stay; sinks beyond half of the budget lose; soft caps of logits are left out.
    Not for rotations that depend on the text's length, nor for latent layers, whose values would
    need each head's expansion.
    """

    name = "expected_attention"
    config_class = ExpectedAttentionConfig
    traits = Traits(
        family="eviction",
        sharing="chain",
        takes="retained",
        measures="expected",
        kinds=frozenset({LayerKind.FULL}),
    )

    def __init__(self, config: Any, model: ModelSpec) -> None:
        super().__init__(config, model)
        self._known = _known_moments(config, model, self.layers) if config.calibration else {}
        for layer in self.layers if model.rotaries else ():
            rotary = model.rotaries[layer]
            if rotary.by_length or rotary.interleaved:
                what = "depend on the text's length" if rotary.by_length else "pair neighbours"
                raise UnsupportedError(
                    f"method {self.name!r} cannot run on this model",
                    [f"it undoes rotations of queries, and those of layer {layer} {what}"],
                )

    def aux(self) -> tuple[AuxSpec, ...]:
        if self._known:
            return ()
        wide = torch.float64 if self.model.dtype is torch.float64 else torch.float32
        shapes: dict[str, tuple[str | int, ...]] = {
            "query_count": (1,),
            "query_sum": ("q_heads", "head_dim"),
        }
        if self.config.covariance:
            shapes["query_products"] = ("q_heads", "head_dim", "head_dim")
        return tuple(
            AuxSpec(name=name, per=Per.REQUEST, shape=shape, dtype=wide, lifetime="prefill")
            for name, shape in shapes.items()
        )

    def _rotary(self, layer: int) -> Rotary | None:
        return self.model.rotaries[layer] if self.model.rotaries else None

    def watch(self, at: LayerStep, chunk: int) -> None:
        """Add this chunk's queries, but for the sinks', to the moments."""
        if self._known:
            return
        total = at.request_aux("query_sum", chunk)
        q = unrotated(at, chunk, self.config.sink, self._rotary(at.layer), total.dtype)
        if q is None:
            return
        at.request_aux("query_count", chunk).add_(len(q))
        total.add_(q.sum(0))
        if self.config.covariance:
            heads = q.transpose(0, 1)  # [Hq, T, D]
            at.request_aux("query_products", chunk).add_(heads.mT @ heads)

    def score(self, at: LayerStep, chunk: int) -> Tensor:
        """Expected attention times value norm: fp32 [Hkv, L]; 0 for sinks and past a row's end."""
        found = self._expected(at, chunk, self.config.sink) + self.config.epsilon
        if self.config.value_norm:
            values = at.gather("values", chunk)
            norms = [torch.linalg.vector_norm(v.to(found.dtype), dim=-1) for v in _blocks(values)]
            found = found * torch.cat(norms, -1)
        return torch.where(self._counts(at, chunk, self.config.sink), found, 0.0)

    def masses(self, at: LayerStep, chunk: int) -> Tensor:
        """Expected attention, of the sinks, too: fp32 [Hkv, L]."""
        return self._expected(at, chunk, 0)

    @staticmethod
    def _counts(at: LayerStep, chunk: int, first: int) -> Tensor:
        """Slots of the rows from `first` on: bool [G, L]."""
        lens = at.table()[1][chunk]  # [G]
        slot = torch.arange(max(at.lens(chunk)), device=at.k.device)
        return (slot >= first) & (slot < lens[:, None])

    def _expected(self, at: LayerStep, chunk: int, first: int) -> Tensor:
        """Softmax of z over a row's slots from `first` on, mean over the group: [Hkv, L]."""
        mean, cov = self._future(at, chunk)
        keys = at.gather("keys", chunk)  # [Hkv, L, D]
        groups, scale = at.spec.kv_heads, at.spec.softmax_scale
        mean = torch.unflatten(mean, 0, (groups, -1))  # [Hkv, g, D]
        parts = []
        for part in _blocks(keys):
            some = part.to(mean.dtype)
            z = scale * (mean @ some.mT)  # [Hkv, g, l]
            if cov is not None:
                spread = some[:, None] @ torch.unflatten(cov, 0, (groups, -1))  # [Hkv, g, l, D]
                z += 0.5 * scale**2 * (spread * some[:, None]).sum(-1)
            parts.append(z)
        counts = self._counts(at, chunk, first)
        logits = torch.cat(parts, -1).masked_fill(~counts[:, None], float("-inf"))
        return logits.softmax(-1).mean(1)

    def _moments(self, at: LayerStep, chunk: int) -> tuple[Tensor, Tensor | None]:
        """Mean [Hq, D] and covariance [Hq, D, D] of queries before rotation."""
        if self._known:
            mean, cov = (m.to(at.q.device) for m in self._known[at.layer])
            return mean, cov if self.config.covariance else None
        count = at.request_aux("query_count", chunk).clamp_min(1)
        mean = at.request_aux("query_sum", chunk) / count
        if not self.config.covariance:
            return mean, None
        products = at.request_aux("query_products", chunk) / count
        return mean, products - mean[:, :, None] * mean[:, None]

    def _future(self, at: LayerStep, chunk: int) -> tuple[Tensor, Tensor | None]:
        """Mean [Hq, D] and covariance [Hq, D, D] of queries after the prompt, as keys meet them."""
        mean, cov = self._moments(at, chunk)
        rotary = self._rotary(at.layer)
        if rotary is None:
            return mean, cov
        begin = at.plan.chunks[chunk].stop
        cos, sin = _cos_sin(rotary, begin, begin + self.config.future, mean)
        cos, sin = cos.mean(0) * rotary.factor, sin.mean(0) * rotary.factor
        if cov is not None:
            cov = _turn(_turn(cov, cos, sin).mT, cos, sin).mT
        return _turn(mean, cos, sin), cov


def unrotated(
    at: LayerStep, chunk: int, sinks: int, rotary: Rotary | None, dtype: torch.dtype
) -> Tensor | None:
    """A chunk's queries as they were before their rotation, [T, Hq, D], without those of the first
    `sinks` positions; None if there are no others."""
    lo, hi = at.span(chunk)
    start = at.plan.chunks[chunk].start
    skip = max(0, sinks - start)
    if lo + skip >= hi:
        return None
    q = at.q[lo + skip : hi].to(dtype)
    if rotary is None:
        return q
    cos, sin = _cos_sin(rotary, start + skip, start + skip + len(q), q)
    return _turn(q, cos[:, None] / rotary.factor, -sin[:, None] / rotary.factor)


# ── moments in a calibration file ────────────────────────────────────────────────────────────────


def pack(values: Tensor) -> str:
    """Numbers in half precision, little-endian, as base64."""
    return b64encode(values.cpu().numpy().astype("<f2").tobytes()).decode()


def _unpack(text: Any, *shape: int) -> Tensor:
    """fp32 of that shape (-1: whatever fits). Raises ValueError if the text does not hold it."""
    if not isinstance(text, str):
        raise ValueError
    values = np.frombuffer(b64decode(text, validate=True), "<f2").astype(np.float32)
    if not np.isfinite(values).all() or not values.size:
        raise ValueError
    return torch.from_numpy(values).reshape(shape)


def _known_moments(
    config: ExpectedAttentionConfig, model: ModelSpec, layers: Sequence[int]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Mean [Hq, D] and covariance [Hq, D, D] of each layer's queries, from a calibration."""
    rows = read_calibration(config.calibration, "expected_attention", model).get("layers")
    found = {}
    try:
        if not isinstance(rows, dict):
            raise ValueError
        for layer in layers:
            row, spec = rows[str(layer)], model.layers[layer]
            heads, dim = spec.q_heads, spec.head_dim
            factor = _unpack(row["factor"], heads, dim, -1)
            cov = factor @ factor.mT
            cov.diagonal(dim1=-2, dim2=-1).add_(_unpack(row["rest"], heads, dim).square())
            found[layer] = (_unpack(row["mean"], heads, dim), cov)
    except (ValueError, KeyError, TypeError, RuntimeError):
        raise damaged(config.calibration) from None
    return found


def _blocks(rows: Tensor) -> Iterator[Tensor]:
    """[H, L, D] in pieces along L."""
    return iter(torch.split(rows, _BLOCK, dim=1))


def _cos_sin(rotary: Rotary, begin: int, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of positions begin to end, [T, dim / 2]: angles in float32 as in the model."""
    inv_freq = torch.tensor(rotary.inv_freq, dtype=torch.float32, device=like.device)
    angles = torch.arange(begin, end, device=like.device).float()[:, None] * inv_freq
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first channels of x [..., D]: channel i with channel i + dim / 2."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, x[..., 2 * half :]), dim=-1)
