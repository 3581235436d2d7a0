"""Errors as HTTP answers: OpenAI's body, or Anthropic's on its own route. Never a traceback."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from sparseengine.async_llm import EngineDeadError
from sparseengine.errors import CapacityError, RequestError, SparseEngineError

_FIELD = re.compile(r"^([a-z_]+)(?:=| holds |\.)|^unknown (?:sampling )?field '([^']+)'")
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer other than 200. `param` names the field, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic_body(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else None)
        kind = kind or "invalid_request_error"
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> JSONResponse:
        is_anthropic = path.startswith("/v1/messages")
        body = self.anthropic_body() if is_anthropic else self.body()
        return JSONResponse(body, self.status, headers=self.headers)


def retry_later(status: int, message: str, seconds: int = 1) -> ApiError:
    code = "queue_full" if status == 429 else "unavailable"
    return ApiError(status, message, code=code, headers={"Retry-After": str(seconds)})


def as_api_error(error: Exception, param: str | None = None) -> ApiError:
    """What one of our own errors means to a client."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, CapacityError):
        return ApiError(400, message, param="max_tokens", code="kv_capacity_exceeded")
    if isinstance(error, RequestError):
        found = _FIELD.search(message)
        named = found and (found[1] or found[2])
        return ApiError(400, message, param=param or error.param or named or None)
    if isinstance(error, EngineDeadError):
        return retry_later(503, f"the engine does not run: {message}", 10)
    if isinstance(error, SparseEngineError):
        return ApiError(500, message, code="engine_error")
    return ApiError(500, "internal error", code="internal_error")


def not_finished(stop_reason: object) -> ApiError:
    """A request that the engine ended with an error."""
    return ApiError(500, str(stop_reason or "the request failed"), code="request_failed")
