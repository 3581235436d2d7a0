"""SparseEngine: a sparse-first LLM inference engine.

The names below load on first use: `import sparseengine` alone imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparseengine.async_llm import AsyncLLM
    from sparseengine.core.params import SamplingParams, SparseParams, StructuredOutputs
    from sparseengine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "SparseParams", "StructuredOutputs", "__version__"]

_HOMES = {
    "AsyncLLM": "sparseengine.async_llm",
    "LLM": "sparseengine.llm",
    "SamplingParams": "sparseengine.core.params",
    "SparseParams": "sparseengine.core.params",
    "StructuredOutputs": "sparseengine.core.params",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'sparseengine' has no attribute {name!r}")
