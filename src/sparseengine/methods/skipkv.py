"""SkipKV (arXiv:2512.07993): drop whole thoughts that are said again later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from sparseengine.cache.tensors import upload
from sparseengine.core.method import LayerStep, Vocabulary
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.specs import AuxSpec, CacheGroup, ModelSpec, Per
from sparseengine.core.view import Keep
from sparseengine.errors import RequestError
from sparseengine.methods.knobs import knob
from sparseengine.methods.rkv import RKV, RKVConfig
from sparseengine.methods.sentences import Sentences

_POSITION, _HIDDEN = "token_position", "newest_hidden"
_HELD = 32  # decoded tokens whose hidden states wait to be added to their sentences
_MARKS = (".", "?", "!", "\n\n", "。", "？", "！")
_RANK_STEP = 8.0  # more than all that scores of tokens can differ by


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipKVConfig(RKVConfig):
    """Knobs of SkipKV: R-KV's, and the sentences'."""

    importance: float = knob(
        0.91, "weight of importance; the rest is that of redundancy", low=0.0, high=1.0
    )
    penalty: float = knob(
        1.0, "weight of a sentence's likeness to a later one; 0 leaves R-KV", low=0.0, high=100.0
    )
    likeness: float = knob(
        0.95, "cosine above which a later sentence repeats an earlier one", low=-1.0, high=1.0
    )
    whole: bool = knob(True, "repeated sentences go first, oldest first, before any other token")
    sentences: int = knob(256, "newest sentences that are compared", low=2, high=4096)
    shortest: int = knob(4, "tokens of a sentence at least", low=1, high=4096)
    longest: int = knob(256, "tokens of a sentence at most", low=1, high=1 << 16)
    segment: int = knob(
        32, "tokens of a sentence where nothing tells sentences apart", low=1, high=1 << 16
    )
    delimiters: tuple[int, ...] = knob(
        (), "ids of tokens that end a sentence; empty: those that the tokenizer tells", low=0
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "paper": {"importance": 0.91, "penalty": 1.0, "likeness": 0.95, "sentences": 256},
        }
    )

    def __post_init__(self) -> None:
        RKVConfig.__post_init__(self)
        if self.shortest > self.longest:
            raise RequestError(
                f"sparse knob shortest={self.shortest} is not allowed; it must be at most "
                f"longest={self.longest}"
            )


class SkipKV(RKV):
    """Retains R-KV's tokens, but drops sentences first that a later sentence says again.

    arXiv:2512.07993, made for long reasoning. Rows are cut when R-KV cuts them. A sentence ends at
    a token whose text ends in ". ? !" or an empty line, with 4 to 256 tokens; segments of 32 tokens
    stand in for sentences where there is no tokenizer. The direction of the sum of its tokens'
    hidden states, after the last layer that the method acts on, is what a sentence says. A closed
    sentence whose cosine to any later closed one is at least `likeness` is repeated. Then

        score of a token = R-KV's score - penalty * likeness of its sentence, 0 if not repeated

    and with `whole` repeated sentences go before all other tokens, the oldest first. The newest
    `window` tokens stay, and so do sinks. Of the text, the prompt included, the newest `sentences`
    sentences are compared; the others are never called repeated.

    Costs: R-KV's; hidden_size * 4 bytes per compared sentence and request, and the hidden states of
    32 tokens; 4 bytes per token and KV head for positions. Each step waits for the tokens of the
    one before: sentences are found by reading them.

    Deviations: there is no code of the authors. importance = 0.91 is their weight of 0.1 for
    redundancy, scaled; redundancy is over the whole row as in R-KV, not over 64 tokens; rows are
    cut to the budget exactly, so that the last sentence dropped may be dropped in part. Repeated
    sentences are ordered by age, not likeness, which rounding would decide. The steering vector,
    which needs an asset per model and changes what a model says, is left out.
    """

    name = "skipkv"
    config_class = SkipKVConfig
    traits = replace(RKV.traits, needs=frozenset({"hidden"}), reads_tokens=True)

    def __init__(self, config: Any, model: ModelSpec) -> None:
        super().__init__(config, model)
        self.ends = frozenset(config.delimiters)
        self._texts: dict[int, Sentences] = {}
        self._repeated: dict[int, tuple[Tensor, Tensor]] = {}

    def read(self, vocabulary: Vocabulary) -> None:
        """Which tokens end a sentence, unless the knobs say so."""
        self.ends = self.ends or vocabulary.ending_in(_MARKS)

    # ── storage ──────────────────────────────────────────────────────────────────────────────────

    @property
    def _sums(self) -> str:
        return f"sentence_sums_{self.config.sentences}"

    def aux(self) -> tuple[AuxSpec, ...]:
        """Beside R-KV's, positions plus 1; 0 where a row was not cut since a token came."""
        return (*super().aux(), AuxSpec(name=_POSITION, per=Per.SLOT))

    def cache_plan(self) -> tuple[CacheGroup, ...]:
        """Sums of sentences belong to one layer, in a group of its own."""
        groups: list[CacheGroup] = []
        wide = torch.float64 if self.model.dtype is torch.float64 else torch.float32
        sums = AuxSpec(
            name=self._sums,
            per=Per.REQUEST,
            shape=(self.config.sentences, self.model.hidden_size),
            dtype=wide,
        )
        shape = (_HELD, self.model.hidden_size)
        held = AuxSpec(
            name=_HIDDEN, per=Per.REQUEST, shape=shape, dtype=self.model.dtype, ring=True
        )
        for group in super().cache_plan():
            last = self.layers[-1] if self.layers else None
            if last not in group.layers:
                groups.append(group)
                continue
            rest = tuple(i for i in group.layers if i != last)
            groups.extend([replace(group, layers=rest)] if rest else [])
            groups.append(replace(group, layers=(last,), aux=(*group.aux, sums, held)))
        return tuple(groups)

    def needs_tokens(self, request: Request) -> bool:
        """Sentences are read where rows are cut."""
        return self.is_watched(request)

    # ── what sentences say ───────────────────────────────────────────────────────────────────────

    def _text(self, request: Request, stop: int) -> Sentences:
        """The sentences up to a position: read again if need be (after a fork or a preemption)."""
        text = self._texts.get(request.id)
        if text is None or text.scanned > stop:
            longest = self.config.longest if self.ends else self.config.segment
            text = Sentences(self.ends, min(self.config.shortest, longest), longest)
            self._texts[request.id] = text
        text.extend(request.tokens, stop)
        return text

    def layer_end(self, at: LayerStep, hidden: Tensor) -> None:
        """Add what each token says to its sentence; decoded tokens are added a few at a time."""
        if not self.layers or at.layer != self.layers[-1] or not self.config.penalty:
            return
        decodes = self._growing(at.plan)
        if decodes:
            said = torch.stack([hidden[i] for i in decodes])
            at.subset(decodes).push(_HIDDEN, said)
        for i, chunk in enumerate(at.plan.chunks):
            if chunk.purpose is Purpose.PREFILL and self.is_watched(chunk.request):
                lo, hi = at.span(i)
                sums, text = at.request_aux(self._sums, i), self._text(chunk.request, chunk.stop)
                self._add(sums, text, chunk.start, hidden[lo:hi])

    def _add_decoded(self, sums: Tensor, last: LayerStep, chunk: int, start: int) -> None:
        """Add the decoded tokens from a position on, at most the ring's."""
        now = last.plan.chunks[chunk]
        start = max(start, now.request.prompt_len)
        if start >= now.stop:
            return
        first = start % _HELD  # they do not wrap around: `start` is in the newest block
        held = last.request_aux(_HIDDEN, chunk)[first : first + now.stop - start]
        self._add(sums, self._text(now.request, now.stop), start, held)

    def _add(self, sums: Tensor, text: Sentences, start: int, hidden: Tensor) -> None:
        """sums [S, hidden]: a ring by sentence; those that begin in this run start from zero.

        hidden [T, hidden]: of the tokens from position `start` on.
        """
        stop = start + len(hidden)
        first, last = text.at(start), text.at(stop - 1)
        first = max(first, last + 1 - len(sums))
        begins = text.starts[first]
        part = hidden[max(0, begins - start) :].to(sums.dtype)
        if len(part) == 1:
            row = sums[first % len(sums)]
            if begins == start:
                row.zero_()
            row.add_(part[0])
            return
        starts = np.array(text.starts[first : last + 1], np.int64)
        position = np.arange(stop - len(part), stop)
        owner = np.searchsorted(starts, position, side="right") - 1
        spoke = owner == np.arange(len(starts))[:, None]  # [n, T]
        rows = upload(np.arange(first, last + 1) % len(sums), sums.device)
        left = upload((starts < start).astype(np.float32), sums.device).to(sums.dtype)
        said = upload(spoke.astype(np.float32), sums.device).to(sums.dtype) @ part
        sums[rows] = sums[rows] * left[:, None] + said

    def _likeness(self, sums: Tensor, text: Sentences) -> tuple[Tensor, Tensor]:
        """Starts of the closed sentences that are compared (and the end), and their penalties."""
        last = text.num_closed
        first = max(0, last + 1 - len(sums))
        starts = upload(np.array(text.starts[first : last + 1], np.int64), sums.device)
        rows = upload(np.arange(first, last) % len(sums), sums.device)
        unit = normalize(sums[rows], dim=-1)
        order = torch.arange(last - first, device=sums.device)
        later = torch.where(order > order[:, None], unit @ unit.mT, -2.0)
        most = later.amax(1) if last > first else unit.new_zeros(0)
        return starts, torch.where(most >= self.config.likeness, most, 0.0).float()

    # ── cuts ─────────────────────────────────────────────────────────────────────────────────────

    def is_due(self, chunk: Chunk) -> bool:
        """Never within the forward: what the last sentences say is known after it."""
        return False

    def weigh(self, plan: StepPlan, layers: Callable[[], Iterable[LayerStep]]) -> None:
        """Score prompts that end here and rows that have grown by `interval`."""
        limits: dict[int, int] = {}
        for i, c in enumerate(plan.chunks):
            if c.ends_prompt and c.request.sparse.kv_error is not None:
                limits[i] = 0
            elif c.ends_prompt and c.request.budget is not None:
                limits[i] = c.request.budget
        full: list[int] = []  # rings of hidden states, once they have gone round
        for i in self._growing(plan):
            limits[i] = (plan.chunks[i].request.budget or 0) + self.config.interval - 1
            if self.config.penalty and plan.chunks[i].stop % _HELD == 0:
                full.append(i)
        if not limits:
            return
        alike = all(plan.chunks[i].request.sparse.kv_error is None for i in limits)
        steps: list[LayerStep] = []
        due: set[int] = set()
        for at in layers():
            if not self.acts_on(at.layer):
                continue
            here = {i for i, limit in limits.items() if max(at.lens(i)) > limit}
            if not here and alike and not full:
                return
            due = here if alike else due | here
            steps.append(at)
        for i in full if steps else ():
            sums = steps[-1].request_aux(self._sums, i)
            self._add_decoded(sums, steps[-1], i, plan.chunks[i].stop - _HELD)
        for i in sorted(due):
            self._compare(steps[-1], i)
            budget = plan.chunks[i].request.budget
            for at in steps:
                self.note(at, i, plan.chunks[i].stop if budget is None else budget)
            self._repeated.clear()

    def _compare(self, last: LayerStep, chunk: int) -> None:
        if self.config.penalty:
            now = last.plan.chunks[chunk]
            sums = last.request_aux(self._sums, chunk).clone()
            self._add_decoded(sums, last, chunk, now.stop - now.stop % _HELD)
            text = self._text(now.request, now.stop)
            self._repeated[now.request.id] = self._likeness(sums, text)

    def shrink(
        self, request: Request, target_tokens: int, rows: Sequence[LayerStep]
    ) -> Sequence[Keep]:
        mine = [at for at in rows if self.acts_on(at.layer)]
        if not mine or not self.config.interval or not self.can_cut(request):
            return ()
        self._compare(mine[-1], 0)
        keeps = super().shrink(request, target_tokens, rows)
        self._repeated.clear()
        return keeps

    def score(self, at: LayerStep, chunk: int) -> Tensor:
        """R-KV's score less the penalty of repeated sentences: fp32 [Hkv, L]."""
        score = super().score(at, chunk)
        position = self._positions(at, chunk)
        found = self._repeated.get(at.plan.chunks[chunk].request.id)
        if found is None or len(found[1]) == 0:
            return score
        starts, likeness = found
        sentence = torch.searchsorted(starts, position, right=True) - 1  # [Hkv, L]
        inside = (sentence >= 0) & (sentence < len(likeness))
        index = sentence.clamp(0, len(likeness) - 1)
        alike = torch.where(inside, likeness[index], 0.0)
        score -= self.config.penalty * alike
        if self.config.whole:
            score -= (alike > 0) * (len(likeness) - index) * _RANK_STEP
        return score

    def _positions(self, at: LayerStep, chunk: int) -> Tensor:
        """Positions of a row's tokens, int64 [Hkv, L]; written down, for the cut breaks the row.

        Tokens since the last cut follow each other up to the newest one. What forks share they
        write alike, so that pages may stay shared.
        """
        stored = at.gather(_POSITION, chunk)
        length = stored.shape[1]
        slot = torch.arange(length, device=stored.device) + (at.plan.chunks[chunk].stop - length)
        position = torch.where(stored > 0, stored.long() - 1, slot)
        at.scatter(_POSITION, chunk, (position + 1).float())
        return position

    def forget(self, request_id: int) -> None:
        super().forget(request_id)
        self._texts.pop(request_id, None)
