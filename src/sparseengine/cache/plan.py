"""Cache plans: merging those of several methods, and the geometry of one group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparseengine.core.specs import (
    AuxSpec,
    CacheGroup,
    LayerKind,
    LayerSpec,
    ModelSpec,
    Per,
    Ragged,
)
from sparseengine.errors import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How one group lays out its rows and pools.

    A bundle is what one table entry points at: `units` head pages [U, P, D]. A request has `rows`
    rows, each with its own table.

        ragged    rows R     units U     a layer's rows        a layer's units
        REQUEST   1          L * Hkv     0                     i * Hkv .. (i + 1) * Hkv
        LAYER     L          Hkv         i                     all
        HEAD      L * Hkv    1           i * Hkv ..            all

    Rows of WINDOW layers lose leading pages that no later query sees; what is left starts at a
    multiple of `window_align` tokens and of the page size.
    """

    group: CacheGroup
    spec: LayerSpec
    window_align: int = 1

    @property
    def page_size(self) -> int:
        return self.group.page_size

    @property
    def heads(self) -> int:
        return self.spec.kv_heads

    @property
    def num_layers(self) -> int:
        return len(self.group.layers)

    @property
    def rows(self) -> int:
        """Rows of one request."""
        per_layer = self.heads if self.group.ragged is Ragged.HEAD else 1
        return 1 if self.group.ragged is Ragged.REQUEST else self.num_layers * per_layer

    @property
    def units(self) -> int:
        """Head pages in one bundle."""
        return self.num_layers * self.heads // self.rows

    @property
    def row_groups(self) -> int:
        """G of a layer's table: kv_heads when every head has its own row, else 1."""
        return self.heads if self.group.ragged is Ragged.HEAD else 1

    @property
    def bundle(self) -> tuple[object, ...]:
        """Bundles of groups for which this is equal are interchangeable."""
        return (self.units, self.page_size, self.spec.stored_dims)

    @property
    def window(self) -> int | None:
        return self.spec.window if self.spec.kind is LayerKind.WINDOW else None

    @property
    def window_step(self) -> int:
        """Tokens by whose multiples WINDOW rows get shorter at the front."""
        return math.lcm(self.page_size, self.window_align)

    def row_pages(self, tokens: int, positions: int, chunk: int) -> int:
        """Most pages of a row of `tokens` tokens after `positions` positions in chunks of `chunk`.

        A WINDOW row holds the newest positions whatever a method does to others: what the next
        query sees besides itself, up to a step that is not whole yet, and the chunk that runs.
        """
        if self.window is not None:
            most = self.window - 1 + self.window_step - 1 + min(chunk, positions)
            tokens = min(positions, most)
        return -(-tokens // self.page_size)

    def layer_rows(self, layer: int) -> slice:
        """The rows that hold one layer of a request."""
        if self.group.ragged is Ragged.REQUEST:
            return slice(0, 1)
        first = self.group.layers.index(layer) * self.row_groups
        return slice(first, first + self.row_groups)

    def layer_units(self, layer: int) -> slice:
        """The head pages of a bundle that belong to one layer."""
        if self.group.ragged is not Ragged.REQUEST:
            return slice(0, self.units)
        first = self.group.layers.index(layer) * self.heads
        return slice(first, first + self.heads)

    def aux_of(self, per: Per) -> tuple[AuxSpec, ...]:
        return tuple(a for a in self.group.aux if a.per is per)


def geometry(model: ModelSpec, group: CacheGroup, window_align: int = 1) -> Geometry:
    """Check one group against the model; `UnsupportedError` says what does not fit."""
    if not group.layers:
        raise UnsupportedError("a cache group has no layers")
    if group.page_size < 1:
        raise UnsupportedError(f"page_size={group.page_size} is not allowed; it must be >= 1")
    if group.codec:
        raise UnsupportedError(
            f"the KV codec {group.codec} is not supported yet; plan the group with codec=()"
        )
    shapes = {_shape(model, layer) for layer in group.layers}
    if len(shapes) > 1:
        raise UnsupportedError(
            f"layers {group.layers} of one cache group differ in kind or dimensions; "
            "split them (merge_plans does)"
        )
    spec = model.layers[group.layers[0]]
    return Geometry(group=group, spec=spec, window_align=window_align)


def _shape(model: ModelSpec, layer: int) -> tuple[object, ...]:
    if not 0 <= layer < len(model.layers):
        raise UnsupportedError(
            f"a cache plan names layer {layer}; the model has layers 0..{len(model.layers) - 1}"
        )
    spec = model.layers[layer]
    if spec.kind is LayerKind.RECURRENT:
        raise UnsupportedError(
            f"a cache plan names layer {layer}, which is RECURRENT: it has no KV"
        )
    return (spec.kind, spec.q_heads, spec.kv_heads, spec.head_dim, spec.value_dim, spec.window)


def merge_plans(
    model: ModelSpec, plans: Sequence[tuple[CacheGroup, ...]]
) -> tuple[CacheGroup, ...]:
    """One plan that serves every given plan: the finest ragged and all side tensors of each layer.

    Layers that end up with the same needs and the same geometry share a group, in layer order. In
    models with WINDOW and other layers, those that store the same dimensions get the same ragged,
    at least LAYER: their groups can then take pages from one pool.
    Raises `UnsupportedError` when two plans contradict each other (page size, codec, a side tensor
    of one name in two forms) or when a layer with KV is in no plan.
    """
    needs: dict[int, CacheGroup] = {}
    for plan in plans:
        seen: set[int] = set()
        for group in plan:
            for layer in group.layers:
                _shape(model, layer)
                if layer in seen:
                    raise UnsupportedError(f"layer {layer} is in two groups of one cache plan")
                seen.add(layer)
                needs[layer] = _join(layer, needs[layer], group) if layer in needs else group
    missing = [layer for layer in model.kv_layers if layer not in needs]
    if missing:
        raise UnsupportedError(f"layers {missing} hold KV but are in no cache plan")
    _level(model, needs)
    groups: dict[tuple[object, ...], list[int]] = {}
    for layer in sorted(needs):
        g = needs[layer]
        aux = tuple(sorted(g.aux, key=lambda a: a.name))
        key = (_shape(model, layer), g.page_size, g.ragged, g.codec, g.raw_tail_pages, aux)
        groups.setdefault(key, []).append(layer)
    return tuple(_group(needs[layers[0]], layers) for layers in groups.values())


def _level(model: ModelSpec, needs: dict[int, CacheGroup]) -> None:
    """Equal bundles for layers that could share a pool, where some of them hold a window only."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for layer, group in needs.items():
        alike.setdefault((model.layers[layer].stored_dims, group.page_size), []).append(layer)
    for layers in alike.values():
        kinds = {model.layers[i].kind for i in layers}
        windows = {model.layers[i].window for i in layers}
        if LayerKind.WINDOW not in kinds or len(kinds) == len(windows) == 1:
            continue
        finest = max([Ragged.LAYER, *(needs[i].ragged for i in layers)], key=lambda r: r.value)
        needs.update((i, replace(needs[i], ragged=finest)) for i in layers)


def _group(like: CacheGroup, layers: Sequence[int]) -> CacheGroup:
    return CacheGroup(
        layers=tuple(layers),
        page_size=like.page_size,
        ragged=like.ragged,
        codec=like.codec,
        raw_tail_pages=like.raw_tail_pages,
        aux=like.aux,
    )


def _join(layer: int, a: CacheGroup, b: CacheGroup) -> CacheGroup:
    reasons = []
    for name in ("page_size", "codec"):
        left, right = getattr(a, name), getattr(b, name)
        if left != right:
            reasons.append(f"{name} {left} in one plan, {right} in another")
    known = {x.name: x for x in a.aux}
    for x in b.aux:
        if x.name in known and known[x.name] != x:
            reasons.append(f"side tensor {x.name!r} is {known[x.name]} in one, {x} in another")
    if reasons:
        raise UnsupportedError(
            f"the enabled methods cannot share layer {layer}; start engines of their own", reasons
        )
    return CacheGroup(
        layers=(layer,),
        page_size=a.page_size,
        ragged=max(a.ragged, b.ragged, key=lambda r: int(r.value)),
        codec=a.codec,
        raw_tail_pages=max(a.raw_tail_pages, b.raw_tail_pages),
        aux=a.aux + tuple(x for x in b.aux if x.name not in known),
    )
