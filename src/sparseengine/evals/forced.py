"""Teacher forcing through the engine's own decode steps, and the comparison of what they gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.plan import Request
from sparseengine.engine.outputs import RequestOutput, Sample
from sparseengine.engine.record import SparseOutput
from sparseengine.engine.sampling import Drawn, Draws, Sampler
from sparseengine.errors import ConfigError, SparseEngineError

if TYPE_CHECKING:
    from sparseengine.llm import LLM


class ForcedSampler(Sampler):
    """Answers with given tokens and keeps the logits of decode steps, fp32 on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.forced: dict[int, Sequence[int]] = {}
        self.logits: dict[int, list[Tensor]] = {}
        self._rows = torch.empty(0)

    def force(self, request: Request, tokens: Sequence[int]) -> None:
        """tokens: one for the end of the prefill and one for every decode step."""
        self.forced[request.id] = tokens
        self.logits[request.id] = []

    def draws(self, requests: Sequence[Request]) -> Draws | None:
        return None  # captured steps would give tokens without their logits

    def needs_last(self, request: Request) -> bool:
        return True  # so that no step runs ahead with a token that is about to be replaced

    def draw(self, logits: Tensor, requests: Sequence[Request]) -> Drawn:
        self._rows = logits
        return super().draw(logits, requests)

    def collect(self, drawn: Drawn, requests: Sequence[Request]) -> list[Sample]:
        found, logits = super().collect(drawn, requests), self._rows
        for i, request in enumerate(requests):
            if found[i].error is None:
                step = request.num_generated
                found[i] = Sample(token=self.forced[request.id][step])
                if step > 0:
                    self.logits[request.id].append(logits[i].float().cpu())
        return found


def forced_logits(
    llm: LLM, pieces: Sequence[Sequence[int]], prompt_len: int, sparse: Sequence[SparseParams]
) -> tuple[list[Tensor], SparseOutput]:
    """Run pieces of P + N + 1 tokens: P as a prompt, then N decode steps with the text's tokens.

    Row i of a piece's logits [N, V] predicts its token P + 1 + i. Also returns what was recorded of
    the first piece, whose `sparse` must ask for it.
    """
    engine, sampler = llm.engine, ForcedSampler()
    before = engine.runner.sampler
    submissions = []
    for piece, params in zip(pieces, sparse, strict=True):
        after = piece[prompt_len:]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=len(after), ignore_eos=True, detokenize=False
        )
        submission = engine.prepare(piece[:prompt_len], sampling, params)
        if submission.requests[0].max_tokens < len(after):
            raise ConfigError(
                f"{len(piece)} tokens do not fit into max_model_len={engine.intake.max_model_len}; "
                "lower --input-len or --output-len"
            )
        sampler.force(submission.requests[0], after)
        submissions.append(submission)
    engine.runner.sampler = sampler
    outputs: dict[str, RequestOutput] = {}
    try:
        for submission in submissions:
            engine.submit(submission)
        while engine.has_work:
            outputs.update((o.request_id, o) for o in engine.step() if o.finished)
    finally:
        for submission in submissions:
            engine.abort(submission.request_id)
        engine.discard()
        engine.runner.sampler = before
    first = [outputs[s.request_id].outputs[0] for s in submissions]
    for completion in first:
        if completion.finish_reason != "length":
            raise SparseEngineError(f"a forced run ended early: {completion.stop_reason}")
    seen = first[0].sparse
    assert seen is not None
    return [torch.stack(sampler.logits[s.requests[0].id]) for s in submissions], seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Of one text, place by place: divergence, whether the likeliest tokens agree, and -log p."""

    kl: list[float]
    same_top: list[bool]
    nll: list[float]
    dense_nll: list[float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(dense: Tensor, other: Tensor, targets: Sequence[int]) -> Places:
    """Compare logits [N, V] in float64; `targets` are the N tokens that followed."""
    p, q = (torch.log_softmax(x.double(), -1) for x in (dense, other))
    at = torch.tensor(list(targets))[:, None]
    # a token of probability 0 under dense adds nothing
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))
    return Places(
        kl=terms.sum(-1).tolist(),
        same_top=(p.argmax(-1) == q.argmax(-1)).tolist(),
        nll=(-q.gather(1, at)).squeeze(1).tolist(),
        dense_nll=(-p.gather(1, at)).squeeze(1).tolist(),
    )


def summary(texts: Sequence[Places]) -> dict[str, Any]:
    """Over all places of all texts."""
    kl = torch.tensor([v for t in texts for v in t.kl], dtype=torch.float64)
    same = torch.tensor([v for t in texts for v in t.same_top], dtype=torch.float64)
    nll = torch.tensor([v for t in texts for v in t.nll], dtype=torch.float64)
    dense = torch.tensor([v for t in texts for v in t.dense_nll], dtype=torch.float64)
    return {
        "places": len(kl),
        "kl_mean": kl.mean().item(),
        "kl_p99": kl.quantile(0.99).item(),
        "kl_max": kl.max().item(),
        "top1_agreement": same.mean().item(),
        "perplexity": nll.mean().exp().item(),
        "dense_perplexity": dense.mean().exp().item(),
    }
