"""Test `scorekit serve reward-model --upstream` with a real vLLM: its scores are transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from scorekit.client import SyncScoringClient
from scorekit.schemas import Failed, RewardScored
from testing.checkpoints.reward import Family, make_reward_model, reference
from testing.processes import running_service
from tests.kits.vllm import CONTEXT, KEY, NAME, running_vllm

pytestmark = pytest.mark.vllm

CHATS = [
    [
        {"role": "user", "content": "Is the house red, and who lives there?"},
        {"role": "assistant", "content": "집은 빨간색이다. " * turns},
    ]
    for turns in range(1, 9)
]
#: vLLM's kernels on a CPU and those of transformers add in another order.
NEAR = 1e-4


def outputs(results: Sequence[object]) -> list[list[float]]:
    scored = [result for result in results if isinstance(result, RewardScored)]
    assert len(scored) == len(results), results
    return [list(result.labels.values()) for result in scored]


@pytest.mark.parametrize(
    ("family", "labels"), [("llama", ("reward",)), ("qwen", ("helpful", "verbose"))]
)
def test_a_classifier_at_vllm_scores_as_transformers_does(
    family: Family, labels: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM's attention on a CPU takes no head below 32.
    folder = make_reward_model(
        tmp_path / "model", family, labels=labels, hidden=128, max_length=CONTEXT
    )
    monkeypatch.setenv("REWARD_MODEL_UPSTREAM_API_KEY", KEY)
    weights = ",".join(f"{label}={1 - index}" for index, label in enumerate(labels))
    chats = [{"messages": chat} for chat in CHATS]
    texts = [{"text": chat[1]["content"]} for chat in CHATS]
    of_chats = [reference(folder, chat) for chat in CHATS]
    of_texts = [reference(folder, text=chat[1]["content"]) for chat in CHATS]
    with running_vllm(folder, tmp_path / "vllm.log") as url:
        address = url.removesuffix("/v1")
        for api in ("classify", "pooling"):
            flags = ("--upstream", address, "--model", NAME, "--upstream-api", api)
            (tmp_path / api).mkdir()
            service = running_service("reward_model", tmp_path / api, *flags, "--weights", weights)
            with service as scores_url, SyncScoringClient(scores_url) as client:
                results = client.score([*chats, *texts])
                (long,) = client.score([{"text": "word " * 2 * CONTEXT}])
            for got, expected in zip(outputs(results), of_chats + of_texts, strict=True):
                assert got == pytest.approx(expected, abs=NEAR), api
            assert results[0].score == results[0].labels[labels[0]]
            assert isinstance(long, Failed) and long.error.type == "overlong"
        if len(labels) == 1:  # vLLM scores pairs by a model of one label alone
            check_pairs(folder, address, tmp_path)


def check_pairs(folder: Path, upstream: str, logs: Path) -> None:
    """Check pairs at `/score`, and documents of `/v1/rerank`, which are pairs, too."""
    query, documents = CHATS[0][0]["content"], [chat[1]["content"] for chat in CHATS]
    expected = [reference(folder, text=query, pair=text)[0] for text in documents]
    flags = ("--upstream", upstream, "--model", NAME, "--upstream-api", "score")
    (logs / "score").mkdir()
    with running_service("reward_model", logs / "score", *flags) as url:
        with SyncScoringClient(url) as client:
            results = client.score([{"text": query, "pair": text} for text in documents])
        body = {"query": query, "documents": documents}
        ranked = httpx.post(f"{url}/v1/rerank", json=body).json()["results"]
    assert [row[0] for row in outputs(results)] == pytest.approx(expected, abs=NEAR)
    order = sorted(range(len(documents)), key=lambda index: -expected[index])
    assert [row["index"] for row in ranked] == order
