"""Serve pages and their images over HTTP. They are read from the disk, without a queue."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response

from scorekit.errors import RequestError
from scorekit.retrieval.wire import REVISION_HEADER, Page
from scorekit.schemas import ErrorResponse
from services.retriever.endpoint import image_path
from services.retriever.index.images import Format, ImageRequest, part_of, sha256
from services.retriever.index.reader import IndexPaths
from services.retriever.index.records import PageRecord

#: Number of images cropped or scaled at once; each takes the memory of its pixels.
AT_ONCE = 4
_CROP = re.compile(r"(\d{1,6}),(\d{1,6}),(\d{1,6}),(\d{1,6})", re.ASCII)
_FORMATS: dict[str, Format] = {"png": "png", "jpeg": "jpeg", "webp": "webp"}
_PARAMETERS = [
    {"name": name, "in": "query", "required": False, "description": description, "schema": schema}
    for name, description, schema in (
        (
            "crop",
            "x1,y1,x2,y2: whole pixels of the page's picture, origin top left.",
            {"type": "string", "pattern": f"^{_CROP.pattern}$".replace(r"\d", "[0-9]")},
        ),
        (
            "max_pixels",
            "Make it smaller until it has at most so many pixels.",
            {"type": "integer", "minimum": 1, "maximum": 10**10 - 1},
        ),
        ("format", "The picture's.", {"type": "string", "enum": [*_FORMATS], "default": "png"}),
    )
]
_PICTURES: dict[int | str, dict[str, Any]] = {
    200: {"content": {f"image/{kind}": {} for kind in _FORMATS}},
    304: {"description": "It is the one that If-None-Match names."},
}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (404, 422, 503)
}


class PageRoutes:
    """The routes `/v1/pages/...` of one index; 503 until it is opened."""

    def __init__(self, paths: IndexPaths) -> None:
        self._paths = paths
        self._pages: dict[str, PageRecord] | None = None
        self._headers: dict[str, str] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)

    def open(self, pages: Sequence[PageRecord], revision: str) -> None:
        """Set the pages to serve.

        revision: the index's, sent with every response.
        """
        self._headers = {REVISION_HEADER: revision}
        self._pages = {page.page_id: page for page in pages}

    def add(self, app: FastAPI) -> None:
        """Add the routes to an application."""

        @app.get("/v1/pages/{page_id}", response_model=Page, responses=_REFUSALS)
        async def page(response: Response, page_id: str) -> Page:
            """A page: its size, and its text with the places of it."""
            record = self._page(page_id)
            response.headers.update(self._headers)
            fields = record.model_dump(include=set(Page.model_fields))
            return Page.model_validate(fields | {"image": image_path(page_id)})

        @app.get(
            "/v1/pages/{page_id}/image",
            response_class=Response,
            responses=_REFUSALS | _PICTURES,
            openapi_extra={"parameters": _PARAMETERS},
        )
        async def image(request: Request, page_id: str) -> Response:
            """Its picture, or a part of it."""
            record = self._page(page_id)
            image_request = _image_request(request, record)
            tag = _tag(record.picture, image_request)
            headers = self._headers | {"ETag": tag, "Cache-Control": "private, no-cache"}
            if _matches(request.headers.get("if-none-match", ""), tag):
                return Response(status_code=304, headers=headers)
            body = await self._body(record, image_request)
            headers["X-Content-Type-Options"] = "nosniff"
            return Response(body, media_type=f"image/{image_request.format}", headers=headers)

    def _page(self, page_id: str) -> PageRecord:
        if self._pages is None:
            raise RequestError("unavailable", "the index is loading", retry_after=5.0)
        record = self._pages.get(page_id)
        if record is None:
            raise RequestError("not_found", "no page of that id in the index")
        return record

    async def _body(self, page: PageRecord, image_request: ImageRequest) -> bytes:
        if image_request == ImageRequest():  # it is only read, so it need not wait for the others
            return await asyncio.to_thread(self._read, page, image_request)
        async with self._slots:
            return await asyncio.to_thread(self._read, page, image_request)

    def _read(self, page: PageRecord, image_request: ImageRequest) -> bytes:
        """Return the image's bytes. Raises RequestError if the stored image is damaged."""
        try:
            png = self._paths.image_path(page.picture).read_bytes()
        except OSError:
            png = b""
        if sha256(png) != page.picture:
            raise RequestError("unavailable", "the image is missing from the index, or damaged")
        return png if image_request == ImageRequest() else part_of(png, image_request)


def _image_request(request: Request, page: PageRecord) -> ImageRequest:
    """Parse the query string. Raises RequestError that does not echo the input."""
    parameters = request.query_params
    if unknown := set(parameters) - {"crop", "max_pixels", "format"}:
        raise _invalid_request(
            f"{len(unknown)} parameters are not known; there are crop, max_pixels, format"
        )
    if len(parameters.multi_items()) > len(parameters):
        raise _invalid_request("a parameter is given twice")
    kind = _FORMATS.get(parameters.get("format", "png"))
    if kind is None:
        raise _invalid_request("format: png, jpeg or webp")
    max_pixels = parameters.get("max_pixels")
    if max_pixels is not None and not re.fullmatch(r"[1-9][0-9]{0,9}", max_pixels):
        raise _invalid_request("max_pixels: a whole number from 1 on")
    return ImageRequest(
        _parse_crop(parameters.get("crop"), page), int(max_pixels) if max_pixels else None, kind
    )


def _parse_crop(text: str | None, page: PageRecord) -> tuple[int, int, int, int] | None:
    """Return x1, y1, x2, y2. Raises RequestError if they are no part of the page's picture."""
    if text is None:
        return None
    numbers = _CROP.fullmatch(text)
    if numbers is None:
        raise _invalid_request("crop: x1,y1,x2,y2, whole pixels of the page's picture")
    x1, y1, x2, y2 = map(int, numbers.groups())
    if not (x1 < x2 <= page.width and y1 < y2 <= page.height):
        raise _invalid_request(
            f"crop: 0 <= x1 < x2 <= {page.width} and 0 <= y1 < y2 <= {page.height} on this page"
        )
    return x1, y1, x2, y2


def _invalid_request(message: str) -> RequestError:
    return RequestError("invalid_request", message)


def _tag(name: str, image_request: ImageRequest) -> str:
    """Return a strong ETag of the image and the requested part."""
    if image_request == ImageRequest():
        return f'"{name}"'
    return f'"{sha256(repr((name, *image_request)).encode())}"'


def _matches(header: str, tag: str) -> bool:
    """Return True if the If-None-Match header contains the tag, weak or strong."""
    tags = {tag_text.strip().removeprefix("W/") for tag_text in header.split(",")}
    return tag in tags or "*" in tags
