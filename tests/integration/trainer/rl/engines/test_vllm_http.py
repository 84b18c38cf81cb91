"""Check what a run takes a vLLM server for, by its answers over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from testing.servers import running_app
from trainer.rl.engines.vllm_http import VLLMServer

CHOICE = {"token_ids": [5], "finish_reason": "length"}
LABELED = {"choices": [CHOICE | {"weight_versions": [["1", 1]]}]}


def labels_tokens(status: int, answer: dict[str, Any]) -> bool:
    """Return what a server is taken for whose route `/is_paused` has this status."""
    app = FastAPI()
    app.get("/is_paused")(lambda: JSONResponse({"is_paused": False}, status))
    app.post("/inference/v1/generate")(lambda: answer)

    async def ask(url: str) -> bool:
        server = VLLMServer(url)
        try:
            return await server.labels_tokens("policy")
        finally:
            await server.close()

    with running_app(app) as url:
        return asyncio.run(ask(url))


@pytest.mark.parametrize(("status", "labels"), [(200, True), (500, True), (404, False)])
def test_only_a_server_without_the_route_cannot_pause(status: int, labels: bool) -> None:
    assert labels_tokens(status, LABELED) is labels


def test_a_server_whose_answer_names_no_weights_labels_no_tokens() -> None:
    assert labels_tokens(200, {"choices": [CHOICE]}) is False
