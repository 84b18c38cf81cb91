"""A chat server in its own process, for benchmarks of its clients."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from scorekit.processes import end_worker_with_parent
from testing.processes import free_port

#: A request's body -> the texts of its choices, and the tokens that they count.
Answers = Callable[[dict[str, Any]], tuple[list[str], int]]


@contextmanager
def running_teacher(answers: Answers) -> Iterator[str]:
    """Start the server and yield its URL with /v1.

    answers: a function of a module, which the process imports again.
    """
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(port, answers), daemon=True
    )
    process.start()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.join()


def _serve(port: int, answers: Answers) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    end_worker_with_parent()

    async def chat(request: Request) -> JSONResponse:
        texts, tokens = answers(json.loads(await request.body()))
        choices = [
            {"index": i, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            for i, text in enumerate(texts)
        ]
        usage = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 0}
        answer = {"id": "c", "object": "chat.completion", "created": 0, "model": "teacher"}
        return JSONResponse(answer | {"choices": choices, "usage": usage})

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "teacher", "object": "model"}]})

    app = Starlette(
        routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models)]
    )
    uvicorn.run(app, port=port, log_level="error")
