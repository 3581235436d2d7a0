"""How a response leaves: JSON once all is there, or server-sent events as they come."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sparseengine.errors import SparseEngineError
from sparseengine.server.errors import ApiError, as_api_error

_T = TypeVar("_T")
_log = logging.getLogger("sparseengine.server")
DONE = "data: [DONE]\n\n"


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def data_event(value: Any) -> str:
    """An event as OpenAI's chat and completions streams write it."""
    return f"data: {dumps(value)}\n\n"


def named_event(value: dict[str, Any]) -> str:
    """An event with its type as a name, as the responses and messages streams write it."""
    return f"event: {value['type']}\ndata: {dumps(value)}\n\n"


class GoneError(Exception):
    """The client went away before it had its answer."""


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """The result of `work`; when the client goes away first, `work` is cancelled."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise GoneError
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def answer(request: Request, work: Awaitable[dict[str, Any]]) -> Response:
    """The JSON answer of `work`, which ends when the client goes away."""
    try:
        value = await unless_gone(request, work)
    except GoneError:
        return Response(status_code=499)
    return Response(dumps(value), media_type="application/json")


async def event_stream(
    events: AsyncIterator[str], failed: Callable[[ApiError], str], last: str = ""
) -> Response:
    """Server-sent events. The first one is awaited here, so that an early error has a status.

    failed: the event for an error after that; last: what ends the stream in any case.
    """
    try:
        first = await anext(events)
    except StopAsyncIteration:
        first = ""

    async def body() -> AsyncIterator[str]:
        try:
            yield first
            async for event in events:
                yield event
        except (ApiError, SparseEngineError) as error:
            yield failed(as_api_error(error))
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        if last:
            yield last

    return StreamingResponse(
        body(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )
