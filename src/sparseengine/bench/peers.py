"""The same prompts through transformers' `generate`, on the same cores in the same process."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from sparseengine.errors import ConfigError
from sparseengine.weights.source import ModelSource


def load_transformers(source: ModelSource, dtype: torch.dtype, device: torch.device) -> Any:
    """The checkpoint as transformers' own model.

    It is filled from our reader: transformers' own reads GGUF only with one more package installed.
    Raises ConfigError when a tensor is missing or has no place.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(source.hf_config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    wrong = model.load_state_dict(dict(source.tensors()), strict=False)
    missing = [name for name in wrong.missing_keys if name != "lm_head.weight" or not _tied(config)]
    if missing or wrong.unexpected_keys:
        raise ConfigError(
            f"transformers' model and the checkpoint {source.name!r} differ: missing {missing}, "
            f"unexpected {wrong.unexpected_keys}"
        )
    model.tie_weights()
    return model.to(device).eval()


def _tied(config: Any) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))


@torch.inference_mode()
def time_generate(
    model: Any, prompts: Sequence[Sequence[int]], output_len: int
) -> tuple[float, list[float]]:
    """Prefill seconds and the seconds of each decode step of one greedy batch of equal lengths."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Clock(StoppingCriteria):  # type: ignore[misc]
        """Called once after every token of the batch; never stops it."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    clock = Clock()
    ids = torch.tensor([list(p) for p in prompts], device=model.device)
    gc.collect()
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=output_len,
        min_new_tokens=output_len,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([clock]),
        pad_token_id=0,
    )
    steps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    return clock.times[0] - start, steps
