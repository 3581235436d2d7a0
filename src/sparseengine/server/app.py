"""The application: routes, their OpenAPI description, and what surrounds them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from sparseengine import __version__
from sparseengine.errors import SparseEngineError
from sparseengine.server import ops, schemas
from sparseengine.server.answers import answer
from sparseengine.server.anthropic import count_tokens, messages
from sparseengine.server.bodies import read_model
from sparseengine.server.chat import chat_completions
from sparseengine.server.completions import completions
from sparseengine.server.errors import ApiError, as_api_error
from sparseengine.server.middleware import Envelope
from sparseengine.server.records import log_request
from sparseengine.server.responses import responses
from sparseengine.server.service import Service, record_of
from sparseengine.server.ui import PAGE_PATHS, page

Handler = Callable[[Service, Request, Any], Awaitable[Response]]
_REF = "#/components/schemas/{model}"


class Routes:
    """Adds routes to an application and remembers their body models for the description."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        self.app = app
        self.service = service
        self.bodies: dict[str, type[BaseModel]] = {}

    def post(self, path: str, model: type[BaseModel], handler: Handler) -> None:
        """A route with a JSON body of this model."""
        service, settings = self.service, self.service.settings

        async def endpoint(request: Request) -> Response:
            body = await read_model(
                request, model, settings.max_body_bytes, settings.client_timeout
            )
            if settings.log_requests:
                log_request(record_of(request).id, body, with_text=settings.log_text)
            return await handler(service, request, body)

        self.bodies[model.__name__] = model
        schema = {"$ref": _REF.format(model=model.__name__)}
        self.app.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            name=path.strip("/").replace("/", "_"),
            summary=(model.__doc__ or "").splitlines()[0],
            response_model=None,
            responses=_ANSWERS,
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                }
            },
        )

    def get(self, path: str, handler: Callable[..., Response], summary: str) -> None:
        async def endpoint() -> Response:
            return handler()

        self.app.add_api_route(
            path,
            endpoint,
            methods=["GET"],
            name=path.strip("/").replace("/", "_"),
            summary=summary,
            response_model=None,
            responses=_ANSWERS,
        )


_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "the answer"},
    "4XX": {
        "description": "what is wrong with the request",
        "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
    },
    "5XX": {
        "description": "what is wrong with the server",
        "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
    },
}


def make_app(service: Service) -> Any:
    """The ASGI application around a started engine."""
    app = FastAPI(
        title="SparseEngine", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    routes = Routes(app, service)
    _add_routes(routes)
    _add_errors(app)
    document: dict[str, Any] = {}

    def openapi() -> Response:
        if not document:
            document.update(describe(app, routes.bodies))
        from starlette.responses import JSONResponse

        return JSONResponse(document)

    app.add_api_route("/openapi.json", openapi, include_in_schema=False, response_model=None)
    envelope = Envelope(app, service.settings, service.metrics.answered, service.tracer)
    envelope.paths = frozenset(r.path for r in app.routes if hasattr(r, "path"))
    origins = list(service.settings.allowed_origins)
    if not origins:
        return envelope
    return CORSMiddleware(
        envelope, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"]
    )


def _add_routes(routes: Routes) -> None:
    service, app = routes.service, routes.app
    routes.post("/v1/chat/completions", schemas.ChatBody, chat_completions)
    routes.post("/v1/completions", schemas.CompletionBody, completions)
    routes.post("/v1/responses", schemas.ResponsesBody, responses)
    routes.post("/v1/messages", schemas.MessagesBody, messages)
    routes.post("/v1/messages/count_tokens", schemas.CountTokensBody, _json(count_tokens))
    routes.post("/tokenize", schemas.TokenizeBody, _json(ops.tokenize))
    routes.post("/detokenize", schemas.DetokenizeBody, _json(ops.detokenize))
    routes.get("/tokenizer_info", lambda: ops.tokenizer_info(service), "special tokens, template")
    routes.get("/v1/models", lambda: ops.models(service), "the names that requests may use")
    routes.get("/health", lambda: ops.health(service), "200 while the engine makes progress")
    routes.get("/ping", lambda: ops.health(service), "as /health")
    routes.get("/version", ops.version, "the version of this package")
    routes.get("/metrics", lambda: ops.metrics(service), "for Prometheus")
    routes.get("/server_info", lambda: ops.server_info(service), "what is served, and why")

    for path, page_file in PAGE_PATHS.items():
        app.add_api_route(path, partial(page, page_file), include_in_schema=False)

    async def model(name: str) -> Response:
        return ops.models(service, name)

    async def reset() -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse({"reset": await service.llm.reset_prefix_cache()})

    app.add_api_route(
        "/v1/models/{name:path}", model, response_model=None, responses=_ANSWERS, summary="a model"
    )
    app.add_api_route(
        "/reset_prefix_cache",
        reset,
        methods=["POST"],
        response_model=None,
        responses=_ANSWERS,
        summary="drop cached prefixes that no running request holds",
    )


def _json(handler: Callable[..., Awaitable[dict[str, Any]]]) -> Handler:
    async def wrapped(service: Service, request: Request, body: Any) -> Response:
        return await answer(request, handler(service, request, body))

    return wrapped


def _add_errors(app: FastAPI) -> None:
    async def ours(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {
            404: f"no such route: {request.method} {request.url.path[:200]}",
            405: f"{request.method} is not allowed on {request.url.path[:200]}",
        }
        message = messages.get(error.status_code, str(error.detail))
        found = ApiError(error.status_code, message, headers=error.headers)
        return found.response(request.url.path)

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(SparseEngineError, ours)
    app.add_exception_handler(HTTPException, http)


def describe(app: FastAPI, bodies: dict[str, type[BaseModel]]) -> dict[str, Any]:
    """The OpenAPI document, with the body models among its components."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components["Error"] = _ERROR
    for name, model in bodies.items():
        schema = model.model_json_schema(ref_template=_REF)
        components.update(schema.pop("$defs", {}))
        components[name] = schema
    return document
