"""One access line per request: what was asked, what it took, how it ended."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from sparseengine.async_llm import Arrived
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.plan import Miss

log = logging.getLogger("sparseengine.access")
_requests = logging.getLogger("sparseengine.requests")
_PLAIN = {"model", "method", "role", "type", "name", "tool_choice", "reasoning_effort", "effort"}


def log_request(request_id: str, body: BaseModel, *, with_text: bool) -> None:
    """What a request asked for; texts show as their lengths unless `with_text`."""
    given = body.model_dump(exclude_unset=True)
    shown = given if with_text else {k: _redacted(k, v) for k, v in given.items()}
    _requests.info(json.dumps({"id": request_id, **shown}, ensure_ascii=True))


def _redacted(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return value if name in _PLAIN else f"<{len(value)} characters>"
    if isinstance(value, dict):
        return {k: _redacted(k, v) for k, v in value.items()}
    if isinstance(value, list):
        if value and all(type(v) is int for v in value):
            return f"<{len(value)} integers>"
        return [_redacted(name, v) for v in value]
    return value


@dataclass(slots=True, kw_only=True)
class Record:
    """Filled while a request is served; `line` is what is logged when it is over."""

    id: str
    client_id: str | None
    path: str
    verb: str
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    disconnected: bool = False
    generates: bool = False
    method: str | None = None
    n: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_miss: Miss | None = None
    tenant: str = ""  # which of several API keys was given; prefixes are shared within one
    output_tokens: int = 0
    kv_bytes: int = 0
    dense_kv_bytes: int = 0
    first_token_at: float | None = None
    finishes: list[str] = field(default_factory=list)

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        sparse: SparseParams | None,
        default_method: str,
    ) -> None:
        self.generates = True
        self.prompt_tokens = sum(map(len, prompts))
        self.n = sampling.n
        self.method = default_method if sparse is None else sparse.method

    def note(self, arrived: Arrived) -> None:
        delta = arrived.delta
        if delta.token_ids and self.first_token_at is None:
            self.first_token_at = arrived.at
        self.output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finishes.append(delta.finish_reason)
        if delta.is_last:
            self.cached_tokens += delta.num_cached_tokens
            self.cache_miss = self.cache_miss or delta.cache_miss
            if delta.metrics is not None:
                self.kv_bytes += delta.metrics.kv_bytes
                self.dense_kv_bytes += delta.metrics.dense_kv_bytes

    def line(self) -> str:
        return json.dumps(self.fields(), ensure_ascii=True)

    def fields(self) -> dict[str, Any]:
        """What the access line holds."""
        found: dict[str, Any] = {
            "id": self.id,
            "client_id": self.client_id,
            "verb": self.verb,
            "path": self.path,
            "status": self.status,
            "seconds": round(time.monotonic() - self.started, 4),
        }
        if self.generates:
            first = self.first_token_at
            ended = sorted(set(self.finishes)) or ["disconnect" if self.disconnected else "none"]
            found |= {
                "method": self.method,
                "n": self.n,
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "cache_miss": None if self.cache_miss is None else self.cache_miss.reason,
                "output_tokens": self.output_tokens,
                "resident_bytes": self.kv_bytes,
                "freed_bytes": max(0, self.dense_kv_bytes - self.kv_bytes),
                "ttft": None if first is None else round(first - self.started, 4),
                "end": ",".join(ended),
            }
        return found
