"""Given tokens through the engine's own decode steps, and the comparison of what those gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.plan import Request
from sparseengine.engine.faults import isolated_step
from sparseengine.engine.intake import Submission
from sparseengine.engine.outputs import RequestOutput, Sample
from sparseengine.engine.record import SparseOutput
from sparseengine.engine.sampling import Drawn, Draws, Sampler
from sparseengine.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from sparseengine.llm import LLM


class ForcedSampler(Sampler):
    """Answers with given tokens first, then as usual. May keep the logits of decode steps."""

    def __init__(self) -> None:
        super().__init__()
        self.forced: dict[int, Sequence[int]] = {}
        self.logits: dict[int, list[Tensor]] = {}
        self._rows = torch.empty(0)
        self._ends: dict[int, tuple[int, Callable[[Sequence[int]], bool]]] = {}

    def force(self, request: Request, tokens: Sequence[int], *, keep_logits: bool = False) -> None:
        """tokens: the first is given at the end of the prefill, the others by decode steps."""
        self.forced[request.id] = tokens
        if keep_logits:
            self.logits[request.id] = []

    def end_when(
        self, request: Request, eos: int, is_done: Callable[[Sequence[int]], bool]
    ) -> None:
        """Give `eos` once `is_done` says so of the tokens behind the forced ones."""
        self._ends[request.id] = (eos, is_done)

    def draws(self, requests: Sequence[Request]) -> Draws | None:
        if any(request.id in self.logits for request in requests):
            return None  # captured steps would give tokens without their logits
        return super().draws(requests)

    def draw(self, logits: Tensor, requests: Sequence[Request]) -> Drawn:
        self._rows = logits
        return super().draw(logits, requests)

    def collect(self, drawn: Drawn, requests: Sequence[Request]) -> list[Sample]:
        """Logits fp32 [V] are kept on the host."""
        found, logits = super().collect(drawn, requests), self._rows
        for i, request in enumerate(requests):
            if found[i].error is None:
                if request.num_generated > 0 and request.id in self.logits:
                    self.logits[request.id].append(logits[i].float().cpu())
                found[i] = self._replace(found[i], request)
        return found

    def _changes_logits(self, request: Request) -> bool:
        """Not where the token is given: what would be sampled there is dropped."""
        is_given = request.num_generated < len(self.forced.get(request.id, ()))
        return not is_given and super()._changes_logits(request)

    def _replace(self, sample: Sample, request: Request) -> Sample:
        step, tokens = request.num_generated, self.forced.get(request.id, ())
        if step < len(tokens):
            return Sample(token=tokens[step])
        if request.id in self._ends:
            eos, is_done = self._ends[request.id]
            if is_done(request.tokens[request.prompt_len + len(tokens) :]):
                return Sample(token=eos)
        return sample


def drive(
    llm: LLM, sampler: ForcedSampler, submissions: Sequence[Submission]
) -> Iterator[RequestOutput]:
    """Run prepared prompts to their end with this sampler; the engine gets its own back.

    Outputs come as they end; one that fails ends alone, with finish_reason "error". One step at a
    time: tokens are replaced on the host before the next step can have them.
    """
    engine = llm.engine
    before = engine.runner.sampler, engine.overlap
    engine.runner.sampler, engine.overlap = sampler, False
    try:
        for submission in submissions:
            engine.submit(submission)
        while engine.has_work:
            yield from (output for output in isolated_step(engine) if output.finished)
    finally:
        for submission in submissions:
            engine.abort(submission.request_id)
        engine.discard()
        engine.runner.sampler, engine.overlap = before


def forced_logits(
    llm: LLM, pieces: Sequence[Sequence[int]], prompt_len: int, sparse: Sequence[SparseParams]
) -> tuple[list[Tensor], list[SparseOutput | None]]:
    """Run pieces of P + N + 1 tokens: P as a prompt, then N decode steps with the text's tokens.

    Row i of a piece's logits [N, V] predicts its token P + 1 + i. Also returns what was recorded of
    each piece whose `sparse` asks for something. Raises `RequestError` if a piece fails.
    """
    engine, sampler = llm.engine, ForcedSampler()
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
        sampler.force(submission.requests[0], after, keep_logits=True)
        submissions.append(submission)
    outputs = {output.request_id: output for output in drive(llm, sampler, submissions)}
    completions = [outputs[s.request_id].outputs[0] for s in submissions]
    for completion in completions:
        if completion.finish_reason != "length":
            raise RequestError(f"a forced run ended early: {completion.stop_reason}")
    logits = [torch.stack(sampler.logits[s.requests[0].id]) for s in submissions]
    return logits, [completion.sparse for completion in completions]


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
