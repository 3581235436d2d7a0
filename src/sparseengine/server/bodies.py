"""Request bodies: bounded, in time, strict JSON, then a pydantic model with our own messages."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from sparseengine.errors import nearest
from sparseengine.server.errors import ApiError

_MAX_DEPTH = 64
_M = TypeVar("_M", bound=BaseModel)


async def read_body(request: Request, limit: int, timeout: float) -> bytes:
    """The whole body. Raises `ApiError` 413 past `limit` bytes and 408 when it does not come."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {timeout:g} s",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ApiError(400, "the client went away before its body was complete") from None
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {limit} bytes (--max-body-bytes)",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def parse_json(body: bytes) -> Any:
    """Strict JSON: UTF-8, finite numbers, no duplicate keys, no lone surrogates, bounded depth."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (byte {error.start})") from None
    try:
        value = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        detail = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {detail[:200]}") from None
    _check(value, has_escapes="\\u" in text)
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"the key {twice[:50]!r} occurs twice in one object")
    return found


def _check(value: Any, *, has_escapes: bool) -> None:
    """Depth always; surrogates only where escapes could have made one. Iterative."""
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, str):
            if has_escapes and not _is_text(item):
                raise ApiError(400, "the body holds a lone surrogate, which is no character")
            continue
        if isinstance(item, dict):
            inner = [*item.values(), *(item if has_escapes else ())]
        elif isinstance(item, list):
            inner = [i for i in item if not isinstance(i, (int, float))]  # token ids are quick
        else:
            continue
        if depth >= _MAX_DEPTH:
            raise ApiError(400, f"the body is nested deeper than {_MAX_DEPTH} levels")
        waiting.extend((i, depth + 1) for i in inner)


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def parse_model(value: Any, model: type[_M]) -> _M:
    """Validate; unknown fields that are null count as not given. Raises `ApiError`."""
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind(value)}")
    known = model.model_fields
    given = {k: v for k, v in value.items() if k in known or v is not None}
    for key in given:
        if key not in known:
            raise ApiError(
                400,
                f"unknown field {key[:80]!r}; {nearest(key, known)}",
                param=key[:80],
                code="unknown_field",
            )
    try:
        return model.model_validate(given, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = f"{where}: {first['msg']}"
        if not isinstance(first["input"], (dict, list)):
            message += f" (given: {str(first['input'])[:100]!r})"
        raise ApiError(400, message, param=str(first["loc"][0]) if first["loc"] else None) from None


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


async def read_model(request: Request, model: type[_M], limit: int, timeout: float) -> _M:
    """Content type, body, JSON, model."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"content type {kind[:80]!r} is not allowed; send application/json")
    return parse_model(parse_json(await read_body(request, limit, timeout)), model)
