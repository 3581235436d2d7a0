"""What our own OpenAPI document allows never ends in a 5xx, and errors have the promised shape."""

from __future__ import annotations

from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from fixtures.servers import Served

SETTINGS = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[hypothesis.Phase.generate],
)


def document(served: Served) -> dict[str, Any]:
    found = served.get("/openapi.json")
    assert found.status_code == 200
    return found.json()


def test_the_document_names_every_route(served: Served) -> None:
    paths = document(served)["paths"]
    promised = """/v1/models /v1/completions /v1/chat/completions /v1/responses /v1/messages
        /tokenize /detokenize /health /ping /version /metrics /server_info /tokenizer_info
        /reset_prefix_cache"""
    assert set(promised.split()) <= set(paths)


OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/server_info"),
]


@pytest.mark.parametrize(("verb", "path"), OPERATIONS)
def test_generated_requests_never_break_the_server(served: Served, verb: str, path: str) -> None:
    schema = schemathesis.openapi.from_dict(document(served))
    operation = schema[path][verb]
    modes = list(schemathesis.GenerationMode)
    strategies = [operation.as_strategy(generation_mode=mode) for mode in modes]

    @SETTINGS
    @hypothesis.given(case=hypothesis.strategies.one_of(strategies))
    def check(case: Any) -> None:
        if isinstance(case.body, dict):  # keep what is generated short
            for name in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
                if isinstance(case.body.get(name), int) and case.body[name] > 4:
                    case.body[name] = 4
        try:
            response = case.call(base_url=served.url, timeout=60)
        except (ValueError, httpx.HTTPError):
            return  # what the client's own library will not send
        assert response.status_code < 500, response.text
        if response.status_code >= 400 and path != "/v1/messages":
            assert "message" in response.json()["error"]

    check()
    assert served.get("/health").status_code == 200
