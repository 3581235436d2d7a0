"""One batch through an engine, step by step: prompts, and the seconds that steps took."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparseengine.bench.synthetic import Probe, fill

if TYPE_CHECKING:
    from sparseengine.engine.engine import Engine
    from sparseengine.llm import LLM

SETTLING_STEPS = 2  # of a batch that was filled in: its tables are uploaded, its graph captured


@dataclass(slots=True, kw_only=True)
class Timing:
    """Seconds of one batch: until the last first token, and of each full decode step.

    prefill_s: None when there was no prefill. resident_bytes: KV of one request, the mean.
    """

    prefill_s: float | None = None
    steps_s: list[float] = field(default_factory=list)
    resident_bytes: int = 0


def make_prompts(vocab: int, length: int, batch: int, seed: int) -> list[list[int]]:
    """Random token ids, seeded, the same for every method; the lowest (specials) are left out."""
    rng = random.Random(f"{seed}/{length}/{batch}")
    low = min(1000, vocab // 4)
    return [[rng.randrange(low, vocab) for _ in range(length)] for _ in range(batch)]


def run_batch(
    llm: LLM, prompts: Sequence[Sequence[int]], output_len: int, like: Probe | None = None
) -> Timing:
    """Run one batch to its end. `like`: its prompts are filled in instead of computed.

    A step's time is that between two returns of tokens to the host, which is what a client sees.
    Steps in which a graph is captured are left out.
    """
    from sparseengine.core.params import SamplingParams

    engine = llm.engine
    sampling = SamplingParams(
        temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
    )
    start = time.perf_counter()
    ids = [engine.add_request(p, sampling, stream=True) for p in prompts]
    tokens = dict.fromkeys(ids, 0)
    timing = Timing()
    if like is not None:
        fill(engine, ids, like)
        tokens = dict.fromkeys(ids, 1)
    dropped = 0 if like is None else SETTLING_STEPS
    before = time.perf_counter()
    while engine.has_work:
        all_decode = all(0 < n < output_len for n in tokens.values())
        if all_decode and not timing.resident_bytes:
            usage = [engine.scheduler.cache.usage(int(i)).bytes for i in ids]
            timing.resident_bytes = sum(usage) // len(usage)
            before = time.perf_counter()
        captured, launched = _num_captured(engine), engine.num_steps
        outputs = engine.step()
        after = time.perf_counter()
        for output in outputs:
            tokens[output.request_id] = len(output.outputs[0].token_ids)
        if all_decode and _num_captured(engine) == captured:
            if engine.num_steps > launched:  # else it only waited for the step before
                timing.steps_s.append(after - before)
        elif timing.prefill_s is None and like is None and all(tokens.values()):
            timing.prefill_s = after - start
        before = after
    del timing.steps_s[:dropped]
    return timing


def _num_captured(engine: Engine) -> int:
    graphs = engine.runner.graphs
    return 0 if graphs is None else graphs.num_captured


def now() -> float:
    """Wall clock, after the device is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
