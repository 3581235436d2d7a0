"""The pattern that is none."""

from __future__ import annotations

from sparseengine.core.prefill import PrefillPattern, PrefillTraits
from sparseengine.core.specs import LayerKind
from sparseengine.methods.knobs import MethodConfig


class Dense(PrefillPattern):
    """Every query reads all keys before it: prefill as it is."""

    name = "dense"
    traits = PrefillTraits(invariant="always", kinds=frozenset(LayerKind))
    config_class = MethodConfig
