"""`AsyncLLM`: an engine in a process of its own, asked from an event loop.

The engine's loop and the caller's share neither a process nor a lock: a caller that stalls costs
the engine nothing, and an engine in a long step leaves the caller responsive.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from sparseengine import env
from sparseengine.config import EngineConfig, config_from_kwargs
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.engine.channel import Channel
from sparseengine.engine.host import run_engine
from sparseengine.engine.messages import (
    Abort,
    Accepted,
    Add,
    Beat,
    Call,
    Delta,
    EngineInfo,
    Failed,
    News,
    Ready,
    Rejected,
    Reply,
    Stop,
)
from sparseengine.engine.outputs import CompletionOutput, RequestOutput
from sparseengine.errors import CapacityError, ConfigError, RequestError, SparseEngineError
from sparseengine.prompts import Prompts, default_sampling_params, salt_of
from sparseengine.weights.source import open_model


class EngineDeadError(SparseEngineError):
    """The engine's process is gone or its device is lost; nothing can be served any more."""


class Arrived(NamedTuple):
    """A delta, when its step ended (monotonic seconds), and which prompt of the stream it is of."""

    at: float
    prompt: int
    delta: Delta


class Stream:
    """The deltas of one or several prompts that were submitted together, as they come."""

    def __init__(self, keys: Sequence[int]) -> None:
        self.keys = {key: i for i, key in enumerate(keys)}
        self._pending = set(keys)
        self._unaccepted = set(keys)
        self._items: deque[Arrived] = deque()
        self._error: Exception | None = None
        self._event = asyncio.Event()

    def put(self, at: float, delta: Delta) -> None:
        self._items.append(Arrived(at, self.keys[delta.key], delta))
        if delta.is_last:
            self._pending.discard(delta.key)
        self._event.set()

    def accept(self, key: int) -> None:
        self._unaccepted.discard(key)
        self._event.set()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._event.set()

    async def accepted(self) -> None:
        """Wait until the engine has taken every prompt. Raises what it says against one."""
        while self._unaccepted and self._error is None:
            self._event.clear()
            await self._event.wait()
        if self._error is not None:
            raise self._error

    async def next(self) -> list[Arrived]:
        """What has come since the last call, at least one delta; [] when all is over."""
        while not self._items:
            if self._error is not None:
                raise self._error
            if not self._pending:
                return []
            self._event.clear()
            await self._event.wait()
        found = list(self._items)
        self._items.clear()
        return found


class AsyncLLM:
    """The asynchronous counterpart of `LLM`, with the same engine arguments.

        async with AsyncLLM("smollm2-135m") as llm:
            async for output in llm.generate("Hello", SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    Raises `ConfigError` at the start for what `LLM` raises it for. `in_process` runs the engine in
    a thread instead of a process (for tests: quicker to start, shares the interpreter).
    """

    def __init__(self, model: str = "", *, in_process: bool = False, **engine_args: Any) -> None:
        self._set_up(config_from_kwargs(model=model, **engine_args), in_process)

    @classmethod
    def from_config(cls, config: EngineConfig, *, in_process: bool = False) -> Self:
        llm = cls.__new__(cls)
        llm._set_up(config, in_process)
        return llm

    def _set_up(self, config: EngineConfig, in_process: bool) -> None:
        self.config = config
        self.in_process = in_process
        self.metrics: dict[str, float] = {}
        self.freed_bytes: dict[str, float] = {}
        self.last_beat = time.monotonic()
        self.on_delta: Callable[[float, Delta], None] | None = None
        self._keys = itertools.count()
        self._streams: dict[int, Stream] = {}
        self._named: dict[str, int] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._info: EngineInfo | None = None
        self._dead: EngineDeadError | None = None
        self._closing = False
        self._channel: Channel | None = None
        self._process: Any = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            News: self._on_news,
            Beat: self._on_beat,
            Accepted: self._on_accepted,
            Rejected: self._reject,
            Reply: self._answer,
            Ready: self._on_ready,
            Failed: self._failed,
        }

    # ── life cycle ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Start the engine and wait until it serves."""
        if self._channel is not None:
            return
        source = open_model(self.config.model)
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        ours, theirs = multiprocessing.Pipe()
        self._channel = Channel(ours, self._from_engine, self._engine_gone)
        env.bound_kernel_caches()
        context = multiprocessing.get_context("spawn")  # a fork would share threads and CUDA
        make: Any = threading.Thread if self.in_process else context.Process
        self._process = make(
            target=run_engine,
            args=(theirs, self.config),
            kwargs={"own_process": not self.in_process},
            name="sparseengine-engine",
            daemon=True,
        )
        self._process.start()
        if not self.in_process:
            theirs.close()
        self._channel.start()
        tokenizer = await asyncio.to_thread(source.load_tokenizer)
        self.prompts = Prompts(tokenizer, source.name)
        self.generation_config = source.generation_config
        self._info = await self._ready
        self.last_beat = time.monotonic()

    async def close(self) -> None:
        """Stop the engine and give the memory back; calling it again does nothing."""
        if self._channel is None or self._closing:
            return
        self._closing = True
        self._channel.send(Stop())
        await asyncio.to_thread(self._process.join, 10)
        if not self.in_process and self._process.is_alive():
            self._process.kill()
        await asyncio.to_thread(self._channel.close)
        self._fail_all(EngineDeadError("the engine is closed"))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def info(self) -> EngineInfo:
        """What the engine serves."""
        if self._info is None:
            raise SparseEngineError("this AsyncLLM is not started; use `async with` or start()")
        return self._info

    @property
    def beat_age(self) -> float:
        """Seconds since the engine's loop last went round."""
        return time.monotonic() - self.last_beat

    @property
    def error(self) -> EngineDeadError | None:
        """Why nothing can be served any more."""
        return self._dead

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    # ── requests ──────────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        sparse: SparseParams | None = None,
        *,
        cache_salt: str = "",
    ) -> Stream:
        """Send prompts (token ids) to the engine; its checks answer through the stream."""
        if self._dead is not None:
            raise self._dead
        channel = self._live()
        stream = Stream([next(self._keys) for _ in prompts])
        for key, ids in zip(stream.keys, prompts, strict=True):
            self._streams[key] = stream
            array = np.asarray(ids, dtype=np.int64)
            channel.send(Add(key, array, sampling, sparse, cache_salt))
        return stream

    def cancel(self, stream: Stream) -> None:
        """End what still runs of a stream whose caller is gone."""
        for key in stream.keys:
            if self._streams.pop(key, None) is not None and self._channel is not None:
                self._channel.send(Abort(key))

    async def generate(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        sparse_params: SparseParams | None = None,
        *,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt: its (cumulative) output after every step that adds to it.

        Leaving the iterator early, and `abort(request_id)` from elsewhere, end the request. Raises
        `RequestError` for a wrong prompt or parameter.
        """
        text, ids = await self.tokens_of(prompt)
        if request_id is not None and request_id in self._named:
            raise RequestError(f"request_id={request_id!r} is in use by a request that still runs")
        params = sampling_params or default_sampling_params(self.generation_config)
        stream = self.submit([ids], params, sparse_params, cache_salt=salt_of(prompt))
        (key,) = stream.keys
        name = str(key) if request_id is None else request_id
        self._named[name] = key
        output = RequestOutput(
            request_id=name,
            prompt=text,
            prompt_token_ids=list(ids),
            outputs=[CompletionOutput(index=i) for i in range(params.n)],
        )
        try:
            while news := await stream.next():
                for arrived in news:
                    _extend(output, arrived.delta)
                yield output
        finally:
            self._named.pop(name, None)
            self.cancel(stream)

    async def abort(self, request_id: str) -> None:
        """End the request with this id; its output finishes with "abort". Unknown ids are fine."""
        key = self._named.get(request_id)
        if key is not None:
            self._live().send(Abort(key))

    async def tokens_of(
        self, prompt: str | Sequence[int] | Mapping[str, Any]
    ) -> tuple[str | None, Sequence[int]]:
        """(text if there is one, token ids); long texts are encoded beside the event loop."""
        if isinstance(prompt, Mapping):
            ids = prompt.get("prompt_token_ids")
            if ids is not None:
                return prompt.get("prompt"), list(ids)
            prompt = prompt.get("prompt", "")
        if isinstance(prompt, str):
            if len(prompt) < 2000:
                return prompt, self.prompts.encode(prompt)
            return prompt, await asyncio.to_thread(self.prompts.encode, prompt)
        return None, list(prompt)

    async def call(self, name: str) -> Any:
        """Run one of the engine's named actions between two steps: "reset_prefix_cache"."""
        if self._dead is not None:
            raise self._dead
        future = asyncio.get_running_loop().create_future()
        key = next(self._keys)
        self._replies[key] = future
        self._live().send(Call(key, name))
        return await future

    async def reset_prefix_cache(self) -> bool:
        return bool(await self.call("reset_prefix_cache"))

    # ── from the engine ───────────────────────────────────────────────────────────────────────────

    def _live(self) -> Channel:
        if self._channel is None or self._closing:
            raise SparseEngineError("this AsyncLLM is not running; use `async with` or start()")
        return self._channel

    def _from_engine(self, batch: list[Any]) -> None:
        """In the channel's thread."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, batch)
        except RuntimeError:  # the event loop is closed: nobody is left to tell
            return

    def _engine_gone(self) -> None:
        self._from_engine([Failed("the engine's process has ended", False)])

    def _dispatch(self, batch: list[Any]) -> None:
        self.last_beat = time.monotonic()
        for message in batch:
            self._handlers[type(message)](message)

    def _on_news(self, message: News) -> None:
        for delta in message.deltas:
            if self.on_delta is not None:
                self.on_delta(message.at, delta)
            stream = self._streams.get(delta.key)
            if stream is not None:  # None: aborted meanwhile
                stream.put(message.at, delta)
                if delta.is_last:
                    del self._streams[delta.key]

    def _on_beat(self, message: Beat) -> None:
        self.metrics, self.freed_bytes = message.metrics, message.methods

    def _on_accepted(self, message: Accepted) -> None:
        if message.key in self._streams:
            self._streams[message.key].accept(message.key)

    def _on_ready(self, message: Ready) -> None:
        self._ready.set_result(message.info)

    def _reject(self, message: Rejected) -> None:
        stream = self._streams.pop(message.key, None)
        if stream is None:
            return
        if message.kind == "capacity":
            stream.fail(CapacityError(message.message, needed=0, available=0))
        elif message.kind == "request":
            stream.fail(RequestError(message.message, param=message.param))
        else:
            stream.fail(SparseEngineError(message.message))

    def _answer(self, message: Reply) -> None:
        future = self._replies.pop(message.key)
        if future.done():
            return
        if message.error is None:
            future.set_result(message.value)
        else:
            future.set_exception(SparseEngineError(message.error))

    def _failed(self, message: Failed) -> None:
        if not self._ready.done():
            kind = ConfigError if message.is_config else EngineDeadError
            self._ready.set_exception(kind(message.message))
        if self._dead is None and not self._closing:
            self._dead = EngineDeadError(message.message)
            self._fail_all(self._dead)

    def _fail_all(self, error: EngineDeadError) -> None:
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)
        self._replies.clear()


def _extend(output: RequestOutput, delta: Delta) -> None:
    """Add a delta to a cumulative output."""
    completion = output.outputs[delta.choice]
    completion.text += delta.text
    completion.token_ids += delta.token_ids
    if delta.logprobs:
        completion.logprobs = [*(completion.logprobs or ()), *delta.logprobs]
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = delta.prompt_logprobs
    if delta.sparse is not None:
        completion.sparse = delta.sparse.added_to(completion.sparse)
    if delta.finish_reason is not None:
        completion.finish_reason = delta.finish_reason
        completion.stop_reason = delta.stop_reason
    if delta.is_last:
        output.finished = True
        output.num_cached_tokens = delta.num_cached_tokens
        output.cache_miss = delta.cache_miss
        output.metrics = delta.metrics
