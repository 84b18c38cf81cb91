"""A client of the stand-in for an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from scorekit.llm import LLMClient, LLMError, Sampling
from testing.openai_server import FakeOpenAI
from testing.servers import PATIENCE_S

MESSAGES = [
    {"role": "system", "content": "You are a professional translator."},
    {"role": "user", "content": "Translate: 안녕하세요"},
]


SAMPLED = Sampling(max_tokens=64, seed=1000)


GREEDY = Sampling(max_tokens=64, temperature=0.0, seed=1000)


AT_ONCE = (0.0,)


VERDICT = {
    "type": "object",
    "properties": {
        "pass": {"type": "boolean"},
        "reason_code": {"enum": ["ok", "language", "meaning"]},
        "notes": {"type": "string", "maxLength": 40},
    },
    "required": ["pass", "reason_code", "notes"],
    "additionalProperties": False,
}


def client(url: str, fake: FakeOpenAI, **settings: Any) -> LLMClient:
    settings.setdefault("backoff_s", AT_ONCE)
    return LLMClient(url, fake.model, **settings)


def ask(
    url: str,
    fake: FakeOpenAI,
    sampling: Sampling = SAMPLED,
    n: int = 1,
    json_schema: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[LLMClient, Any]:
    """Return the client, and the choices or the LLMError that it got."""

    async def work() -> tuple[LLMClient, Any]:
        async with client(url, fake, **settings) as llm:
            try:
                return llm, await llm.chat(
                    MESSAGES, sampling, n=n, request_id="r", json_schema=json_schema
                )
            except LLMError as error:
                return llm, error

    return asyncio.run(work())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)
