"""A fake of vLLM's `POST /pooling`: one vector per word of a text, and per part of an image.

The vectors are functions of the words and the pixels.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from PIL import Image

DIMENSION = 16


def vector_of(content: bytes) -> np.ndarray:
    """Return a random vector [DIMENSION] of length 1. The content is the seed."""
    seed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
    vector = np.random.default_rng(seed).standard_normal(DIMENSION)
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


def text_vectors(text: str) -> np.ndarray:
    """Return the vectors of a text, [words, DIMENSION]."""
    return np.stack([vector_of(word.encode()) for word in text.split()])


def picture_vectors(png: bytes) -> np.ndarray:
    """Return vectors [n, DIMENSION] of an image. n depends on its height."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    rows = 2 + image.height % 5
    step = -(-image.height // rows)
    parts = [image.crop((0, y, image.width, y + step)) for y in range(0, image.height, step)]
    return np.stack([vector_of(part.tobytes()) for part in parts])


class FakePooling:
    """The application.

    texts, num_images: how many it has got so far.

    error_response: sent while it is set.
    salt: another one makes another model.
    """

    def __init__(self, salt: float = 0.0) -> None:
        self.texts = self.num_images = 0
        self.error_response: Response | None = None
        self.salt = salt
        self.app = FastAPI()
        self.app.post("/pooling")(self._answer)

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        if self.error_response is not None:
            return self.error_response
        if body.get("task") != "token_embed" or body.get("encoding_format") != "float":
            return Response(status_code=400)
        if "messages" in body:
            self.num_images += 1
            url = body["messages"][0]["content"][0]["image_url"]["url"]
            vectors = [picture_vectors(base64.b64decode(url.partition(",")[2]))]
        else:
            self.texts += len(body["input"])
            vectors = [text_vectors(text) for text in body["input"]]
        return JSONResponse(self._body(body["model"], vectors))

    def _body(self, model: str, vectors: Sequence[np.ndarray]) -> dict[str, Any]:
        rows = [
            {"index": k, "object": "pooling", "data": (vector + self.salt).tolist()}
            for k, vector in enumerate(vectors)
        ]
        return {"object": "list", "model": model, "data": rows[::-1], "usage": {}}
