"""A fake retriever with the real wire format. It finds pages whose text has a word of the query."""

from __future__ import annotations

import io
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from PIL import Image

SIZE = (64, 48)


def picture_of(page_id: str) -> bytes:
    """Return a PNG in the page's own color."""
    colour = tuple(sum(page_id.encode()) * factor % 256 for factor in (3, 5, 7))
    out = io.BytesIO()
    Image.new("RGB", SIZE, colour).save(out, "PNG")
    return out.getvalue()


def refusal(status: int, type: str, message: str) -> JSONResponse:
    """Return the body of a refused request."""
    error = {"type": type, "message": message, "retryable": status in (429, 503, 504)}
    return JSONResponse({"error": error}, status)


class StandInRetriever:
    """A fake retriever whose index and answers a test can change.

    pages: text by page id.
    script: responses that are sent before any good one; None in it stands for a good one.
    failing: query -> (error type, how often it still fails).
    requests: bodies of searches.
    fetched: ids of images.
    """

    def __init__(self, pages: dict[str, str], *, max_samples: int = 16, bytes: int = 2**16) -> None:
        self.pages, self.max_samples, self.bytes = pages, max_samples, bytes
        self.revision = "r1"
        self.service: str | None = "retriever"
        self.script: list[Response | None] = []
        self.failing: dict[str, tuple[str, int]] = {}
        self.requests: list[dict[str, Any]] = []
        self.fetched: list[str] = []
        self.app = FastAPI()
        self.app.get("/v1/info")(self.info)
        self.app.post("/v1/search")(self.search)
        self.app.get("/v1/pages/{page_id}")(self.page)
        self.app.get("/v1/pages/{page_id}/image")(self.image)

    def _scripted(self) -> Response | None:
        return self.script.pop(0) if self.script else None

    async def info(self) -> Any:
        description = {
            "service": self.service,
            "max_samples": self.max_samples,
            "max_body_bytes": self.bytes,
        }
        if self.service == "retriever":
            description |= {"id": "demo", "revision": self.revision, "pages": len(self.pages)}
            description |= {"documents": 1, "backend": "bm25"}
        return description

    async def search(self, request: Request) -> Any:
        body = await request.json()
        self.requests.append(body)
        if (scripted := self._scripted()) is not None:
            return scripted
        if len(body["queries"]) > self.max_samples or len(await request.body()) > self.bytes:
            return refusal(413, "too_large", "too much")
        index = {"id": "demo", "revision": self.revision, "pages": len(self.pages)}
        return {"index": index, "results": [self._hits(q, body["top_k"]) for q in body["queries"]]}

    def _hits(self, request: dict[str, Any], top_k: int) -> dict[str, Any]:
        query = request["query"]
        type, times = self.failing.get(query, ("", 0))
        if times:
            self.failing[query] = (type, times - 1)
            error = {"type": type, "message": "for now", "retryable": type == "upstream"}
            return {"id": None, "ok": False, "error": error}
        words = set(query.split())
        scores = {page: len(words & set(text.split())) for page, text in self.pages.items()}
        best = sorted((p for p, n in scores.items() if n), key=lambda page: (-scores[page], page))
        left = [page for page in best if page not in request.get("exclude", [])][:top_k]
        hits = [self._hit(page, rank, scores[page]) for rank, page in enumerate(left, 1)]
        return {"id": None, "ok": True, "hits": hits, "cached": False}

    def _page_location(self, page_id: str) -> dict[str, Any]:
        document, _, number = page_id.rpartition("_")
        location = {"page_id": page_id, "document": f"{document}.pdf", "page": int(number)}
        path = f"/v1/pages/{page_id}/image"
        return location | {"width": SIZE[0], "height": SIZE[1], "image": path}

    def _hit(self, page_id: str, rank: int, score: float) -> dict[str, Any]:
        return self._page_location(page_id) | {"rank": rank, "score": score}

    async def page(self, page_id: str) -> Any:
        if page_id not in self.pages:
            return refusal(404, "not_found", "no such page")
        box = {"x1": 1, "y1": 2, "x2": 30, "y2": 10, "letter_height": 8}
        return self._page_location(page_id) | {"boxes": [box | {"text": self.pages[page_id]}]}

    async def image(self, page_id: str) -> Response:
        self.fetched.append(page_id)
        if (scripted := self._scripted()) is not None:
            return scripted
        if page_id not in self.pages:
            return refusal(404, "not_found", "no such page")
        headers = {"X-Index-Revision": self.revision}
        return Response(picture_of(page_id), media_type="image/png", headers=headers)
