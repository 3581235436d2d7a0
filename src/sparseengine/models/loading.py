"""From a checkpoint to a model: names, merged weights, and no parameter left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparseengine.core.specs import ModelSpec
from sparseengine.errors import ConfigError
from sparseengine.models import fields
from sparseengine.nn.rope import RopeSpec, rotary
from sparseengine.registry import Registry
from sparseengine.weights.dummy import DummyFill
from sparseengine.weights.source import ModelSource

MODELS = Registry(
    "model architecture",
    {
        "DeepseekV2ForCausalLM": "sparseengine.models.deepseek:DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM": "sparseengine.models.deepseek:DeepseekV3ForCausalLM",
        "Gemma2ForCausalLM": "sparseengine.models.gemma2:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "sparseengine.models.gemma3:Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration": (
            "sparseengine.models.gemma3:Gemma3ForConditionalGeneration"
        ),
        "GemmaForCausalLM": "sparseengine.models.gemma:GemmaForCausalLM",
        "Glm4MoeLiteForCausalLM": "sparseengine.models.glm4_moe_lite:Glm4MoeLiteForCausalLM",
        "LlamaForCausalLM": "sparseengine.models.llama:LlamaForCausalLM",
        "MinistralForCausalLM": "sparseengine.models.mistral:MinistralForCausalLM",
        "MistralForCausalLM": "sparseengine.models.mistral:MistralForCausalLM",
        "MixtralForCausalLM": "sparseengine.models.mixtral:MixtralForCausalLM",
        "Phi3ForCausalLM": "sparseengine.models.phi3:Phi3ForCausalLM",
        "Qwen2ForCausalLM": "sparseengine.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "sparseengine.models.qwen3:Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM": "sparseengine.models.qwen3_moe:Qwen3MoeForCausalLM",
    },
)

_HEAD = "lm_head.weight"
_LISTED = 5
_QUANTISED = (".qweight", ".qzeros", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".SCB")


def model_spec(hf_config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    """What the engine needs to know of a model, from its config alone.

    Raises ConfigError for an architecture that is not registered (with the nearest one) and for a
    missing or impossible field.
    """
    family = MODELS.get(fields.architecture(hf_config))
    spec: ModelSpec = family.build_spec(hf_config, dtype)
    ropes: tuple[RopeSpec, ...] = family.rope_specs(family.filled(hf_config), spec)
    of = {rope: rotary(rope) for rope in dict.fromkeys(ropes)}
    return replace(spec, rotaries=tuple(of[rope] for rope in ropes))


def load_model(
    source: ModelSource,
    spec: ModelSpec,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Build the model on `device` and fill every parameter from the source.

    Tensors are read one at a time, so that the host holds the model and one tensor. Raises
    ConfigError for a parameter that the checkpoint lacks, a tensor that the model has no place for,
    a second tensor for one place, a wrong shape and a quantised one; each error names the tensors.
    """
    if dtype is not None and dtype != spec.dtype:
        raise ValueError(f"dtype {dtype} differs from the spec's {spec.dtype}")
    model: nn.Module = MODELS.get(spec.architecture)(source.hf_config, spec, device=device)
    if source.load_format == "dummy":
        fill = DummyFill(source.seed)
        for name, parameter in model.named_parameters():
            fill(name, parameter.data)
    else:
        _Filler(model, source.name).run(source)
    for module in model.modules():
        if hasattr(module, "prepare"):
            module.prepare()
    return model.eval()


class _Filler:
    """Knows the place of every checkpoint tensor in a model and which places are filled."""

    def __init__(self, model: Any, name: str) -> None:
        self.name = name
        self.tied = bool(model.tied)
        self.ignores = partial(model.ignores, spec=model.spec)
        self.rename = model.rename
        self.places, self.stacks = _places(model)
        self.filled: set[str] = set()
        self.unexpected: list[str] = []
        self.spare_head: Tensor | None = None

    def run(self, source: ModelSource) -> None:
        for name, tensor in source.tensors():
            self._put(name, tensor)
        missing = [name for name in self.places if name not in self.filled]
        self._refuse(missing, "lacks", "that the model needs")
        self._refuse(self.unexpected, "holds", "that the model has no place for")
        self._check_spare_head()

    def _put(self, name: str, tensor: Tensor) -> None:
        if self.ignores(name):
            return
        name = self.rename(name)
        if self.tied and name == _HEAD:
            self.spare_head = tensor
            return
        place, fills = self._place(name)
        if place is None:
            self.unexpected.append(name)
            return
        again = next((other for other in fills if other in self.filled), None)
        if again is not None:
            inside = "" if again == name else f" (once more inside {name})"
            raise ConfigError(f"model {self.name!r} holds the tensor {again} twice{inside}")
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ConfigError(
                f"model {self.name!r}: tensor {name} is stored as {tensor.dtype}, which belongs to "
                "a quantised checkpoint, and its config does not say which; float32, float16 and "
                "bfloat16 weights can be loaded"
            )
        if place.shape != tensor.shape:
            raise ConfigError(
                f"model {self.name!r}: tensor {name} has shape {tuple(tensor.shape)}, the config "
                f"asks for {tuple(place.shape)}"
            )
        place.copy_(tensor)
        self.filled.update(fills)

    def _place(self, name: str) -> tuple[Tensor | None, Sequence[str]]:
        """(the view that a tensor fills, or None; the names in `places` that it stands for)."""
        if name in self.stacks:
            return self.stacks[name]
        return self.places.get(name), (name,)

    def _refuse(self, names: list[str], verb: str, why: str) -> None:
        if not names:
            return
        listed = ", ".join(names[:_LISTED])
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        hint = ""
        if _HEAD in names and verb == "lacks":
            hint = (
                "; tie_word_embeddings is false in its config, so the output head must be stored "
                "(hf_overrides={'tie_word_embeddings': True} shares it with the embedding)"
            )
        if verb == "holds" and any(name.endswith(_QUANTISED) for name in names):
            hint = "; these names belong to a quantised checkpoint, and its config does not say so"
        kind = "tensor" if len(names) == 1 else "tensors"
        raise ConfigError(
            f"model {self.name!r} {verb} {len(names)} {kind} {why}: {listed}{more}{hint}"
        )

    def _check_spare_head(self) -> None:
        """A tied checkpoint may store the head as well, as long as it is the embedding."""
        if self.spare_head is None:
            return
        embedding = self.places["model.embed_tokens.weight"]
        head = self.spare_head.to(device=embedding.device, dtype=embedding.dtype)
        if not torch.equal(head, embedding):
            raise ConfigError(
                f"model {self.name!r}: tie_word_embeddings is true, but {_HEAD} differs from "
                "model.embed_tokens.weight; set hf_overrides={'tie_word_embeddings': False}"
            )


def _places(model: Any) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, tuple[str, ...]]]]:
    """What checkpoint tensors fill: name -> the (part of a) parameter, as a view; and for layouts
    that stack several of these in one tensor: name -> (the view, the names that it stands for).

    A module whose parameters are laid out otherwise than the checkpoint's tensors says so itself,
    by the methods `places(own full name)` and `stacked_places(own full name)`.
    """
    places: dict[str, Tensor] = {}
    stacks: dict[str, tuple[Tensor, tuple[str, ...]]] = {}
    for owner, module in model.named_modules():
        if hasattr(module, "stacked_places"):
            stacks |= module.stacked_places(owner)
        if hasattr(module, "places"):
            places |= module.places(owner)
            continue
        prefix = f"{owner}." if owner else ""
        for leaf, parameter in module.named_parameters(recurse=False):
            places[f"{prefix}{leaf}"] = parameter.data
    if model.tied:
        del places[_HEAD]
    return places, stacks
