"""The same prompts through transformers' `generate`, on the same cores in the same process."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparseengine.weights.source import ModelSource


def load_transformers(source: ModelSource, dtype: torch.dtype, device: torch.device) -> Any:
    """The checkpoint as transformers' own model."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = Path(source.path)
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if files and files[0].suffix == ".gguf":
        model = AutoModelForCausalLM.from_pretrained(
            files[0].parent, gguf_file=files[0].name, dtype=dtype
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.to(device).eval()


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
