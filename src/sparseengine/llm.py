"""The offline API: `LLM(model).generate(prompts, SamplingParams(...), SparseParams(...))`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from sparseengine.config import EngineConfig, config_from_kwargs
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.engine.build import build_engine
from sparseengine.engine.engine import Engine
from sparseengine.engine.intake import Submission
from sparseengine.engine.outputs import RequestOutput
from sparseengine.engine.structured import result_of
from sparseengine.errors import RequestError, SparseEngineError
from sparseengine.prompts import Message, Prompts, default_sampling_params, salt_of
from sparseengine.resolve import explain, resolve

Prompt = str | Sequence[int] | Mapping[str, Any]
_P = TypeVar("_P")


class LLM:
    """A model that answers prompts in batches. Engine arguments carry vLLM's names, plus
    `sparse_method`, `kv_budget`, `sparse_config`, `enable_methods`, `sparse_prefill` and
    `sparse_prefill_config` (see docs/reference/config.md).

    The start-up memory table goes to stderr unless `quiet`. Close it, or use it as a context
    manager, to give the memory back. Raises `ConfigError` for wrong arguments and damaged models.
    """

    def __init__(self, model: str = "", *, quiet: bool = False, **engine_args: Any) -> None:
        self._start(config_from_kwargs(model=model, **engine_args), quiet)

    @classmethod
    def from_config(cls, config: EngineConfig, *, quiet: bool = False) -> Self:
        """The same from a whole configuration."""
        llm = cls.__new__(cls)
        llm._start(config, quiet)
        return llm

    def _start(self, config: EngineConfig, quiet: bool) -> None:
        self._engine: Engine | None = None
        self.resolved = resolve(config)
        self._engine, self.tokenizer, self.memory = build_engine(self.resolved)
        self._prompts = Prompts(self.tokenizer, self.resolved.source.name)
        if not quiet:
            print(self.memory.render(), file=sys.stderr)

    # ── generating ────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        sparse_params: SparseParams | Sequence[SparseParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the order of the prompts.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}; with
        "cache_salt" beside it, stored prefixes are shared with prompts of the same salt only. One
        SamplingParams or SparseParams serves all prompts, a list gives each its own. A bad prompt
        or parameter raises `RequestError` before anything runs.
        """
        texts = _as_list(prompts)
        submissions = self._prepare(texts, sampling_params, sparse_params)
        return self._run(submissions, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        sparse_params: SparseParams | Sequence[SparseParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the tokenizer's chat template."""
        is_many = bool(messages) and not isinstance(messages[0], Mapping)
        many = list(messages) if is_many else [messages]
        prompts: list[Prompt] = []
        for conversation in many:
            text = self.render_chat(
                conversation,  # type: ignore[arg-type]
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
            )
            ids = self._prompts.encode_chat(text)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self._run(self._prepare(prompts, sampling_params, sparse_params), use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        sparse_params: SparseParams | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt and yield its (cumulative) output after every step that adds to it.

        Leaving the iterator early aborts the request.
        """
        engine = self._live()
        submission = self._prepare([prompt], sampling_params, sparse_params, stream=True)[0]
        engine.submit(submission)
        finished = False
        try:
            while not finished:
                for output in engine.step():
                    if output.request_id == submission.request_id:
                        finished = output.finished
                        yield output
        finally:
            if not finished:
                self._abort([submission])

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        sparse_params: SparseParams | None = None,
    ) -> Iterator[RequestOutput]:
        """`stream` for one conversation."""
        text = self.render_chat(messages)
        prompt = {"prompt": text, "prompt_token_ids": self._prompts.encode_chat(text)}
        return self.stream(prompt, sampling_params, sparse_params)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of a conversation. Raises `RequestError` without a chat template."""
        self._live()
        return self._prompts.render_chat(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
        )

    def default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` means: the model's generation_config over the defaults."""
        return default_sampling_params(self.resolved.source.generation_config)

    # ── state ─────────────────────────────────────────────────────────────────────────────────────

    def get_metrics(self) -> dict[str, float]:
        """Counters and gauges of the engine, under vLLM's names."""
        return self._live().metrics()

    def explain(self, *, prompt_len: int | None = None, max_tokens: int = 128) -> dict[str, Any]:
        """Every resolved value with its source, the routes with their reasons, the memory table."""
        found = explain(self.resolved, prompt_len=prompt_len, max_tokens=max_tokens)
        return {**found, "memory": self.memory.to_dict()}

    @property
    def engine(self) -> Engine:
        """The engine behind this object, to drive it step by step."""
        return self._live()

    def close(self) -> None:
        """Give the memory back; calling it again does nothing."""
        if self._engine is None:
            return
        self._engine = None
        if self.resolved.device.type == "cuda":
            gc.collect()  # captured graphs and what they hold refer to each other
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ── details ───────────────────────────────────────────────────────────────────────────────────

    def _live(self) -> Engine:
        if self._engine is None:
            raise SparseEngineError("this LLM is closed; make a new one")
        return self._engine

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        sparse: SparseParams | Sequence[SparseParams] | None,
        *,
        stream: bool = False,
    ) -> list[Submission]:
        engine = self._live()
        params = _per_prompt(sampling or self.default_sampling_params(), prompts, "sampling_params")
        methods = _per_prompt(sparse, prompts, "sparse_params")
        specs = [p.structured_outputs for p in params if p.structured_outputs is not None]
        for grammar in [engine.intake.grammars.start(spec) for spec in specs]:
            result_of(grammar)
        found = []
        for prompt, p, s in zip(prompts, params, methods, strict=True):
            text, ids = self._tokens(prompt)
            salt = salt_of(prompt)
            found.append(engine.prepare(ids, p, s, prompt=text, stream=stream, cache_salt=salt))
        return found

    def reset_prefix_cache(self) -> bool:
        """Forget the KV kept of finished requests."""
        return self._live().reset_prefix_cache()

    def _tokens(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """(text if there is one, token ids)."""
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is not None:
                return text, list(ids)
            if text is None:
                keys = sorted(map(str, prompt))
                raise RequestError(
                    f"a prompt with the keys {keys} is not allowed; it needs 'prompt' or "
                    "'prompt_token_ids'"
                )
            prompt = text
        if isinstance(prompt, str):
            return prompt, self._prompts.encode(prompt)
        if not isinstance(prompt, Sequence):
            raise RequestError(
                f"a prompt of type {type(prompt).__name__} is not allowed; give text or token ids"
            )
        ids = [*prompt]
        return None, ids

    def _run(self, submissions: Sequence[Submission], use_tqdm: bool) -> list[RequestOutput]:
        """Drive the engine until these requests have ended; aborts them when interrupted."""
        engine = self._live()
        for submission in submissions:
            engine.submit(submission)
        waiting = {s.request_id for s in submissions}
        found: dict[str, RequestOutput] = {}
        bar = _progress(len(submissions)) if use_tqdm else None
        try:
            while waiting:
                for output in engine.step():
                    if output.finished and output.request_id in waiting:
                        waiting.remove(output.request_id)
                        found[output.request_id] = output
                        if bar is not None:
                            bar.update()
        finally:
            if bar is not None:
                bar.close()
            self._abort([s for s in submissions if s.request_id in waiting])
        return [found[s.request_id] for s in submissions]

    def _abort(self, submissions: Sequence[Submission]) -> None:
        """End requests whose caller is gone, and discard what they had."""
        engine = self._engine
        if engine is not None and submissions:
            for submission in submissions:
                engine.abort(submission.request_id)
            engine.discard()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts of type {type(prompts).__name__} are not allowed; give a text, token ids, or "
            "a list of them"
        )
    if prompts and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _per_prompt(given: _P | Sequence[_P], prompts: Sequence[Prompt], name: str) -> Sequence[_P]:
    """One value for all prompts, or a list with one for each."""
    if not isinstance(given, Sequence):
        return [given] * len(prompts)
    if len(given) != len(prompts):
        raise RequestError(
            f"{name} has {len(given)} entries for {len(prompts)} prompts; give one for each, or a "
            "single one for all"
        )
    return given


def _progress(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="prompts", dynamic_ncols=True)
