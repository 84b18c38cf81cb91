"""Requests of the contract tests."""

from __future__ import annotations

from typing import Any

import httpx

from scorekit.schemas import TranslationSample
from scorekit.server.fake import fake_score

PAIR = {"src": "Hello.", "mt": "안녕하세요."}


def _score(url: str, *samples: Any, status: int = 200, **options: Any) -> Any:
    response = httpx.post(f"{url}/v1/score", json={"samples": list(samples), **options})
    assert response.status_code == status, response.text
    return response.json()


def _expected(src: str, mt: str, ref: str | None = None) -> float:
    return fake_score(TranslationSample(src=src, mt=mt, ref=ref), 25.0)
