"""What belongs to a request rather than to a page: REQUEST side tensors, recurrent states."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from sparseengine.core.specs import AuxSpec, CacheGroup, LayerKind, ModelSpec, Per


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

    def aux(self, request_id: int, layer: int, name: str) -> Tensor:
        """The REQUEST side tensor; zeros the first time. An undeclared name is an error."""
        mine = self._aux.setdefault(request_id, {})
        key = (layer, name)
        if key not in mine:
            assert key in self._specs, f"layer {layer} has no request side tensor {name!r}"
            spec = self._specs[key]
            dims = spec.dims(self.model.layers[layer])
            mine[key] = torch.zeros(dims, dtype=spec.dtype, device=self.device)
        return mine[key]

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

    def fork(self, source_id: int, request_id: int) -> None:
        for key, tensor in self._aux.get(source_id, {}).items():
            self._aux.setdefault(request_id, {})[key] = tensor.clone()
        for layer, state in self._states.get(source_id, {}).items():
            self._states.setdefault(request_id, {})[layer] = tuple(t.clone() for t in state)

    def release(self, request_id: int) -> None:
        self._aux.pop(request_id, None)
        self._states.pop(request_id, None)

    def bytes(self, request_id: int) -> int:
        states = [t for s in self._states.get(request_id, {}).values() for t in s]
        return sum(t.nbytes for t in [*self._aux.get(request_id, {}).values(), *states])

    def check(self, request_ids: Collection[int]) -> None:
        for name, store in (("side tensors", self._aux), ("states", self._states)):
            stray = [r for r in store if r not in request_ids]
            assert not stray, f"{name} of released requests {stray} are still held"
