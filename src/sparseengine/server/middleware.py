"""Around every request: id, access line, keys, drain, slow readers, and errors without tracebacks.

Plain ASGI, because streams must pass through untouched.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sparseengine.errors import SparseEngineError
from sparseengine.server.errors import ApiError, as_api_error
from sparseengine.server.records import Record, log
from sparseengine.server.settings import ServerSettings
from sparseengine.server.tracing import Tracer
from sparseengine.server.ui import PAGE_PATHS

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# probes and browsers that open a page carry no key; the page asks for one
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", *PAGE_PATHS})
_log = logging.getLogger("sparseengine.server")


class Envelope:
    """Wraps the application. `answered(path, status)` counts, `paths` bounds what it counts.

    tracer: gets every request that has an access line; None: there are no traces.
    """

    def __init__(
        self,
        app: App,
        settings: ServerSettings,
        answered: Callable[[str, int], None],
        tracer: Tracer | None = None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._answered = answered
        self._tracer = tracer
        self._keys = [_digest(k.encode()) for k in settings.api_keys]
        self.paths: frozenset[str] = frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {k.lower(): v for k, v in scope["headers"]}
        record = Record(
            id=uuid.uuid4().hex,
            client_id=_printable(headers.get(b"x-request-id")),
            path=scope["path"],
            verb=scope["method"],
        )
        scope.setdefault("state", {})["record"] = record
        reply = _Reply(send, record, self._settings.client_timeout)
        watched = _watched(receive, record)
        try:
            record.tenant = self._check_key(scope["path"], scope["method"], headers)
            await self._app(scope, watched, reply)
        except _ClientGoneError:
            record.disconnected = True
        except (ApiError, SparseEngineError) as error:
            await self._say(as_api_error(error), scope, watched, reply)
        except asyncio.CancelledError:
            record.disconnected = True
            raise
        except Exception:
            if reply.started:
                raise
            _log.exception("request %s failed", record.id)
            internal = ApiError(500, "internal error", code="internal_error")
            await self._say(internal, scope, watched, reply)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self._answered(path, record.status)
            if scope["path"] not in OPEN_PATHS:
                if self._settings.access_log:
                    log.info(record.line())
                if self._tracer is not None:
                    parent = _printable(headers.get(b"traceparent"))
                    self._tracer.ended(record, parent, path)

    async def _say(self, error: ApiError, scope: Scope, receive: Receive, reply: _Reply) -> None:
        if not reply.started:
            await error.response(scope["path"])(scope, receive, reply)

    def _check_key(self, path: str, verb: str, headers: dict[bytes, bytes]) -> str:
        """The number of the key that was given, "" where none is needed.

        Every key is compared in full, whichever matches, in constant time.
        """
        if not self._keys or path in OPEN_PATHS or verb == "OPTIONS":
            return ""
        given = headers.get(b"authorization", b"")
        token = given[7:] if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        digest = _digest(token)
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(matches):
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return str(matches.index(True))


class _ClientGoneError(Exception):
    """A client did not read for too long."""


class _Reply:
    """Notes status and start of the answer; gives up on a client that does not read."""

    def __init__(self, send: Send, record: Record, timeout: float) -> None:
        self._send = send
        self._record = record
        self._timeout = timeout
        self.started = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self._record.status = message["status"]
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", (self._record.client_id or self._record.id).encode()),
            ]
        try:
            async with asyncio.timeout(self._timeout):
                await self._send(message)
        except TimeoutError:
            raise _ClientGoneError from None


def _watched(receive: Receive, record: Record) -> Receive:
    async def watched() -> MutableMapping[str, Any]:
        message = await receive()
        if message["type"] == "http.disconnect":
            record.disconnected = True
        return message

    return watched


def _digest(key: bytes) -> bytes:
    """Same length for every key, so that a comparison tells nothing about lengths."""
    return hashlib.sha256(key).digest()


def _printable(value: bytes | None) -> str | None:
    """A client's id if it is short and plain, for it goes into headers and logs."""
    if value is None or not 0 < len(value) <= 128:
        return None
    text = value.decode("latin-1")
    return text if text.isascii() and text.isprintable() else None
