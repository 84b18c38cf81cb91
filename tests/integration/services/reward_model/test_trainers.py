"""Train with a real reward model: TRL, verl and OpenRLHF, unchanged, ask the demo's one over HTTP.

Each reward is compared with transformers' own forward of the completion.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import httpx
import pandas as pd
import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from scorekit.adapters.trl import reward_function
from services.reward_model.model import RewardModelBackend
from testing.servers import free_port, running_service, wait_until
from tests.kits import forked
from tests.kits.trainer.trl.runs import make_trainer
from tests.kits.trainer.verl.cases import ENVIRONMENT, VERL, probe

ROOT = Path(__file__).parents[4]
MODEL, POLICY = ROOT / "demo/models/reward", ROOT / "demo/models/policy"
#: A score in a batch differs from that alone by the order of sums.
NEAR = 1e-4


@pytest.fixture(scope="module")
def url():
    with running_service(RewardModelBackend(str(MODEL), device="cpu", matmul="torch")) as url:
        yield url


@pytest.fixture(scope="module")
def of_transformers():
    """Return a function that gives transformers' score of each (prompt, completion)."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, dtype=torch.float32)

    def scores(pairs: Sequence[tuple[str, str]]) -> list[float]:
        values = []
        for src, mt in pairs:
            turns = [("user", src), ("assistant", mt.strip())]
            chat = [{"role": role, "content": text} for role, text in turns]
            inputs = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
            with torch.inference_mode():
                values.append(model(**inputs).logits[0, 0].item())
        return values

    return scores


def group_norm(rewards: Sequence[float], size: int) -> list[float]:
    """Return GRPO's advantages of consecutive groups."""
    groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
    return [(r - fmean(group)) / stdev(group) for group in groups for r in group]


def test_grpo_of_trl_trains_on_the_models_scores(url, of_transformers, tmp_path):
    arguments = {"max_completion_length": 8, "log_completions": True}
    function = reward_function(url, src_key="src", name="rm")
    trainer = make_trainer(tmp_path, [function], arguments, has_tokens=False)
    before = [weights.detach().clone() for weights in trainer.model.parameters()]
    (tmp_path / "completions").mkdir(exist_ok=True)
    trainer.train()
    (path,) = (tmp_path / "completions").glob("*.parquet")
    table = pd.read_parquet(path)
    pairs = [
        (row["prompt"][0]["content"], row["completion"][0]["content"])
        for _, row in table.iterrows()
    ]
    expected = of_transformers(pairs)
    assert list(table["rm"]) == pytest.approx(expected, abs=NEAR)
    (line,) = (line for line in trainer.state.log_history if "loss" in line)
    assert line["reward"] == pytest.approx(fmean(expected), abs=NEAR)
    changes = zip(before, trainer.model.parameters(), strict=True)
    assert trainer.state.global_step == 1 and any((a != b).any() for a, b in changes)


TEXTS = ["파일을 저장합니다.", "창을 닫습니다.", "Save the file.", "저장 저장 저장"]
SOURCE = "Save the file."


@pytest.mark.verl
@pytest.mark.skipif(not VERL.exists(), reason="no .venv-verl: `make env-verl` makes it")
def test_verls_managers_and_its_grpo_get_the_models_scores(url, of_transformers, tmp_path):
    definition = tmp_path / "reward.yaml"
    component = {"service": url, "weight": 2.0, "offset": 1.0}
    definition.write_text(yaml.safe_dump({"components": {"rm": component}}))
    row = {"texts": TEXTS, "extra_info": {"src": SOURCE}}
    answers = probe(
        tmp_path,
        {
            "naive": ["managed", row | {"manager": "naive", "settings": {"url": [url]}}],
            "dapo": [
                "managed",
                row | {"manager": "dapo", "settings": {"definition": str(definition)}},
            ],
        },
    )
    expected = of_transformers([(SOURCE, text) for text in TEXTS])
    rewards = [answer["reward_score"] for answer in answers["naive"]]
    assert rewards == pytest.approx(expected, abs=NEAR)
    weighted = [answer["reward_score"] for answer in answers["dapo"]]
    assert weighted == pytest.approx([2.0 * (1.0 + score) for score in expected], abs=2 * NEAR)
    batch = {
        "rewards": [[0.0, reward] for reward in rewards],
        "mask": [[1, 1]] * len(rewards),
        "groups": ["p"] * len(rewards),
        "estimator": "grpo",
    }
    (tmp_path / "update").mkdir()
    advantages = probe(tmp_path / "update", {"grpo": ["advantages", batch]})["grpo"]
    of_tokens = [[value] * 2 for value in group_norm(expected, len(expected))]
    assert advantages == [pytest.approx(row, abs=1e-3) for row in of_tokens]


@pytest.mark.verl
@pytest.mark.skipif(not VERL.exists(), reason="no .venv-verl: `make env-verl` makes it")
def test_openrlhfs_rewards_and_its_advantages_are_the_models_scores(url, of_transformers, tmp_path):
    sources = ["Save the file.", "Close the window."]
    port = free_port()
    command = [sys.executable, "-m", "scorekit.adapters.openrlhf", "--url", url]
    bridge = forked.Popen(
        # This tokenizer puts a space into the prompt when it decodes.
        [*command, "--src-key", "src", "--turn-mark", "<ko>", "--port", str(port)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until(lambda: bridge.poll() is not None or _answers(f"{address}/health"))
        remote = f"{address}/get_reward"
        case = {"url": remote, "policy": str(POLICY), "sources": sources, "samples": 4}
        (tmp_path / "case.json").write_text(json.dumps(case))
        done = subprocess.run(
            [VERL, "-W", "ignore", "-m", "tests.kits.trainer.openrlhf_probe", "case.json"],
            cwd=tmp_path,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
        )
    finally:
        bridge.terminate()
        complaint = bridge.communicate(timeout=180)[1]
    assert done.returncode == 0, done.stderr[-4000:] + complaint
    answer = json.loads(done.stdout.splitlines()[-1])
    prompts = [source for source in sources for _ in range(4)]
    expected = of_transformers(list(zip(prompts, answer["completions"], strict=True)))
    assert len(set(expected)) > 4
    assert [row[0] for row in answer["rewards"]] == pytest.approx(expected, abs=NEAR)
    assert [row[0] for row in answer["logs"]["reward_model_score"]] == pytest.approx(
        expected, abs=NEAR
    )
    for row, advantage in zip(answer["advantages"], group_norm(expected, 4), strict=True):
        assert row == pytest.approx([advantage] * len(row), abs=1e-3)
    assert "OpenRLHF clips those outside -10 to 10" in complaint


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False
