"""Run our binding for verl in verl's own classes (`make test-verl`)."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.servers import running_app, running_service
from tests.kits.real_tokenizers import write_tokenizer

ROOT = Path(__file__).parents[4]
VERL = ROOT / ".venv-verl/bin/python"
MANAGERS = ["naive", "dapo", "gdpo", "rate_limited"]
TEXT = "그 집은 빨간색이다."
#: Two prompts: one with two completions, one whose second completion was not scored.
REWARDS = [[0.0, -1.0, 3.0, 0.0], [0.0, 0.0, 0.0, 1.0], [-5.0, 7.0, 0.0, 0.0]]
MASK = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(not VERL.exists(), reason="no .venv-verl: `make env-verl` makes it"),
]


def _sick(status: int | None):
    """Return an app that answers every request with this status, or never."""

    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        if status is None:
            await asyncio.Event().wait()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    return app


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    tokenizer = write_tokenizer("qwen3", tmp_path_factory.mktemp("tokenizer"))
    with (
        running_service(FakeBackend("metricx")) as metricx,
        running_service(FakeBackend("xcomet")) as xcomet,
        running_app(_sick(429)) as too_many,
        running_app(_sick(500)) as broken,
        running_app(_sick(None)) as hanging,
    ):
        case = {
            "metricx": metricx,
            "xcomet": xcomet,
            "sick": {"429": too_many, "500": broken, "hang": hanging},
            "managers": MANAGERS,
            "tokenizer": str(tokenizer),
            "text": TEXT,
            "batch": [REWARDS, MASK, ["p", "p", "q"]],
        }
        process = subprocess.run(
            [VERL, "-W", "ignore", "-m", "tests.kits.trainer.verl_probe", json.dumps(case)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_reward_managers_log_the_reward_and_its_components(results):
    score = fake_score(TranslationSample(src="a", mt="가"), 25.0)
    expected = {"score": 5.0 - score, "metricx": score}
    for name in ("naive", "dapo", "gdpo"):
        answer = results["managers"][name]
        assert answer == {"reward_score": 5.0 - score, "reward_extra_info": expected}


def test_a_failed_score_leaves_each_manager_as_an_exception(results):
    refused = "UnsafeRewardManager"
    assert results["nan"] == dict.fromkeys(MANAGERS, "SampleError") | {"rate_limited": refused}
    assert results["managers"]["rate_limited"] == refused
    assert all(isinstance(answer, str) for answer in results["sick"].values()), results["sick"]


def test_the_agent_loop_rewards_each_token(results):
    tokens = results["tokens"]
    assert len(tokens["rewards"]) == len(tokens["ids"]) > 2
    sequence = tokens["extra"]["score"]
    assert tokens["rewards"][-1] == pytest.approx(sequence, abs=1e-6)
    assert math.isclose(tokens["reward_score"], sum(tokens["rewards"]), abs_tol=1e-5)


def test_the_agent_loop_raises_where_there_is_no_score(results):
    assert results["tokens_nan"] == "SampleError"
    assert all(isinstance(answer, str) for answer in results["tokens_sick"].values())


def test_advantages_keep_positions_and_center_groups(results):
    raw = [[1.0, 0.0, 1.0, None], [-1.0] * 4, [-5.0, 0.0, None, None]]
    values = [value for row in raw for value in row if value is not None]
    mean, deviation = fmean(values), pstdev(values)
    for row, expected in zip(results["advantages"], raw, strict=True):
        scaled = [0.0 if v is None else (v - mean) / (deviation + 1e-8) for v in expected]
        assert row == pytest.approx(scaled, abs=1e-6)


def test_configs_that_would_hide_a_failure_are_refused(results):
    checks = results["checks"]
    assert checks["documented"] == checks["tokens"] == ""
    assert checks["rate_limited"].startswith("reward.reward_manager: 'rate_limited'")
    assert checks["batch"].startswith("reward.reward_manager: 'batch'")
    assert checks["no_function"].startswith("reward.custom_reward_function.path: not set")
    assert checks["old_key"].startswith("custom_reward_function.path: verl 0.9 does not read it")
    assert "srckey" in checks["setting"]
    assert "reward_kwargs.reward_manager: expected 'naive'" in checks["manager_untold"]
    assert checks["tokens_grpo"].startswith("algorithm.adv_estimator: 'grpo' sums")
    assert checks["tokens_v0"].startswith("trainer.use_v1")
    assert checks["tokens_alone"].startswith("actor_rollout_ref.rollout.n")
