"""The engine's own loop: takes messages, steps, sends what came of it. Never waits for its owner.

It runs in a process of its own (`run_engine`), so that nothing its owner does takes time from a
step; tests may run it in a thread.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

import torch

from sparseengine.config import EngineConfig
from sparseengine.engine.admission import Ticket
from sparseengine.engine.build import build_engine
from sparseengine.engine.channel import Channel
from sparseengine.engine.engine import Engine
from sparseengine.engine.faults import attempt, describe, is_fatal, isolated_step
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
from sparseengine.engine.outputs import RequestOutput
from sparseengine.engine.record import RecordReader, token_bytes
from sparseengine.errors import CapacityError, ConfigError, RequestError
from sparseengine.resolve import Resolved, explain, resolve

BEAT_S = 0.25  # how often the owner hears that the loop goes round
_USAGE_S = 2.0  # how often the rows' bytes are added up
_log = logging.getLogger("sparseengine.engine")


class EngineHost:
    """Drives one engine from the messages of a channel."""

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self.engine = engine
        self._inbox: SimpleQueue[list[Any]] = SimpleQueue()
        self._channel = Channel(connection, self._inbox.put, lambda: self._inbox.put([Stop()]))
        self._sent: dict[str, list[tuple[int, int]]] = {}  # tokens and characters already sent
        self._keys: dict[str, int] = {}
        self._methods: dict[str, str] = {}
        self._readers: dict[tuple[str, int], RecordReader] = {}  # of requests that record
        self._unaccepted: set[str] = set()
        self._scored: set[str] = set()  # their prompt's log-probabilities are out
        self._stopping = False
        self._next_beat = 0.0
        self._next_usage = 0.0
        self._usage: dict[str, float] = {}
        self._freed: Counter[str] = Counter()
        self._token_bytes = token_bytes(engine.controller.model)

    def run(self, info: EngineInfo) -> None:
        """Serve until told to stop or the owner is gone."""
        self._channel.start()
        self._channel.send(Ready(info))
        try:
            while not self._stopping:
                self._take_messages()
                if self.engine.has_work:
                    self._send(isolated_step(self.engine))
                self._beat()
        except Exception as error:  # the device is lost
            self._channel.send(Failed(describe(error), False))
            raise
        finally:
            self._channel.close()

    # ── messages ──────────────────────────────────────────────────────────────────────────────────

    def _take_messages(self) -> None:
        try:
            if not self.engine.has_work:
                self._handle_all(self._inbox.get(timeout=BEAT_S))
            while True:
                self._handle_all(self._inbox.get_nowait())
        except Empty:
            pass

    def _handle_all(self, batch: list[Any]) -> None:
        for message in batch:
            if isinstance(message, Add):
                self._add(message)
            elif isinstance(message, Abort):
                attempt(lambda m=message: self.engine.abort(str(m.key)))  # type: ignore[misc]
            elif isinstance(message, Call):
                self._call(message)
            elif isinstance(message, Stop):
                self._stopping = True

    def _add(self, message: Add) -> None:
        key = str(message.key)
        param: str | None = None
        try:
            param = "sparse"
            if message.sparse is not None:
                methods = self.engine.intake.methods
                methods.resolve(message.sparse, message.tokens.size)
                methods.resolve_prefill(message.sparse)
            param = None
            self.engine.add_request(
                message.tokens.tolist(),
                message.sampling,
                message.sparse,
                request_id=key,
                stream=True,
                cache_salt=message.cache_salt,
            )
        except CapacityError as error:
            self._channel.send(Rejected(message.key, str(error), "capacity"))
        except (RequestError, ConfigError) as error:
            self._channel.send(Rejected(message.key, str(error), "request", param))
        except Exception as error:
            if is_fatal(error):
                raise
            _log.exception("a request could not be queued")
            self._channel.send(Rejected(message.key, describe(error), "error"))
        else:
            self._unaccepted.add(key)
            self._keys[key] = message.key
            self._methods[key] = (message.sparse or self.engine.intake.methods.default).method
            self._sent[key] = [(0, 0)] * message.sampling.n
            self._accept([])

    def _call(self, message: Call) -> None:
        actions = {"reset_prefix_cache": self._reset_prefix_cache}
        if message.name not in actions:
            self._channel.send(Reply(message.key, None, f"unknown action {message.name!r}"))
            return
        self._channel.send(Reply(message.key, actions[message.name](), None))

    def _reset_prefix_cache(self) -> bool:
        """Drop cached prefixes; true as well when there are none."""
        return self.engine.reset_prefix_cache()

    # ── news ──────────────────────────────────────────────────────────────────────────────────────

    def _accept(self, outputs: list[RequestOutput]) -> None:
        """Tell the owner which requests are queued: those with a grammar once it is compiled."""
        failed = {o.request_id: o for o in outputs if _failed_early(o)}
        for key in [k for k in self._unaccepted if not self.engine.is_compiling(k)]:
            self._unaccepted.remove(key)
            output = failed.get(key)
            if output is None:
                self._channel.send(Accepted(self._keys[key]))
            else:
                reason = str(output.outputs[0].stop_reason)
                self._channel.send(Rejected(self._keys[key], reason, "request"))

    def _send(self, outputs: list[RequestOutput]) -> None:
        if self._unaccepted:
            self._accept(outputs)
        deltas: list[Delta] = []
        for output in outputs:
            deltas.extend(self._deltas(output))
        if deltas:
            self._channel.send(News(time.monotonic(), deltas))

    def _deltas(self, output: RequestOutput) -> list[Delta]:
        found: list[Delta] = []
        key, sent = self._keys[output.request_id], self._sent[output.request_id]
        for i, completion in enumerate(output.outputs):
            tokens, chars = sent[i]
            if tokens < 0:  # its last delta is out
                continue
            new = completion.token_ids[tokens:]
            finish = completion.finish_reason
            if not new and finish is None:
                continue
            sent[i] = (len(completion.token_ids), len(completion.text)) if not finish else (-1, 0)
            logprobs, record = completion.logprobs, completion.sparse
            at = (output.request_id, i)
            if record is not None:
                record = self._readers.setdefault(at, RecordReader()).news(record)
            delta = Delta(
                key,
                completion.index,
                completion.text[chars:],
                new,
                logprobs[tokens:] if logprobs else None,
                finish,
                completion.stop_reason,
                sparse=record,
            )
            found.append(delta)
            if finish:
                self._readers.pop(at, None)
        if found and output.prompt_logprobs and output.request_id not in self._scored:
            self._scored.add(output.request_id)
            found[0] = found[0]._replace(prompt_logprobs=output.prompt_logprobs)
        if output.finished:
            self._scored.discard(output.request_id)
            last = found.pop() if found else Delta(key, len(sent) - 1, "", [])
            found.append(
                last._replace(
                    num_cached_tokens=output.num_cached_tokens,
                    cache_miss=output.cache_miss,
                    metrics=output.metrics,
                    is_last=True,
                )
            )
            self._note_freed(output)
            del self._keys[output.request_id], self._sent[output.request_id]
        return found

    def _note_freed(self, output: RequestOutput) -> None:
        metrics = output.metrics
        if metrics is not None:
            method = self._methods.pop(output.request_id, "")
            self._freed[method] += max(0, metrics.dense_kv_bytes - metrics.kv_bytes)

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT_S
        if now >= self._next_usage:
            self._next_usage = now + _USAGE_S
            self._usage = self._rows_now()
        self._channel.send(Beat({**self.engine.metrics(), **self._usage}, dict(self._freed)))

    def _rows_now(self) -> dict[str, float]:
        """Tokens that the running requests stand for, what their rows hold and a step reads."""
        scheduler = self.engine.scheduler
        running = list(scheduler.running.values())
        held = [scheduler.cache.usage(t.request.id).bytes for t in running]
        read = [n * _read_share(t) for t, n in zip(running, held, strict=True) if t.decodes]
        return {
            "kv_tokens_logical": sum(t.request.computed for t in running),
            "kv_tokens_resident": sum(held) // max(1, self._token_bytes),
            "kv_bytes_read_per_step": float(int(sum(read))),
        }


def _read_share(ticket: Ticket) -> float:
    """How much of its rows a decode reads, by length and budget: device code decides the rest.

    One that weighs digests reads the keys, half of a row, a second time.
    """
    budget = ticket.request.budget
    if ticket.request.sparse.digests:
        return 1.5
    if budget is None or ticket.method.traits.takes != "read":
        return 1.0
    return min(1.0, budget / max(1, ticket.request.computed))


def _failed_early(output: RequestOutput) -> bool:
    """Ended before it was queued: its grammar cannot be compiled."""
    return output.finished and all(
        c.finish_reason == "error" and not c.token_ids for c in output.outputs
    )


def engine_info(resolved: Resolved, memory: Any) -> EngineInfo:
    config = resolved.config
    return EngineInfo(
        model=resolved.source.name,
        max_model_len=resolved.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_logprobs=config.runtime.max_logprobs,
        vocab_size=resolved.spec.vocab_size,
        methods=resolved.methods,
        prefill=resolved.sparse.prefill,
        prefill_config=dict(resolved.sparse.prefill_config),
        device=str(resolved.device),
        memory=memory.to_dict(),
        memory_text=memory.render(),
        explained=explain(resolved),
    )


def run_engine(connection: Connection, config: EngineConfig, *, own_process: bool = True) -> None:
    """Build the engine and serve its owner: the target of the engine's process or thread.

    Ctrl-C and SIGTERM are the owner's business; when it is gone, this ends, too.
    """
    if own_process:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        resolved = resolve(config)
        engine, _, memory = build_engine(resolved)
        info = engine_info(resolved, memory)
    except ConfigError as error:
        _fail(connection, str(error), is_config=True)
        return
    except Exception as error:
        _fail(connection, describe(error), is_config=False)
        raise
    with torch.no_grad():
        EngineHost(engine, connection).run(info)


def _fail(connection: Connection, message: str, *, is_config: bool) -> None:
    channel = Channel(connection, lambda batch: None, lambda: None)
    channel.start()
    channel.send(Failed(message, is_config))
    channel.close()
