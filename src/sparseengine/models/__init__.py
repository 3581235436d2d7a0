"""Model families, by the architecture name of a checkpoint's config."""

from __future__ import annotations

from sparseengine.models.loading import MODELS, load_model, model_spec

__all__ = ["MODELS", "load_model", "model_spec"]
