"""From a request's fields to SamplingParams' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparseengine.server.errors import ApiError
from sparseengine.server.schemas import SamplingFields

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)


def common_fields(body: SamplingFields) -> dict[str, Any]:
    """Sampling fields that mean the same on both endpoints; None where none was given."""
    found = {name: getattr(body, name) for name in _SAME}
    found["structured_outputs"] = structured(body.response_format, body.structured_outputs)
    return found


def structured(format_: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> Any:
    """StructuredOutputs from OpenAI's response_format or from vLLM's structured_outputs."""
    if format_ is None and own is None:
        return None
    if format_ is not None and own is not None:
        raise ApiError(
            400,
            "give response_format or structured_outputs, not both",
            param="structured_outputs",
        )
    return make_structured(_from_format(format_) if format_ is not None else dict(own or {}))


def make_structured(fields: Mapping[str, Any] | None) -> Any:
    """The engine's record of a constraint. Raises 400 for an empty or contradictory one."""
    if fields is None:
        return None
    from sparseengine.core import params
    from sparseengine.errors import RequestError

    made = getattr(params, "StructuredOutputs", None)
    if made is None:
        raise ApiError(
            400,
            "structured outputs are not supported by this build",
            param="response_format",
        )
    try:
        return made(**fields)
    except (RequestError, TypeError) as error:
        raise ApiError(400, f"structured_outputs: {error}", param="structured_outputs") from None


def _from_format(given: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        inner = given.get("json_schema", given)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping):
            raise ApiError(
                400,
                "response_format: json_schema.schema must be a JSON schema object",
                param="response_format",
            )
        return {"json": dict(schema)}
    if kind == "structural_tag":
        raise ApiError(
            400, "response_format type 'structural_tag' is not supported", param="response_format"
        )
    raise ApiError(
        400,
        f"response_format type {str(kind)[:40]!r} is not allowed; it must be 'text', "
        "'json_object' or 'json_schema'",
        param="response_format",
    )
