"""Dense attention: everything is retained and read. The baseline of every other method."""

from __future__ import annotations

from dataclasses import dataclass

from sparseengine.core.method import Traits
from sparseengine.core.specs import LayerKind
from sparseengine.methods.families import Method
from sparseengine.methods.knobs import MethodConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FullConfig(MethodConfig):
    """Dense attention has no knobs."""


class Full(Method):
    """Dense attention: every token is retained and read."""

    name = "full"
    config_class = FullConfig
    traits = Traits(family="dense", kinds=frozenset(LayerKind))
