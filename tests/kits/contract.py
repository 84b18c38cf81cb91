"""Requests of the contract tests."""

from __future__ import annotations

import httpx

from scorekit.schemas import TranslationSample
from scorekit.server.fake import fake_score

PAIR = {"src": "Hello.", "mt": "안녕하세요."}


def _score(url, *samples, status=200, **rest):
    response = httpx.post(f"{url}/v1/score", json={"samples": list(samples), **rest})
    assert response.status_code == status, response.text
    return response.json()


def _expected(src, mt, ref=None):
    return fake_score(TranslationSample(src=src, mt=mt, ref=ref), 25.0)
