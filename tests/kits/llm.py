"""A client of the stand-in for an OpenAI-compatible server."""

from __future__ import annotations

import asyncio

from bench.kit.servers import PATIENCE_S
from scorekit.llm import LLMClient, LLMError, Sampling

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


def client(url, fake, **settings):
    settings.setdefault("backoff_s", AT_ONCE)
    return LLMClient(url, fake.model, **settings)


def ask(url, fake, sampling=SAMPLED, n=1, json_schema=None, **settings):
    """The choices and the client that asked for them, both after the end."""

    async def work():
        async with client(url, fake, **settings) as llm:
            try:
                return llm, await llm.chat(
                    MESSAGES, sampling, n=n, request_id="r", json_schema=json_schema
                )
            except LLMError as error:
                return llm, error

    return asyncio.run(work())


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)
