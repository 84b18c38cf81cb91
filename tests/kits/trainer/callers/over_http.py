"""Reimplements how other trainers request rewards over HTTP: payload, retries, and use of the
answer.

Pauses between tries are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpx

OPENRLHF_TRIES, OPENRLHF_TIMEOUT_S = 5, 180.0
SLIME_TRIES, SLIME_TIMEOUT_S = 10, 120.0


def openrlhf_reward(urls: Iterable[str], query: str, prompt: str, label: Any) -> dict[str, Any]:
    """Return the reward fields of a rollout of OpenRLHF 0.11.2, one sample per call.

    urls: the next one gets the sample; the trainer cycles through its URLs. After a failure the
    fields stay as they were.
    """
    url = next(iter(urls))
    payload = {"query": [query], "prompts": [prompt], "labels": [label]}
    for _ in range(OPENRLHF_TRIES):
        try:
            response = httpx.post(url, json=payload, timeout=OPENRLHF_TIMEOUT_S)
            answer = response.raise_for_status().json()
        except (httpx.HTTPError, ValueError):
            continue
        scores = answer.get("scores")
        return {
            "reward": answer.get("rewards"),
            "scores": answer.get("rewards") if scores is None else scores,
            "extra_logs": answer.get("extra_logs") or {},
        }
    return {"reward": None, "scores": None, "extra_logs": {}}


def slime_remote_rm(url: str, prompt: Any, response: str, label: Any) -> Any:
    """Return the reward of a sample of slime: the JSON of the answer, whatever it is.

    Any error is retried, a 4xx too; the last one is raised.
    """
    payload = {"prompt": prompt, "response": response, "label": label}
    with httpx.Client(timeout=SLIME_TIMEOUT_S) as client:
        for left in reversed(range(SLIME_TRIES)):
            try:
                return client.post(url, json=payload).raise_for_status().json()
            except (httpx.HTTPError, ValueError):
                if not left:
                    raise
    raise AssertionError


async def verl_run_single(
    compute_score: Callable[..., Awaitable[dict[str, float]]], **sample: Any
) -> float:
    """Return the reward of a sample in verl's reward loop: awaited, without a time limit.

    An error of the function drops the sample from its group.
    """
    return (await compute_score(**sample))["score"]


async def verl_rate_limited(
    compute_score: Callable[..., Awaitable[dict[str, float]]], timeout_s: float, **sample: Any
) -> dict[str, Any]:
    """Return the reward of verl's rate-limited manager: 0 after a timeout or an error."""
    try:
        async with asyncio.timeout(timeout_s):
            return {"score": await verl_run_single(compute_score, **sample)}
    except TimeoutError:
        return {"score": 0.0, "timeout": True}
    except Exception:
        return {"score": 0.0, "error": True}
