"""KVzip (arXiv:2505.23416): what a model looks at when it repeats the text is what it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparseengine.core.method import LayerStep, Traits, Vocabulary
from sparseengine.core.plan import Demand, Purpose, Request, StepPlan
from sparseengine.core.specs import AuxSpec, ModelSpec, Per
from sparseengine.core.view import Keep
from sparseengine.errors import RequestError
from sparseengine.methods.allocate import Allocation
from sparseengine.methods.budgets import protect, top_mask
from sparseengine.methods.error_targets import Target
from sparseengine.methods.families import EvictionConfig, EvictionMethod
from sparseengine.methods.knobs import knob
from sparseengine.methods.pending import Pending, cut_together

_SCORE = "reconstruction_score"
_REPEAT_WHOLE = "\n\nRepeat the previous context exactly."
_REPEAT_PART = "\n\nRepeat the part of the previous context exactly, starting with "
_TILE_LOGITS = 1 << 24  # of all query heads together: 64 MiB in fp32
_LEAST_CHUNK = 64  # tokens repeated at once, however near the model's longest text is


@dataclass(frozen=True, slots=True, kw_only=True)
class KVzipConfig(EvictionConfig):
    """Knobs of KVzip."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "authors": {"sink": 0, "recent": 0, "chunk": 2000, "lead": 8, "form": "pair"},
            "kvpress": {"sink": 4, "recent": 0, "chunk": 2048, "lead": 8, "form": "pair"},
        }
    )

    recent: int = knob(8, "newest tokens that are always retained", low=0, high=1 << 20)
    chunk: int = knob(2000, "tokens of the prompt that are repeated at once", low=1, high=1 << 20)
    lead: int = knob(
        8, "tokens before those that are repeated along with them, unscored", low=0, high=4096
    )
    words: bool = knob(
        True,
        "ask for each repetition in the authors' words, and begin it as the chat template does; "
        "needs a tokenizer",
    )
    prefix: tuple[int, ...] = knob(
        (), "token ids put before each repetition in place of words", low=0
    )
    form: str = knob(
        "pair",
        "pair: one threshold over all layers and KV heads; layer: one per layer; uniform: each row "
        "keeps the budget; head: some heads keep everything, the others sinks and newest tokens",
        choices=("pair", "layer", "uniform", "head"),
    )


class KVzip(EvictionMethod):
    """Retains what the model attends to when it repeats the prompt, whatever is asked later.

    arXiv:2505.23416. When the prompt has been run, its tokens are run again in chunks of `chunk`,
    behind the whole stored prompt: words that ask to repeat it, the `lead` tokens before the chunk,
    what the chat template puts before an answer, the chunk. Without a tokenizer the words are
    `prefix`, empty by default.
    What these runs store is forgotten. In each layer a run's queries attend (softmax in fp32) to
    the sinks, the chunk as it is stored and the run itself; the score of a stored token is the
    largest attention that any query of its KV head paid to it. After the last run each prompt that
    is longer than the budget is cut to the tokens of highest score: under one threshold over all
    layers and KV heads (`pair`), so that the mean row has `budget` tokens, over each layer
    (`layer`), or row by row (`uniform`). With `head`, the heads in which any token's score is
    largest keep everything and the others sinks and newest tokens: as many as the mean row allows.
    The budget counts sinks and newest tokens, which always stay. Decoded tokens stay.

    Costs: the prompt is run twice, the second time with attention to all of it; memory for a run
    (`prefix`, `lead` and `chunk`) beyond the prompt; 4 bytes per token and KV head (8 while runs
    serve an error target). The first token is sampled before the cut, from everything.

    Deviations: The whole prompt is the context, a question in it too, and its
    newest 8 tokens stay (authors: a system prompt stays and questions come later). Ties go to the
    smaller position, then layer, then head. With layers of several sizes of KV, each size has a
    threshold of its own. Chunks are shorter where the model's longest text would be exceeded, down
    to 64 tokens. Head-level masks are each prompt's own,
    not the mean over many prompts. The weighting by output projections is left out.
    """

    name = "kvzip"
    config_class = KVzipConfig
    traits = Traits(
        family="eviction", sharing="chain", takes="retained", tp="reduce", measures="repetition"
    )
    default_ratio = 0.3
    stored_score = _SCORE

    def __init__(self, config: Any, model: ModelSpec) -> None:
        super().__init__(config, model)
        self._ran: dict[int, int] = {}  # runs that are over, by request
        # by request and layer: attention paid [Hkv, L], and by how many queries
        self._paid: dict[int, dict[int, tuple[Tensor, int]]] = {}
        wrong = [t for t in config.prefix if t >= model.vocab_size]
        if wrong:
            raise RequestError(
                f"kvzip: prefix holds token ids {wrong}, the model knows {model.vocab_size} tokens"
            )

        self._whole = self._part = tuple(config.prefix)  # what asks for a repetition
        self._header: tuple[int, ...] = ()

    def read(self, vocabulary: Vocabulary) -> None:
        """The authors' words, unless the knobs have others or none."""
        if self.config.words and not self.config.prefix:
            self._whole = vocabulary.encode(_REPEAT_WHOLE)
            self._part = vocabulary.encode(_REPEAT_PART)
            self._header = vocabulary.answer_header()

    def aux(self) -> tuple[AuxSpec, ...]:
        return (AuxSpec(name=_SCORE, per=Per.SLOT, rewritten=True),)

    def own_sharing(self) -> Allocation | None:
        """One threshold over heads, of all layers or of each, is what rows that share do."""
        scope = {"pair": "model", "layer": "layer"}.get(self.config.form)
        return None if scope is None else Allocation(kind="adakv", scope=scope, floor=0.0)

    def rescore(self, at: LayerStep) -> Tensor:
        """Scores as the runs left them; decoded tokens, which have none, are above all others."""
        chunk = at.plan.chunks[0]
        decoded = 0 if chunk.purpose is Purpose.REPLAY else chunk.stop - chunk.request.prompt_len
        slot = torch.arange(max(at.lens(0)), device=at.k.device)
        later = slot >= at.table()[1][0][:, None] - max(0, decoded)  # [G, L]
        scores = at.gather(_SCORE, 0)
        return torch.where(later, torch.finfo(scores.dtype).max, scores)

    def slack(self) -> int:
        return self.page_size - 1 if self.config.form != "uniform" else 0

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def _asking(self) -> int:
        """Tokens of a run at most beside the chunk and its lead."""
        return max(len(self._whole), len(self._part)) + len(self._header)

    def _chunk(self, prompt_len: int) -> int:
        """Tokens that a run repeats."""
        before = self._asking + self.config.lead
        room = self.model.max_position - prompt_len - before
        size: int = min(self.config.chunk, max(_LEAST_CHUNK, room), prompt_len)
        return size

    def reusable(self, prompt_len: int) -> int:
        """All of the prompt: its repetitions run on what is stored."""
        return prompt_len

    def replay(self, request: Request) -> Sequence[tuple[int, ...]]:
        """The prompt's chunks, each behind what asks for it."""
        length = request.prompt_len
        if not _is_cut(request) or not self.layers:
            return ()
        size, lead = self._chunk(length), self.config.lead
        prompt = request.tokens[:length]
        return tuple(
            (
                *(self._part if first else self._whole),
                *prompt[max(0, first - lead) : first],
                *self._header,
                *prompt[first : first + size],
            )
            for first in range(0, length, size)
        )

    def demand(self, prompt_len: int, max_tokens: int, budget: int | None) -> Demand:
        """Peak: the whole prompt and one run behind it. No budget: an error target may cut."""
        peak, steady = super().demand(prompt_len, max_tokens, budget)
        if (budget is not None and prompt_len <= budget) or not self.layers:
            return Demand(peak, steady)
        size = self._chunk(prompt_len)
        lead = min(self.config.lead, prompt_len - size)
        run = self._asking + lead + size
        return Demand(max(peak, prompt_len + run), steady)

    # ── scores ───────────────────────────────────────────────────────────────────────────────────

    def observe(self, at: LayerStep) -> None:
        if not self.acts_on(at.layer):
            return
        for i in range(len(at.plan.chunks) - 1, -1, -1):
            chunk = at.plan.chunks[i]
            if chunk.purpose is Purpose.DECODE:
                return
            if not _is_cut(chunk.request):
                continue
            if chunk.ends_prompt:  # zeros onto zeros: from the next step on no page is shared
                at.scatter(_SCORE, i, at.gather(_SCORE, i))
            elif chunk.purpose is Purpose.REPLAY:
                self._look(at, i)

    def _look(self, at: LayerStep, i: int) -> None:
        """Raise the scores of the tokens that a run repeats; after the last run they are final."""
        request = at.plan.chunks[i].request
        length, size = request.prompt_len, self._chunk(request.prompt_len)
        first = self._ran.get(request.id, 0) * size
        stop = min(first + size, length)
        scores = at.gather(_SCORE, i)[:, :length]
        best, paid = self._attention(at, i, first, stop)
        scores[:, first:stop] = torch.maximum(scores[:, first:stop], best)
        at.scatter(_SCORE, i, scores)
        if request.sparse.kv_error is not None:
            self._add_paid(at, i, first, paid)
        if stop < length:
            return
        lens = (length,) * len(at.lens(i))
        budget = length if request.budget is None else request.budget
        found = Pending(scores, lens, budget, self._target(request, at.layer))
        self._pending.setdefault(request.id, {})[at.layer] = found

    def _add_paid(self, at: LayerStep, i: int, first: int, paid: Tensor) -> None:
        """What a run's queries paid to the tokens from `first` on."""
        request, (lo, hi) = at.plan.chunks[i].request, at.span(i)
        layers = self._paid.setdefault(request.id, {})
        before = paid.new_zeros(len(paid), request.prompt_len), 0
        total, queries = layers.get(at.layer, before) if first else before
        total[:, first : first + paid.shape[1]] += paid
        layers[at.layer] = total, queries + (hi - lo) * at.spec.group_size

    def _target(self, request: Request, layer: int) -> Target | None:
        """The mean over all queries of all runs; what they pay to their own run no cut loses."""
        if request.sparse.kv_error is None:
            return None
        total, queries = self._paid[request.id].pop(layer)
        return Target(total / queries, request.sparse.kv_error)

    def _attention(self, at: LayerStep, i: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Attention of a run's queries on the stored tokens first..stop: its maximum and its sum
        over the queries of a KV head, fp32 [Hkv, C] each."""
        spec, length = at.spec, at.plan.chunks[i].request.prompt_len
        lo, hi = at.span(i)
        stored = at.gather("keys", i)  # [Hkv, L + R, D]
        sinks = min(self.config.sink, first)
        keys = torch.cat((stored[:, :sinks], stored[:, first:stop], stored[:, length:]), 1).float()
        queries = at.q[lo:hi].reshape(hi - lo, spec.kv_heads, spec.group_size, -1)
        queries = queries.permute(1, 2, 0, 3)  # [Hkv, g, R, D]
        own = torch.arange(keys.shape[1], device=keys.device) - (sinks + stop - first)
        best = keys.new_zeros(spec.kv_heads, stop - first)
        total = torch.zeros_like(best)
        tile = max(1, _TILE_LOGITS // (spec.q_heads * keys.shape[1]))
        for at_query in range(0, hi - lo, tile):
            some = queries[:, :, at_query : at_query + tile].float()
            logits = some @ keys.mT[:, None] * spec.softmax_scale  # [Hkv, g, t, S + C + R]
            if spec.softcap:
                logits = spec.softcap * torch.tanh(logits / spec.softcap)
            row = torch.arange(some.shape[2], device=keys.device)[:, None] + at_query
            paid = logits.masked_fill(own > row, float("-inf")).softmax(-1)
            paid = paid[..., sinks : sinks + stop - first]
            best = torch.maximum(best, paid.amax((1, 2)))
            total += paid.sum((1, 2))
        return best, total

    # ── the cut ──────────────────────────────────────────────────────────────────────────────────

    def evict(self, plan: StepPlan) -> Sequence[Keep]:
        for chunk in plan.chunks:
            if chunk.purpose is Purpose.REPLAY:
                self._ran[chunk.request.id] = self._ran.get(chunk.request.id, 0) + 1
                if chunk.request.id in self._pending:
                    del self._ran[chunk.request.id]
        if self.config.form == "uniform" or self.allocation is not None:
            return super().evict(plan)
        keeps: list[Keep] = []
        for chunk in plan.chunks:
            alike: dict[tuple[object, ...], list[tuple[int, Pending]]] = {}
            for layer, found in self._pending.pop(chunk.request.id, {}).items():
                spec = self.model.layers[layer]
                alike.setdefault((spec.kv_heads, *spec.stored_dims), []).append((layer, found))
            for items in alike.values():
                parts = [[one] for one in items] if self.config.form == "layer" else [items]
                for part in parts:
                    keeps.extend(self._together(chunk.request.id, part))
        return keeps

    def _together(self, request: int, items: Sequence[tuple[int, Pending]]) -> list[Keep]:
        """One choice over some layers."""
        scores = torch.stack([found.scores for _, found in items])  # [N, Hkv, L]
        lens = torch.full(scores.shape[:2], scores.shape[2], device=scores.device)
        choose = self._heads if self.config.form == "head" else self._pairs

        def chosen(budget: int) -> Tensor:
            shielded = protect(scores, lens, *self.protected(budget))
            return choose(shielded.flatten(0, 1), budget).view(scores.shape)

        pending = [found for _, found in items]
        masks = cut_together(pending, chosen, self.least(pending[0].budget))
        pairs = zip(items, masks, strict=True)
        return [Keep(request, layer, tuple(mask.unbind(0))) for (layer, _), mask in pairs]

    @staticmethod
    def _pairs(scores: Tensor, budget: int) -> Tensor:
        """The best R * budget slots of scores [R, L], position by position for fair ties."""
        rows, length = scores.shape
        return top_mask(scores.mT.flatten(), rows * budget).view(length, rows).mT

    @staticmethod
    def _heads(scores: Tensor, budget: int) -> Tensor:
        """Whole rows for those of largest score, as many as leave the others what is forced."""
        rows, length = scores.shape
        forced = scores == float("inf")
        least = int(forced[0].sum())  # alike in all rows
        count = rows * (budget - least) // max(1, length - least)
        best = scores.masked_fill(forced, float("-inf")).amax(1)
        return forced | top_mask(best, count)[:, None]

    def forget(self, request_id: int) -> None:
        super().forget(request_id)
        self._ran.pop(request_id, None)
        self._paid.pop(request_id, None)


def _is_cut(request: Request) -> bool:
    """Whether the prompt is repeated and then cut."""
    budget = request.budget
    is_long = budget is not None and request.prompt_len > budget
    return not request.saved and (request.sparse.kv_error is not None or is_long)
