"""Test `scorekit serve reward-model` as a user starts it: HTTP, many callers, mistakes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from scorekit.client import ScoringClient, SyncScoringClient
from scorekit.schemas import Failed, RewardScored
from services.reward_model.model import RewardModelBackend
from testing.checkpoints.reward import make_reward_model, reference
from testing.fake_reward import WEIGHTS, FakeReward
from testing.servers import PATIENCE_S, free_port, running_service, wait_ready
from tests.kits import forked

ROOT = Path(__file__).parents[4]


def start(*flags, torch=False, **environment):
    return forked.Popen(
        [sys.executable, "-m", "services.reward_model", "--cache", "memory", *map(str, flags)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        torch=torch,
    )


def test_the_process_gives_transformers_scores_and_ends_with_its_work_done(tmp_path):
    folder = make_reward_model(tmp_path / "rm", "qwen")
    chat = [{"role": "user", "content": "안녕?"}, {"role": "assistant", "content": "네."}]
    port = free_port()
    flags = ("--model", folder, "--port", port, "--threads", 1, "--matmul", "torch")
    process = start(*flags, torch=True, REWARD_MODEL_DEVICE="cpu")
    try:
        wait_ready(f"http://127.0.0.1:{port}")
        with SyncScoringClient(f"http://127.0.0.1:{port}") as client:
            first, text, translation = client.score(
                [{"messages": chat}, {"text": "a"}, {"src": "안녕?", "mt": "네."}]
            )
            assert isinstance(first, RewardScored) and isinstance(text, RewardScored)
            assert first.score == pytest.approx(reference(folder, chat)[0], abs=1e-4, rel=1e-5)
            assert text.score == pytest.approx(reference(folder, text="a")[0], abs=1e-4, rel=1e-5)
            assert translation.score == pytest.approx(first.score, abs=1e-5)
            assert first.labels == {"reward": first.score}
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0 and "안녕" not in stderr
    finally:
        process.kill()


def test_mistakes_are_one_line_and_exit_code_2(tmp_path):
    folder = make_reward_model(tmp_path / "rm", "llama")
    for flags, words in [
        (["--model", tmp_path / "none"], "no such folder"),
        (["--model", tmp_path], "no config.json"),
        (["--model", folder, "--weights", "a"], "LABEL=NUMBER"),
        (["--model", folder, "--prompt", "none.yaml"], "--prompt"),
        (["--model", folder, "--chat-template", tmp_path / "none"], "--chat-template"),
        (["--model", folder, "--dtype", "int8"], "--dtype"),
    ]:
        process = start(*flags)
        _, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 2 and stderr.startswith("error: "), stderr
        assert stderr.count("\n") == 1 and words in stderr


def test_a_service_whose_upstream_is_away_starts_and_says_so_in_a_line():
    upstream = f"http://127.0.0.1:{free_port()}"
    process = start("--upstream", upstream, "--model", "rm", "--port", 0)
    end = threading.Timer(PATIENCE_S, process.kill)  # and with it its lines
    end.start()
    try:
        entry = json.loads(next(line for line in process.stderr if "upstream_" in line))
    finally:
        end.cancel()
        process.kill()
    assert (entry["event"], entry["upstream"]) == ("upstream_does_not_answer", upstream)
    assert "samples fail with `upstream` until it answers" in entry["until"]


def test_200_callers_share_batches_and_each_gets_its_own_score(tmp_path):
    folder = make_reward_model(tmp_path, "llama")
    samples = [
        {
            "messages": [
                {"role": "user", "content": f"Is {k} more?"},
                {"role": "assistant", "content": "Yes. " * (k % 7)},
            ]
        }
        for k in range(200)
    ]
    with running_service(RewardModelBackend(str(folder), device="cpu", matmul="torch")) as url:

        async def ask_all():
            async with ScoringClient(url, max_in_flight=200) as client:
                await client.limits()
                return await asyncio.gather(*(client.score([sample]) for sample in samples))

        answers = asyncio.run(ask_all())
        metrics = httpx.get(f"{url}/metrics").text
    assert all(isinstance(result, RewardScored) for (result,) in answers)
    for index in range(0, 200, 23):
        expected = reference(folder, samples[index]["messages"])[0]
        assert answers[index][0].score == pytest.approx(expected, abs=1e-4, rel=1e-5)
    (batches,) = (
        float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("scorekit_batch_samples_count")
    )
    assert batches < 200


def test_a_failure_stands_beside_its_siblings_and_the_cache_checks_what_it_returns():
    fake = FakeReward()
    with running_service(fake) as url:
        samples = [
            {"text": "good"},
            {"text": "nan"},
            {"messages": []},
            {"messages": [{"role": "human", "content": "a"}]},
            {"text": "a", "src": "b", "mt": "c"},
            {"src": "b"},
            {"text": "word " * 65},
        ]
        with SyncScoringClient(url) as client:
            results = client.score(samples)
            assert client.score(samples[:1])[0].cached
        info = httpx.get(f"{url}/v1/info").json()
    assert [r.error.type if isinstance(r, Failed) else "ok" for r in results] == [
        *("ok", "non_finite", "invalid_input", "invalid_input", "invalid_input"),
        *("invalid_input", "overlong"),
    ]
    assert "the model's output for verbose is nan" in results[1].error.message
    assert info["labels"] == WEIGHTS and info["has_chat_template"] and info["higher_is_better"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"role": "user", "content": "a", "name": "b"},
            "samples.0.messages.0: 'name' is not a known field; there are role, content",
        ),
        (
            {"role": "user", "content": None},
            "samples.0.messages.0.content: Input should be a valid string",
        ),
        ({"role": "user"}, "samples.0.messages.0.content: Field required"),
    ],
)
def test_a_turn_of_another_shape_is_named_with_the_fields_of_a_turn(message, words):
    with running_service(FakeReward()) as url:
        body = {"samples": [{"messages": [message]}]}
        refused = httpx.post(f"{url}/v1/score", json=body)
    assert refused.status_code == 422 and refused.json()["error"]["message"] == words


def test_documents_are_ranked_by_the_models_score_and_the_model_is_named():
    fake = FakeReward()
    documents = ["No.", "It is.", "Who knows?", "It is."]
    with running_service(fake) as url:
        with SyncScoringClient(url) as client:
            scores = [r.score for r in client.score([{"src": "q", "mt": d} for d in documents])]
        body = {"query": "q", "documents": documents, "model": "owner/fake"}
        answer = httpx.post(f"{url}/v1/rerank", json=body).json()
        objects = [{"text": document} for document in documents]
        same = httpx.post(f"{url}/v1/rerank", json=body | {"documents": objects}).json()
        titled = httpx.post(
            f"{url}/v1/rerank", json=body | {"documents": ["a", {"text": "b", "title": "c"}]}
        )
        refused = httpx.post(f"{url}/v1/rerank", json=body | {"documents": ["a", "nan"]})
        other = httpx.post(f"{url}/v1/rerank", json=body | {"model": "another"})
        models = httpx.get(f"{url}/v1/models").json()
    order = sorted(range(4), key=lambda index: -scores[index])
    assert [row["index"] for row in answer["results"]] == order
    assert [row["relevance_score"] for row in answer["results"]] == [scores[k] for k in order]
    assert same == answer  # clients of Jina and Cohere send objects, too
    words = "documents.1: Input should be a valid string"
    assert titled.status_code == 422 and titled.json()["error"]["message"] == words
    assert refused.status_code == 500
    assert "documents.1: non_finite" in refused.json()["error"]["message"]
    assert (
        other.status_code == 422 and "another one is asked for" in other.json()["error"]["message"]
    )
    assert models["data"][0]["id"] == "fake" and models["data"][0]["max_model_len"] == 64
