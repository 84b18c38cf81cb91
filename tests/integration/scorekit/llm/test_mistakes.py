"""Check errors that a retry cannot fix: they end at once, with the provider's message."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import SecretStr

from scorekit.llm import LLMClient, LLMError, Sampling
from scorekit.llm.errors import OperatorMistake
from testing.servers import running_app
from tests.kits.llm import MESSAGES

SAID = "Check your plan and billing details."


def openai(code, type="error"):
    return {"error": {"message": SAID, "type": type, "param": None, "code": code}}


def google(*quotas, reason=None):
    """Return an error in Gemini's format, a list."""
    violations = [{"quotaMetric": "requests", "quotaId": quota} for quota in quotas]
    details = [
        {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": violations},
        {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "21s"},
        {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason},
    ]
    error = {"code": 429, "message": SAID, "status": "RESOURCE_EXHAUSTED", "details": details}
    return [{"error": error}]


def refused(status, body):
    """Return the error that the client raises, and the number of its requests."""
    app, bodies = FastAPI(), []

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        bodies.append(await request.json())
        return JSONResponse(body, status)

    async def work(url):
        key = SecretStr("sk-mine")
        async with LLMClient(
            f"{url}/v1", "m", api_key=key, max_attempts=3, backoff_s=(0.0,), dialect="openai"
        ) as llm:
            await llm.chat(MESSAGES, Sampling(max_tokens=8), request_id="r")

    with running_app(app) as url, pytest.raises((LLMError, OperatorMistake)) as error_info:
        asyncio.run(work(url))
    return error_info.value, len(bodies)


DAY, MINUTE = (
    f"GenerateRequestsPer{period}PerProjectPerModel-FreeTier" for period in ("Day", "Minute")
)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (429, openai("insufficient_quota", "insufficient_quota"), "quota"),
        (429, openai(None, "insufficient_quota"), "quota"),
        (400, openai("billing_hard_limit_reached"), "quota"),
        (429, openai("billing_not_active"), "quota"),
        (402, openai("unknown"), "quota"),
        (429, google(MINUTE, DAY), "quota"),
        (429, openai("invalid_api_key"), "key"),
        (403, openai("model_not_found"), "model"),
        (400, google(reason="API_KEY_INVALID"), "key"),
    ],
)
def test_what_the_operator_has_to_mend_ends_at_once_with_the_provider_s_word(status, body, kind):
    error, num_requests = refused(status, body)
    assert isinstance(error, OperatorMistake) and (error.kind, num_requests) == (kind, 1)
    assert kind == "key" or SAID in str(error)
    assert "\n" not in str(error) and "sk-mine" not in str(error)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (429, openai("rate_limit_exceeded", "requests")),
        (429, google(MINUTE)),
        (429, google()),
        (429, [{"error": {"details": [{"violations": "none"}, 7]}}]),
        (429, "slow down"),
        (503, google(DAY)),
    ],
)
def test_too_much_at_once_is_asked_again(status, body):
    error, num_requests = refused(status, body)
    assert isinstance(error, LLMError) and error.retryable and num_requests == 3
