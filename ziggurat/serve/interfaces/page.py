"""The page for people: a few files, to which browsers may add nothing."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from ziggurat.serve.interfaces.description import SERVER, Described, Operation

_SCRIPTS = ("page.js", "common.js", "documents.js", "glossary.js", "output.js")
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"/{name}": (name, "text/javascript; charset=utf-8") for name in _SCRIPTS},
}

_HEADERS = {
    # Scripts, styles and requests of this server alone; an image in the page itself; no frame around it, no form sent,
    # and no text that a script could turn into markup (Trusted Types).
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, but asked for again each time: a new version must not meet an old script
}


def page_routes() -> list[Described]:
    """Return the paths of the page, whose files are read now."""
    folder = files("ziggurat.serve.interfaces") / "static"
    return [_route(path, (folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()]


def _route(path: str, content: bytes, kind: str) -> Described:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": tag}

    async def page(request: Request) -> Response:
        """Show the page to people."""
        held = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
        if tag in held or "*" in held:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    what = "the page for people" if path == "/" else "a part of the page"
    kinds = {kind.partition(";")[0]: what}
    return Described(path, page, Operation(SERVER, kinds=kinds))
