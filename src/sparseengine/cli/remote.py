"""`sparseengine chat --base-url`: the same conversation with a running server."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from sparseengine.errors import RequestError, SparseEngineError


class RemoteChat:
    """An OpenAI-compatible server, as `chat` sees it. `fields` go into every request."""

    def __init__(self, base_url: str, api_key: str | None, fields: Mapping[str, Any]) -> None:
        import httpx

        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        root = base_url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(base_url=root, headers=headers, timeout=600)
        self._fields = dict(fields)
        try:
            found = self._http.get("/v1/models")
            found.raise_for_status()
            self.model = str(found.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError) as error:
            raise SparseEngineError(f"--base-url {base_url}: no server answers: {error}") from None

    def answer(self, messages: list[dict[str, str]]) -> str:
        """Print the answer as it grows; Ctrl-C ends it early. Raises `RequestError`."""
        import httpx

        body = {"model": self.model, "messages": messages, "stream": True, **self._fields}
        shown = ""
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise RequestError(_message(response.read()))
                for line in response.iter_lines():
                    text = _text(line)
                    sys.stdout.write(text)
                    sys.stdout.flush()
                    shown += text
        except httpx.HTTPError as error:
            raise RequestError(f"the server is gone: {error!r}") from None
        except KeyboardInterrupt:
            print(" (stopped)", file=sys.stderr)
        print(flush=True)
        return shown

    def close(self) -> None:
        self._http.close()


def _text(line: str) -> str:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return ""
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise RequestError(str(event["error"].get("message", event["error"])))
    choices = event.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:300]
