"""GET /ui: a page to talk to the model and to watch what a method keeps and reads.

Plain HTML, CSS and JavaScript from `static/`; it uses the public routes only.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from starlette.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "mjs": "text/javascript"}
_FILES = ("page.css", "app.mjs", "events.mjs", "record.mjs", "draw.mjs", "tokens.mjs")
PAGE_PATHS = {"/ui": "page.html", **{f"/ui/{name}": name for name in _FILES}}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def page(name: str) -> Response:
    """One file of the page."""
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(_content(name), media_type=f"{kind}; charset=utf-8", headers=_HEADERS)


@cache
def _content(name: str) -> bytes:
    return resources.files("sparseengine.server").joinpath("static", name).read_bytes()
