"""What requests may hold, as pydantic models. Ranges are checked by SamplingParams, not here.

A field that has no effect here is listed in one of the `_NoEffect` bases, with the reason; anything
else that is not known is refused, so that no meaning is lost silently.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Json = dict[str, Any]
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class SparseFields(BaseModel):
    """`extra_body: {"sparse": ...}`: fields of `SparseParams`; the rest are the method's knobs."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    method: str | None = None
    budget: Int64 | None = None
    ratio: float | None = None
    record: bool = False
    kv_error: float | None = None
    dropped_mass: bool = False
    compensate: bool = False
    save_prefix: bool = False


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # no padding is ever added


class _NoEffect(Body):
    """For the caller's own bookkeeping, or a switch whose only supported state is the default."""

    user: str | None = None
    metadata: Json | None = None
    request_id: str | None = None  # ids are made by the server; a client's is only logged
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    priority: Literal[0] = 0
    use_beam_search: Literal[False] = False
    length_penalty: Literal[1, 1.0] = 1.0
    early_stopping: Literal[False] = False


class SamplingFields(_NoEffect):
    """Fields of both OpenAI endpoints; None takes the model's or the server's default."""

    model: str | None = None
    max_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    n: Int64 = 1
    cache_salt: str | None = None  # stored prefixes are shared within one salt only
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: Int64 | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    allowed_token_ids: list[Int64] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int64 | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    add_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    response_format: Json | None = None
    structured_outputs: Json | None = None
    sparse: SparseFields | None = None


class CompletionBody(SamplingFields):
    """POST /v1/completions"""

    prompt: str | list[str] | list[Int64] | list[list[Int64]]
    echo: bool = False
    logprobs: Int64 | None = None
    best_of: Int64 | None = None
    suffix: Literal[""] | None = None


class ChatBody(SamplingFields):
    """POST /v1/chat/completions"""

    messages: list[Json]
    max_completion_tokens: Int64 | None = None
    logprobs: bool = False
    top_logprobs: Int64 | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool = True
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Json | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    echo: Literal[False] = False
    store: Literal[False] = False
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesText(Body):
    format: Json | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesReasoning(Body):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesBody(Body):
    """POST /v1/responses. Nothing is stored: `store` and `previous_response_id` are refused."""

    model: str | None = None
    input: str | list[Json]
    instructions: str | None = None
    cache_salt: str | None = None  # stored prefixes are shared within one salt only
    max_output_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int64 | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool = True
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: Literal[False] = False
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    seed: Int64 | None = None
    top_k: Int64 | None = None
    stop: str | list[str] | None = None
    sparse: SparseFields | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int64 | None = None
    display: str | None = None


class MessagesBody(Body):
    """POST /v1/messages, Anthropic's format"""

    model: str | None = None
    messages: list[Json]
    max_tokens: Int64
    system: str | list[Json] | None = None
    cache_salt: str | None = None  # stored prefixes are shared within one salt only
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Thinking | None = None
    metadata: Json | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    sparse: SparseFields | None = None


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens"""

    model: str | None = None
    messages: list[Json]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Thinking | None = None


class TokenizeBody(Body):
    """POST /tokenize: `prompt`, or `messages` through the chat template"""

    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    tools: list[Json] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Json | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[Int64]
