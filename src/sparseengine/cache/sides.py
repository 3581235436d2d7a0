"""What belongs to a request rather than to a page: REQUEST side tensors, recurrent states."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from sparseengine.core.specs import AuxSpec, CacheGroup, LayerKind, ModelSpec, Per

_FIRST_SLOTS = 8  # of requests with rings; doubled when they run out


class RequestSides:
    """Side tensors and states by (request, layer), allocated and zeroed when first asked for."""

    def __init__(
        self, model: ModelSpec, groups: Sequence[CacheGroup], *, device: torch.device
    ) -> None:
        self.model, self.device = model, device
        self._specs: dict[tuple[int, str], AuxSpec] = {
            (layer, a.name): a
            for g in groups
            for a in g.aux
            if a.per is Per.REQUEST
            for layer in g.layers
        }
        self._aux: dict[int, dict[tuple[int, str], Tensor]] = {}
        self._states: dict[int, dict[int, tuple[Tensor, ...]]] = {}
        self._rings: dict[tuple[int, str], Tensor] = {}  # [slots, *shape]
        self._slot_of: dict[int, int] = {}
        self._idle_slots: list[int] = []
        self._num_slots = 1
        self.ring_moves = 0  # how often rings have got new addresses

    def aux(self, request_id: int, layer: int, name: str) -> Tensor:
        """The REQUEST side tensor; zeros the first time. An undeclared name is an error."""
        key = (layer, name)
        if self._spec(*key).ring:
            slot = self._slot_of.get(request_id) or self._new_slot(request_id)
            return self.rings(layer, name)[slot]
        mine = self._aux.setdefault(request_id, {})
        if key not in mine:
            mine[key] = self._zeros(*key)
        return mine[key]

    def _spec(self, layer: int, name: str) -> AuxSpec:
        assert (layer, name) in self._specs, f"layer {layer} has no request side tensor {name!r}"
        return self._specs[layer, name]

    def _zeros(self, layer: int, name: str, *leading: int) -> Tensor:
        spec = self._spec(layer, name)
        dims = (*leading, *spec.dims(self.model.layers[layer]))
        return torch.zeros(dims, dtype=spec.dtype, device=self.device)

    # ── rings: of all requests in one tensor, so that a captured step finds those of any ──────────

    @property
    def has_rings(self) -> bool:
        return bool(self._slot_of)

    def ring_slot(self, request_id: int) -> int:
        """The index of a request's rings; 0, which is nobody's, if it has never had any."""
        return self._slot_of.get(request_id, 0)

    def rings(self, layer: int, name: str) -> Tensor:
        """[slots, *shape]: a ring of all requests. Its address is new where `ring_moves` is."""
        key = (layer, name)
        if key not in self._rings:
            assert self._spec(*key).ring, f"{name!r} is not declared as a ring"
            self._rings[key] = self._zeros(*key, self._num_slots)
        return self._rings[key]

    def _new_slot(self, request_id: int) -> int:
        if not self._idle_slots:
            before, self._num_slots = self._num_slots, max(_FIRST_SLOTS, 2 * self._num_slots)
            self._idle_slots = list(range(self._num_slots - 1, before - 1, -1))
            for key, old in self._rings.items():
                self._rings[key] = self._zeros(*key, self._num_slots)
                self._rings[key][:before] = old
            self.ring_moves += 1
        slot = self._slot_of[request_id] = self._idle_slots.pop()
        for rings in self._rings.values():
            rings[slot].zero_()
        return slot

    # ── prompts, states, forks ───────────────────────────────────────────────────────────────────

    def end_prefill(self, request_id: int) -> None:
        """Drop what lives only as long as the prompt is being read."""
        mine = self._aux.get(request_id, {})
        for key in [k for k in mine if self._specs[k].lifetime == "prefill"]:
            del mine[key]

    def states(self, request_ids: Sequence[int], layer: int) -> tuple[Tensor, ...]:
        """Recurrent states of several requests, [B, *shape] each."""
        each = [self._state(r, layer) for r in request_ids]
        return tuple(torch.stack(parts) for parts in zip(*each, strict=True))

    def _state(self, request_id: int, layer: int) -> tuple[Tensor, ...]:
        mine = self._states.setdefault(request_id, {})
        if layer not in mine:
            spec = self.model.layers[layer]
            assert spec.kind is LayerKind.RECURRENT, f"layer {layer} is {spec.kind.name}: no state"
            mine[layer] = tuple(
                torch.zeros(shape, dtype=self.model.dtype, device=self.device)
                for shape in spec.state
            )
        return mine[layer]

    def set_state(self, request_id: int, layer: int, value: Sequence[Tensor]) -> None:
        self._state(request_id, layer)
        self._states[request_id][layer] = tuple(t.clone() for t in value)

    def states_of(self, request_id: int) -> dict[int, tuple[Tensor, ...]]:
        """Copies of a request's recurrent states, by layer."""
        mine = self._states.get(request_id, {})
        return {layer: tuple(t.clone() for t in state) for layer, state in mine.items()}

    def adopt_states(self, request_id: int, states: Mapping[int, tuple[Tensor, ...]]) -> None:
        """Begin where others ended."""
        for layer, state in states.items():
            self.set_state(request_id, layer, state)

    def fork(self, source_id: int, request_id: int) -> None:
        for key, tensor in self._aux.get(source_id, {}).items():
            self._aux.setdefault(request_id, {})[key] = tensor.clone()
        if source_id in self._slot_of:
            slot = self._new_slot(request_id)
            for rings in self._rings.values():
                rings[slot] = rings[self._slot_of[source_id]]
        for layer, state in self._states.get(source_id, {}).items():
            self._states.setdefault(request_id, {})[layer] = tuple(t.clone() for t in state)

    def release(self, request_id: int) -> None:
        self._aux.pop(request_id, None)
        self._states.pop(request_id, None)
        if request_id in self._slot_of:
            self._idle_slots.append(self._slot_of.pop(request_id))

    def bytes(self, request_id: int) -> int:
        """Of one request: side tensors, states, rings."""
        rings = sum(r[0].nbytes for r in self._rings.values() if request_id in self._slot_of)
        return self._own_bytes(request_id) + rings

    def _own_bytes(self, request_id: int) -> int:
        states = [t for s in self._states.get(request_id, {}).values() for t in s]
        return sum(t.nbytes for t in [*self._aux.get(request_id, {}).values(), *states])

    def total_bytes(self) -> int:
        """Of all requests, and of rings that nobody has yet."""
        own = sum(map(self._own_bytes, self._aux.keys() | self._states.keys()))
        return own + sum(r.nbytes for r in self._rings.values())

    def check(self, request_ids: Collection[int]) -> None:
        stores: tuple[tuple[str, Collection[int]], ...] = (
            ("side tensors", self._aux),
            ("states", self._states),
            ("rings", self._slot_of),
        )
        for name, store in stores:
            stray = [r for r in store if r not in request_ids]
            assert not stray, f"{name} of released requests {stray} are still held"
        slots = sorted([0, *self._slot_of.values(), *self._idle_slots])
        assert slots == list(range(self._num_slots)), "a slot of rings is lost or has two owners"
