"""Between the routes and the engine: admission, limits, parameters, prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request

from sparseengine.async_llm import AsyncLLM, Stream
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.errors import RequestError
from sparseengine.prompts import Prompts, default_sampling
from sparseengine.server.errors import ApiError, as_api_error, retry_later
from sparseengine.server.metrics import Metrics
from sparseengine.server.records import Record
from sparseengine.server.schemas import SparseFields
from sparseengine.server.settings import ServerSettings
from sparseengine.server.tracing import Tracer

_INLINE_CHARS = 2000  # longer texts are encoded beside the event loop
_TEMPLATE_OWN = {
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "name",
}


class Service:
    """One engine, as the routes see it. `capacity` counts completions that run or wait."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.info = llm.info
        self.names = settings.served_model_names or (self.info.model,)
        tokenizer = llm.prompts.tokenizer
        self.prompts = Prompts(tokenizer, self.info.model, settings.chat_template)
        self.metrics = Metrics(self.names[0], llm)
        endpoint = settings.otlp_traces_endpoint
        self.tracer = None if endpoint is None else Tracer.to(endpoint)
        self.created = int(time.time())
        self.capacity = self.info.max_num_seqs + settings.max_queue
        self.in_flight = 0
        self.draining = False
        self.defaults = default_sampling(llm.generation_config)
        vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
        self._longest_token = max(map(len, vocabulary), default=1)

    # ── models and prompts ────────────────────────────────────────────────────────────────────────

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises 404 for one that is not served."""
        if name is None or name in self.names:
            return name or self.names[0]
        raise ApiError(
            404,
            f"the model {name[:200]!r} is not served here; this server has {', '.join(self.names)}",
            param="model",
            code="model_not_found",
        )

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text. Raises 400 for one that cannot fit, without encoding it."""
        if not text:
            raise ApiError(400, "the prompt is empty; it must hold at least one token")
        if len(text) > self.info.max_model_len * self._longest_token:
            least = -(-len(text) // self._longest_token)
            raise self._too_long(f"at least {least}", None)
        action = self.prompts.encode if special else self._encode_bare
        if len(text) <= _INLINE_CHARS:
            return action(text)
        return await asyncio.to_thread(action, text)

    def _encode_bare(self, text: str) -> list[int]:
        return list(self.prompts.tokenizer.encode(text, add_special_tokens=False))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> tuple[str, list[int]]:
        """(rendered text, token ids) of a conversation."""
        own = set(options.get("template_kwargs") or ()) & _TEMPLATE_OWN
        if own:
            raise ApiError(
                400,
                f"chat_template_kwargs must not hold {sorted(own)[0]!r}",
                param="chat_template_kwargs",
            )
        extra = options.pop("template_kwargs", None) or {}
        text = self.prompts.render_chat(messages, **options, **extra)
        if len(text) > self.info.max_model_len * self._longest_token:
            raise self._too_long(f"at least {-(-len(text) // self._longest_token)}", None)
        if len(text) <= _INLINE_CHARS:
            return text, self.prompts.encode_chat(text)
        return text, await asyncio.to_thread(self.prompts.encode_chat, text)

    def check_length(self, num_tokens: int, max_tokens: int | None) -> None:
        """The prompt, and the output if the client asked for a length, must fit."""
        limit = self.info.max_model_len
        if num_tokens >= limit or num_tokens + (max_tokens or 0) > limit:
            raise self._too_long(str(num_tokens), max_tokens)

    def _too_long(self, num_tokens: str, max_tokens: int | None) -> ApiError:
        limit = self.info.max_model_len
        asked = "" if max_tokens is None else f" and max_tokens={max_tokens} is asked for"
        return ApiError(
            400,
            f"the prompt has {num_tokens} tokens{asked}, but the maximum context length of this "
            f"server is {limit} tokens for both together (--max-model-len); shorten the prompt or "
            "lower max_tokens",
            param="messages" if max_tokens is None else "max_tokens",
            code="context_length_exceeded",
        )

    # ── parameters ────────────────────────────────────────────────────────────────────────────────

    def sampling(self, given: Mapping[str, Any], *, as_many_as_fit: bool = False) -> SamplingParams:
        """SamplingParams from fields; None falls back to the model's suggestion. Raises 400.

        as_many_as_fit: what an output without a length means, instead of SamplingParams' default.
        """
        values = {**self.defaults, **{k: v for k, v in given.items() if v is not None}}
        if as_many_as_fit:
            values.setdefault("max_tokens", None)
        n = values.get("n", 1)
        if not 1 <= n <= self.settings.max_n:
            raise ApiError(
                400, f"n={n} is not allowed; it must be in [1, {self.settings.max_n}]", param="n"
            )
        stop = values.get("stop", ())
        if not isinstance(stop, str) and len(stop) > self.settings.max_stop:
            raise ApiError(
                400,
                f"stop has {len(stop)} entries; at most {self.settings.max_stop} are allowed",
                param="stop",
            )
        most = self.info.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            if not 0 <= (values.get(name) or 0) <= most:
                raise ApiError(
                    400,
                    f"{name}={values[name]} is not allowed; it must be in [0, {most}]",
                    param=name,
                )
        try:
            bias = values.get("logit_bias")
            if bias is not None:
                values["logit_bias"] = _token_keys(bias)
            for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
                if name in values:
                    values[name] = tuple(values[name])
            return SamplingParams(**values)
        except RequestError as error:
            raise as_api_error(error) from None

    def sparse(self, given: SparseFields | None) -> SparseParams | None:
        if given is None:
            return None
        knobs = dict(given.model_extra or {})
        knobs |= given.model_dump(exclude={"method", *knobs})
        method = given.method or self.info.methods[0]
        if "prefill" not in knobs:
            knobs["prefill"] = self.info.prefill
            knobs.setdefault("prefill_config", self.info.prefill_config)
        try:
            return SparseParams(method, **knobs)
        except (RequestError, TypeError) as error:
            raise ApiError(400, f"sparse: {error}", param="sparse") from None

    # ── running ───────────────────────────────────────────────────────────────────────────────────

    def check_room(self, count: int) -> None:
        """Raises 400 for more completions than ever fit, 429 when the queue is full now."""
        if count > self.capacity:
            raise ApiError(
                400,
                f"{count} completions are more than run and wait here at once ({self.capacity}; "
                "--max-num-seqs, --max-queue); send fewer prompts or a smaller n",
            )
        if self.draining:
            raise retry_later(503, "the server is shutting down", 5)
        if self.in_flight + count > self.capacity:
            raise retry_later(
                429, f"{self.in_flight} completions run or wait, as many as the server takes"
            )

    @asynccontextmanager
    async def running(
        self,
        record: Record,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        sparse: SparseParams | None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[Stream]:
        """A stream of deltas that ends, whatever happens, when the block is left.

        Stored prefixes are shared within one API key and one salt.
        """
        count = len(prompts) * sampling.n
        self.check_room(count)
        record.begin(prompts, sampling, sparse, self.info.methods[0])
        salt = f"{record.tenant}:{cache_salt or ''}"
        stream = self.llm.submit(prompts, sampling, sparse, cache_salt=salt)
        self.in_flight += count
        try:
            for key, ids in zip(stream.keys, prompts, strict=True):
                self.metrics.started(key, len(ids))
            await stream.accepted()
            yield stream
        except RequestError as error:
            raise as_api_error(error) from None
        finally:
            self.in_flight -= count
            self.llm.cancel(stream)
            for key in stream.keys:
                self.metrics.dropped(key)


def _token_keys(bias: Mapping[str, float]) -> dict[int, float]:
    found = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise ApiError(
                400, f"logit_bias holds {key[:40]!r}; keys are token ids", param="logit_bias"
            )
        found[int(key)] = value
    return found


def record_of(request: Request) -> Record:
    """The access record of a request."""
    found: Record = request.state.record
    return found
