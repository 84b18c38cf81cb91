"""vLLM's `POST /pooling` without a model: a vector for each word of a text, and for each part of a
picture; functions of the words and the pixels."""

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
    """[DIMENSION], of length 1."""
    seed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
    vector = np.random.default_rng(seed).standard_normal(DIMENSION)
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


def text_vectors(text: str) -> np.ndarray:
    """[words, DIMENSION]."""
    return np.stack([vector_of(word.encode()) for word in text.split()])


def picture_vectors(png: bytes) -> np.ndarray:
    """[n, DIMENSION]: n depends on the picture's shape."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    rows = 2 + picture.height % 5
    step = -(-picture.height // rows)
    parts = [picture.crop((0, y, picture.width, y + step)) for y in range(0, picture.height, step)]
    return np.stack([vector_of(part.tobytes()) for part in parts])


class FakePooling:
    """The application. asked: texts and pictures so far. fault: answers instead, while it is set.
    salt: another one makes another model."""

    def __init__(self, salt: float = 0.0) -> None:
        self.texts = self.pictures = 0
        self.fault: Response | None = None
        self.salt = salt
        self.app = FastAPI()
        self.app.post("/pooling")(self._answer)

    async def _answer(self, request: Request) -> Response:
        asked = await request.json()
        if self.fault is not None:
            return self.fault
        if asked.get("task") != "token_embed" or asked.get("encoding_format") != "float":
            return Response(status_code=400)
        if "messages" in asked:
            self.pictures += 1
            url = asked["messages"][0]["content"][0]["image_url"]["url"]
            found = [picture_vectors(base64.b64decode(url.partition(",")[2]))]
        else:
            self.texts += len(asked["input"])
            found = [text_vectors(text) for text in asked["input"]]
        return JSONResponse(self._body(asked["model"], found))

    def _body(self, model: str, found: Sequence[np.ndarray]) -> dict[str, Any]:
        rows = [
            {"index": k, "object": "pooling", "data": (one + self.salt).tolist()}
            for k, one in enumerate(found)
        ]
        return {"object": "list", "model": model, "data": rows[::-1], "usage": {}}
