"""What operators and clients ask about the server itself, and tokens without generation."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sparseengine import __version__
from sparseengine.server.errors import ApiError, retry_later
from sparseengine.server.messages_text import flatten_messages
from sparseengine.server.schemas import DetokenizeBody, TokenizeBody
from sparseengine.server.service import Service


def models(service: Service, only: str | None = None) -> Response:
    names = service.names if only is None else (service.check_model(only),)
    cards = [
        {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "sparseengine",
            "root": service.info.model,
            "parent": None,
            "max_model_len": service.info.max_model_len,
        }
        for name in names
    ]
    return JSONResponse(cards[0] if only is not None else {"object": "list", "data": cards})


def health(service: Service) -> Response:
    """200 while the engine's loop goes round; 503 with the reason when it does not."""
    dead, age = service.llm.error, service.llm.beat_age
    if dead is not None:
        raise retry_later(503, f"the engine does not run: {dead}", 10)
    if age > service.settings.health_timeout:
        raise retry_later(
            503,
            f"the engine's loop has made no progress for {age:.1f} s "
            f"(--health-timeout {service.settings.health_timeout:g})",
            10,
        )
    if service.draining:
        raise retry_later(503, "the server is shutting down", 5)
    return JSONResponse({"status": "ok", "engine_step_age_seconds": round(age, 3)})


def version() -> Response:
    return JSONResponse({"version": __version__})


def metrics(service: Service) -> Response:
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def server_info(service: Service) -> Response:
    """What is served and why: no keys, no paths beyond the model's own name."""
    info, s = service.info, service.settings
    return JSONResponse(
        {
            "version": __version__,
            "models": list(service.names),
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "methods": list(info.methods),
            "default_method": info.methods[0],
            "device": info.device,
            "limits": {
                "max_queue": s.max_queue,
                "max_n": s.max_n,
                "max_stop": s.max_stop,
                "max_body_bytes": s.max_body_bytes,
                "max_logprobs": info.max_logprobs,
            },
            "tool_call_parser": s.tool_call_parser,
            "reasoning_parser": s.reasoning_parser,
            "memory": info.memory,
            "server": {
                name: {"value": value.value, "source": str(value.source)}
                for name, value in s.origins.items()
            },
            "explain": info.explained,
        }
    )


def tokenizer_info(service: Service) -> Response:
    """Special tokens and the chat template, under the names of transformers' tokenizer config."""
    tokenizer = service.prompts.tokenizer
    if tokenizer is None:
        raise ApiError(404, "this model has no tokenizer")
    specials = {k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    return JSONResponse(
        {
            **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")),
            **specials,
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": service.info.max_model_len,
            "chat_template": service.settings.chat_template or tokenizer.chat_template,
        }
    )


async def tokenize(service: Service, request: Request, body: TokenizeBody) -> dict[str, Any]:
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, one of them", param="prompt")
    if body.prompt is not None:
        has_text = body.prompt != "" or body.add_special_tokens
        ids = await service.encode(body.prompt, special=body.add_special_tokens) if has_text else []
    else:
        _, ids = await service.encode_chat(
            flatten_messages(body.messages or []),
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
        )
    found: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.info.max_model_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        found["token_strs"] = service.prompts.tokenizer.convert_ids_to_tokens(ids)
    return found


async def detokenize(service: Service, request: Request, body: DetokenizeBody) -> dict[str, Any]:
    service.check_model(body.model)
    tokenizer, vocab = service.prompts.tokenizer, service.info.vocab_size
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    for i, token in enumerate(body.tokens):
        if not 0 <= token < vocab:
            raise ApiError(
                400, f"token {i} is {token}; ids must be in [0, {vocab - 1}]", param="tokens"
            )
    return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}
