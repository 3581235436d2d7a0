"""AsyncLLM and the pipe under it, without HTTP."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fixtures.servers import ENGINE
from sparseengine import AsyncLLM
from sparseengine.async_llm import Stream
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.engine.channel import Channel
from sparseengine.errors import CapacityError, ConfigError, RequestError, SparseEngineError
from sparseengine.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def opened(checkpoint: Path, **options: Any) -> AsyncLLM:
    return AsyncLLM(str(checkpoint), **{"in_process": True, **ENGINE, **options})


async def last(llm: AsyncLLM, *args: Any, **options: Any) -> Any:
    return [output async for output in llm.generate(*args, **options)][-1]


async def drained(stream: Stream) -> None:
    while await stream.next():
        pass


def test_outputs_equal_those_of_llm(checkpoint: Path) -> None:
    params = SamplingParams(
        n=2, seed=7, max_tokens=6, logprobs=2, prompt_logprobs=1, logit_bias={5: 2.0}
    )
    with LLM(str(checkpoint), quiet=True, **ENGINE) as llm:
        (wanted,) = llm.generate("the quick", params, use_tqdm=False)

    async def main() -> Any:
        async with opened(checkpoint) as llm:
            return await last(llm, "the quick", params)

    found = asyncio.run(main())
    assert found.finished
    assert found.prompt == "the quick"
    assert found.prompt_token_ids == wanted.prompt_token_ids
    assert found.prompt_logprobs == wanted.prompt_logprobs
    for a, b in zip(found.outputs, wanted.outputs, strict=True):
        assert (a.text, a.token_ids, a.logprobs) == (b.text, b.token_ids, b.logprobs)
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)


def test_a_process_of_its_own_answers_the_same(checkpoint: Path) -> None:
    async def main(in_process: bool) -> Any:
        async with opened(checkpoint, in_process=in_process) as llm:
            sparse = SparseParams("full", record=True)
            return await last(llm, [0, 5, 6, 7], GREEDY, sparse)

    inside, outside = asyncio.run(main(True)), asyncio.run(main(False))
    assert inside.outputs[0].token_ids == outside.outputs[0].token_ids
    assert len(outside.outputs[0].token_ids) == 8


def test_abort_leaving_and_unknown_ids(checkpoint: Path) -> None:
    async def main() -> None:
        async with opened(checkpoint) as llm:
            long = SamplingParams(max_tokens=200, ignore_eos=True)
            running = llm.generate("fox", long, request_id="mine")
            await anext(running)
            with pytest.raises(RequestError, match="in use"):
                await last(llm, "fox", GREEDY, request_id="mine")
            await llm.abort("mine")
            await llm.abort("mine")
            await llm.abort("unknown")
            rest = [output async for output in running]
            assert rest[-1].outputs[0].finish_reason == "abort"
            left = llm.generate("fox", long)
            await anext(left)
            await left.aclose()
            assert (await last(llm, "fox", GREEDY)).finished
            while llm.metrics.get("kv_cache_usage_perc", 1):
                await asyncio.sleep(0.05)

    asyncio.run(main())


def test_wrong_requests_raise_and_harm_nobody(checkpoint: Path) -> None:
    async def main() -> None:
        async with opened(checkpoint, num_gpu_blocks_override=8) as llm:
            for prompt, error in (
                ([], RequestError),
                ([999], RequestError),
                ([5] * 256, RequestError),
                ([5] * 200, CapacityError),
            ):
                with pytest.raises(error):
                    await last(llm, prompt, GREEDY)
            assert (await last(llm, "fox", GREEDY)).finished

    asyncio.run(main())


def test_starting_and_closing(checkpoint: Path) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="no_such"):
            async with opened(checkpoint, sparse_method="no_such"):
                pass
        llm = opened(checkpoint)
        with pytest.raises(SparseEngineError, match="not running"):
            llm.submit([[5]], GREEDY)
        await llm.start()
        waiting = llm.submit([[5]], SamplingParams(max_tokens=200, ignore_eos=True))
        await waiting.accepted()
        await llm.close()
        await llm.close()
        with pytest.raises(SparseEngineError, match="closed"):
            await drained(waiting)

    asyncio.run(main())


# ── the pipe ──────────────────────────────────────────────────────────────────────────────────────


def ends() -> tuple[Channel, Channel, list[Any], threading.Event]:
    a, b = multiprocessing.Pipe()
    got: list[Any] = []
    closed = threading.Event()
    left = Channel(a, lambda batch: None, lambda: None)
    right = Channel(b, got.extend, closed.set)
    return left, right, got, closed


def test_a_sender_never_waits_for_a_reader_that_does_not_read() -> None:
    left, right, got, closed = ends()
    left.start()
    start = time.monotonic()
    for i in range(200):
        left.send((i, b"x" * 100_000))  # far more than a pipe holds
    assert time.monotonic() - start < 5
    right.start()
    left.close(timeout=30)
    assert closed.wait(30)
    assert [i for i, _ in got] == list(range(200))


def test_frozen_mappings_travel_and_what_cannot_is_the_senders_error() -> None:
    left, right, got, closed = ends()
    left.start()
    right.start()
    params = SamplingParams(logit_bias={3: 1.0})
    sparse = SparseParams("full", record=True, knob=2)
    left.send((params, sparse, MappingProxyType({"a": 1})))
    with pytest.raises((AttributeError, TypeError)):
        left.send(lambda: None)
    left.close()
    assert closed.wait(10)
    assert got[0][0].logit_bias == {3: 1.0}
    assert got[0][1].knobs == {"knob": 2}
    assert got[0][2] == {"a": 1}
