"""Shipped shapes: each builds, and has as many parameters as its published model."""

from __future__ import annotations

import pytest
import torch

from sparseengine.core.specs import LayerKind
from sparseengine.models import MODELS, model_spec
from sparseengine.weights.dummy import shape_config, shape_names

# Parameters of the published checkpoints (the output head once where it is tied, drafts left out),
# and how many layers of each kind they have.
PUBLISHED = {
    "deepseek-v2-lite": (15_706_484_224, {"LATENT": 27}),
    "deepseek-v3": (671_026_419_200, {"LATENT": 61}),
    "gemma-3-270m": (268_098_176, {"FULL": 3, "WINDOW": 15}),
    "gemma-3-27b": (27_009_346_304, {"FULL": 10, "WINDOW": 52}),
    "glm-4.7-flash": (29_943_390_976, {"LATENT": 47}),
    "llama-3.1-70b": (70_553_706_496, {"FULL": 80}),
    "llama-3.1-8b": (8_030_261_248, {"FULL": 32}),
    "mistral-7b-v0.1": (7_241_732_096, {"WINDOW": 32}),
    "phi-4": (14_659_507_200, {"FULL": 40}),
    "qwen2.5-7b": (7_615_616_512, {"FULL": 28}),
    "qwen3-0.6b": (596_049_920, {"FULL": 28}),
    "qwen3-30b-a3b": (30_532_122_624, {"FULL": 48}),
    "qwen3-32b": (32_762_123_264, {"FULL": 64}),
    "qwen3-8b": (8_190_735_360, {"FULL": 36}),
    "smollm2-135m": (134_515_008, {"FULL": 30}),
}


def test_every_shipped_shape_is_checked_here() -> None:
    assert set(shape_names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_shape_builds_with_the_published_number_of_parameters(name: str) -> None:
    config = shape_config(name)
    spec = model_spec(config, torch.bfloat16)
    parameters, kinds = PUBLISHED[name]
    found = [layer.kind for layer in spec.layers]
    assert {kind.name: found.count(kind) for kind in LayerKind if kind in found} == kinds
    assert config["torch_dtype"] == "bfloat16"
    model = MODELS.get(spec.architecture)(config, spec, device="meta")
    count = sum(p.numel() for p in model.parameters())
    # Routers' correction biases are parameters here and buffers elsewhere: a few thousand numbers.
    assert count == pytest.approx(parameters, rel=1e-6)
