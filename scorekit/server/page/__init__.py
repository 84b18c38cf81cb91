"""The page at `/`: a form to try a service by hand, one document without external assets.

It is built from the files of this folder when the service starts. It contains no data, so it needs
no key; it requests data over the public routes, and one for rows (rows.py), with the key that the
user enters. Its Content-Security-Policy allows only its own script and style, by their hashes.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from html import escape
from importlib.resources import files

from fastapi import FastAPI, Request, Response

from scorekit.errors import RequestError

#: Scripts of every page, and those of each kind of service, in the order of execution.
_COMMON = ("dom", "call", "code")
_SPANS = ("marks", "card")
_SCRIPTS: dict[str, tuple[str, ...]] = {
    "translations": (*_COMMON, *_SPANS, "rows", "batch", "translations", "start"),
    "judge": (*_COMMON, *_SPANS, "judge", "start"),
    "embedder": (*_COMMON, "embedder", "start"),
    "retriever": (*_COMMON, "crop", "retriever", "start"),
    "reward": (*_COMMON, "reward", "start"),
}


def add_page(app: FastAPI, kind: str, service: str) -> None:
    """Serve the page of a kind of service (`Endpoint.page`) at `/`.

    service: the displayed name.
    """
    body, headers = make_page(kind, service)

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        cached_tags = {tag.strip() for tag in request.headers.get("if-none-match", "").split(",")}
        if headers["ETag"] in {tag.removeprefix("W/") for tag in cached_tags}:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="text/html; charset=utf-8", headers=headers)


def add_docs_route(app: FastAPI, has_page: bool) -> None:
    """Lead from `/docs`, where users of FastAPI look first, to the page, or say what there is."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        if not has_page:
            message = "this service has no page. GET /openapi.json describes its routes"
            raise RequestError("not_found", message, status=404)
        # Relative: behind a proxy the address, scheme and prefix are the client's.
        return Response(status_code=307, headers={"Location": "./"})


def make_page(kind: str, service: str) -> tuple[bytes, dict[str, str]]:
    """Return the document in UTF-8 and its response headers.

    kind: what it is for, a key of `_SCRIPTS`.
    service: the displayed name.
    """
    parts = "\n".join(_read(f"{name}.js") for name in _SCRIPTS[kind])
    script = f'"use strict";\n(() => {{\n{parts}}})();\n'
    style = _read("style.css")
    document = _read("shell.html").replace("@SERVICE@", escape(service))
    document = document.replace("@STYLE@", style).replace("@SCRIPT@", script)
    body = document.encode()
    return body, {
        "Content-Security-Policy": _policy(script, style),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",  # the browser revalidates it with each load
        "ETag": f'"{hashlib.sha256(body).hexdigest()}"',
    }


def _policy(script: str, style: str) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "connect-src 'self'",
            "img-src 'self' blob: data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # The browser refuses to turn plain text into HTML.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
