"""Requests with long histories that were never computed: `--synthetic-kv`.

What a decode step costs does not depend on the values in the cache, no more than on those of the
weights. So the pools are filled with random numbers, and requests get rows of the right lengths
without a prefill:

    probe   one request: pages for all but the newest tokens of its prompt, the model runs on the
            rest, and the method evicts, replays and summarises as it always does. It is recorded,
            which gives the length of every row after the prompt and the bytes that a step reads
    fill    each request of the batch: admitted as any other, rows as long as the probe's, full
            pages sealed, one token to go on from

Row lengths that depend on scores (budgets shared between heads) are those of random keys.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sparseengine.console import sparse_params
from sparseengine.errors import ConfigError

if TYPE_CHECKING:
    from sparseengine.core.plan import Chunk
    from sparseengine.core.view import Keep
    from sparseengine.engine.admission import Ticket
    from sparseengine.engine.engine import Engine
    from sparseengine.engine.outputs import Sample
    from sparseengine.llm import LLM

TAIL_TOKENS = 64  # of the prompt, computed: what methods watch last
_FILL_NUMBERS = 1 << 28  # random numbers that one launch writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one request of a shape is like once its prompt is done.

    row_lens: tokens in each row, by layer with KV, one number per KV head. resident_bytes: of all
    its rows. read_bytes: K, V and page summaries that its first decode step read.
    """

    row_lens: dict[int, tuple[int, ...]]
    resident_bytes: int
    read_bytes: int


def randomise(engine: Engine) -> None:
    """Fill every page with numbers from N(0, 1), so that rows can be read that nobody wrote."""
    from sparseengine.cache.manager import PagedCache

    cache = engine.scheduler.cache
    assert isinstance(cache, PagedCache)
    for pool in cache.pools:
        for payload in pool.payload:
            for part in payload.split(max(1, _FILL_NUMBERS // payload[0].numel())):
                part.normal_()
    for group in cache.groups:
        for aux in group.slot_aux.values():
            aux.zero_()


def probe(llm: LLM, prompt: Sequence[int], *, compute: bool = False) -> Probe:
    """Run one recorded request alone: a history that is not computed, then the prompt's end.

    compute: run the model on the whole prompt instead.
    """
    from sparseengine.core.params import SamplingParams
    from sparseengine.core.plan import Chunk, Purpose
    from sparseengine.methods import METHODS

    engine = llm.engine
    name = llm.resolved.sparse.method
    if METHODS.get(name).traits.reads_tokens:
        raise ConfigError(
            f"--synthetic-kv is not possible with method {name!r}: it reads the text, and a "
            "history that was not computed has none that fits; leave --synthetic-kv out"
        )
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    sparse = sparse_params(llm.resolved.config, record=True)
    submission = engine.prepare(prompt, sampling, sparse)
    engine.controller.recorder.max_positions = sys.maxsize  # nobody reads them as JSON
    engine.submit(submission)
    request = submission.requests[0]
    room = engine.scheduler.cache.free_pages()
    if not compute and len(prompt) > TAIL_TOKENS and _admit(engine, request.id, room):
        history = tuple(prompt[:-TAIL_TOKENS])
        _store(engine, Chunk(request, history, 0, Purpose.PREFILL, False))
    found = None
    while engine.has_work:
        for output in engine.step():
            found = output.outputs[0]
    assert found is not None
    if found.finish_reason == "error":
        raise ConfigError(f"a request of {len(prompt)} tokens fails: {found.stop_reason}")
    assert found.sparse is not None, "the request was recorded"
    done = [r for r in found.sparse.retained if r.event == "prefill"][-1]
    return Probe(
        row_lens={la: tuple(map(len, rows)) for la, rows in done.positions.items()},
        resident_bytes=done.resident_bytes,
        read_bytes=found.sparse.reads[0].bytes_read,
    )


def fill(engine: Engine, request_ids: Sequence[str], like: Probe) -> None:
    """Turn queued requests into ones that decode. Raises `ConfigError` when they do not all fit."""
    scheduler = engine.scheduler
    available = scheduler.admission.available_pages(scheduler.running.values())
    for number, name in enumerate(request_ids):
        if not _admit(engine, int(name), available):
            raise ConfigError(
                f"{number} of {len(request_ids)} requests fit into the KV memory; lower "
                "--batch-size, or use `max`"
            )
        ticket = scheduler.running[int(name)]
        _fill_one(engine, ticket, like)
        available -= ticket.charge_pages


def _fill_one(engine: Engine, ticket: Ticket, like: Probe) -> None:
    from sparseengine.core.plan import Chunk, Purpose
    from sparseengine.engine.outputs import Sample

    request = ticket.request
    start = _first_stored(engine, request.prompt_len, like)
    chunk = Chunk(request, tuple(request.tokens[start:]), start, Purpose.PREFILL, True)
    _store(engine, chunk, partial(_cuts, engine, request.id, like), Sample(token=request.tokens[0]))
    if not ticket.is_steady:  # it has nothing to run again: its rows are final
        ticket.replays.clear()
        engine.scheduler.admission.settle(ticket)


def _first_stored(engine: Engine, prompt_len: int, like: Probe) -> int:
    """The first position that gets a slot: as many as the longest row has.

    WINDOW rows drop whole pages from position 0 on, so their first slot is at a page's start.
    """
    from sparseengine.cache.manager import PagedCache

    cache = engine.scheduler.cache
    assert isinstance(cache, PagedCache)
    steps = [g.geo.window_step for g in cache.groups if g.geo.window is not None]
    first = prompt_len - max(max(lens) for lens in like.row_lens.values())
    return first - first % math.lcm(*steps)


def _admit(engine: Engine, request_id: int, available: int) -> bool:
    """Move a queued request to the running ones, as the scheduler does; False when it is full."""
    scheduler = engine.scheduler
    request = next(r for r in scheduler.waiting if r.id == request_id)
    room = scheduler.config.max_num_seqs - len(scheduler.running)
    available = min(available, scheduler.cache.free_pages())
    ticket = scheduler.admission.admit(request, (), room, available)
    if ticket is None:
        return False
    scheduler.waiting.remove(request)
    scheduler.running[request.id] = ticket
    return True


def _store(
    engine: Engine,
    chunk: Chunk,
    cuts: Callable[[], Sequence[Keep]] = tuple,
    sample: Sample | None = None,
) -> None:
    """A step of one prompt chunk without the model: pages, summaries, progress, a made-up token.

    cuts: what is kept of what the method, which saw no queries, has left.
    """
    from sparseengine.core.plan import StepPlan

    plan = StepPlan((chunk,))
    engine.scheduler.cache.reserve(plan)
    engine.controller.end_step(plan)
    engine.controller.retain(cuts())
    engine.scheduler.commit(plan, {} if sample is None else {chunk.request.id: sample})


def _cuts(engine: Engine, request_id: int, like: Probe) -> list[Keep]:
    """Keeps that shorten rows to the probe's: their first tokens stay.

    So do pages lie after a real eviction: what is kept moves to the row's first slots. WINDOW rows
    have dropped what is out of sight already.
    """
    import torch

    from sparseengine.core.specs import LayerKind
    from sparseengine.core.view import Keep

    specs, cache = engine.intake.model.layers, engine.scheduler.cache
    cuts: dict[int, list[tuple[int, int]]] = {}  # (tokens kept, tokens held) of each row
    for layer, rows in like.row_lens.items():
        if specs[layer].kind is not LayerKind.WINDOW:
            held = cache.lens(request_id, layer)
            pairs = list(zip(rows, held if len(held) > 1 else held * len(rows), strict=True))
            cuts[layer] = pairs if len(set(pairs)) > 1 else pairs[:1]

    def first(kept: int, held: int) -> torch.Tensor:
        return torch.arange(held) < kept

    if all(kept == held for pairs in cuts.values() for kept, held in pairs):
        return []
    alike = {pair for pairs in cuts.values() for pair in pairs}
    if len(alike) == 1:
        return [Keep(request_id, None, (first(*alike.pop()),))]
    return [
        Keep(request_id, layer, tuple(first(*pair) for pair in pairs))
        for layer, pairs in cuts.items()
    ]
