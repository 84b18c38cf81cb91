"""Test TRL's GRPOTrainer with token advantages: its update is our trainer's, on real services."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from scorekit.credit import align_completion, compute_advantages, spans_to_token_rewards
from scorekit.rewards.definition import SeverityWeights
from scorekit.schemas import ErrorSpan, TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.servers import running_service
from tests.kits.trainer.runs import rollout
from tests.kits.trainer.trl.runs import MarkingBackend, make_trainer, reward_funcs
from trainer.rl.advantage import pad_rows, token_advantages
from trainer.rl.config import RLConfig
from trainer.rl.rollout import action_masks, rollout_logprobs
from trainer.rl.update import update_policy

WEIGHTS = SeverityWeights().model_dump()
#: Largest distance of a weight from our trainer's after one update.
CLOSE = 1e-6
#: A gradient norm that is not reached: clipping would hide a wrong scale of the loss.
UNCLIPPED = 1e6


@pytest.fixture(scope="module")
def metricx():
    with running_service(FakeBackend("metricx")) as url:
        yield url


@pytest.fixture(scope="module")
def marking():
    """Serve a backend that has no score for some texts."""
    with running_service(MarkingBackend(fails=0.3)) as url:
        yield url


class Recorded:
    """Keeps what the trainer trained on: prompts, completions, and the source of each."""

    def __init__(self, trainer: Any) -> None:
        self.rows: list[tuple[list[int], list[int], str]] = []
        self.output: dict[str, Any] = {}
        self._generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self

    def __call__(self, inputs: Any) -> Any:
        self.output = output = self._generate(inputs)
        for index, row in enumerate(inputs):
            prompt, completion = (
                output[f"{name}_ids"][index][output[f"{name}_mask"][index].bool()].tolist()
                for name in ("prompt", "completion")
            )
            self.rows.append((prompt, completion, row["src"]))
        return output


def expected_update(recorded: Recorded, model: Any, tokenizer: Any, **options: Any) -> set[int]:
    """Make our trainer's update of the recorded batch, and return the rows without a reward.

    Rewards, credit and advantages are computed from the texts, not by the adapter.
    """
    rollouts, rewards, token_rewards, left_out = [], [], [], set()
    for index, (prompt, completion, src) in enumerate(recorded.rows):
        text, offsets = _alignment(tokenizer, completion)
        sample = TranslationSample(src=src, mt=text)
        outcome = MarkingBackend(fails=0.3)._outcome(sample)
        if outcome["score"] != outcome["score"]:
            left_out.add(index)
            continue
        spans = [ErrorSpan.model_validate(span) for span in outcome["error_spans"]]
        rollouts.append(rollout(prompt, completion, text, group=index // 4))
        rewards.append(5.0 - fake_score(sample, 25.0) + 10.0 * outcome["score"])
        token_rewards.append(spans_to_token_rewards(text, offsets, spans, WEIGHTS))
    for row, logprobs in zip(
        rollouts, rollout_logprobs(rollouts, model, 0.8, 0, 4096), strict=True
    ):
        row.old_logprobs = logprobs
    advantages = token_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        pad_rows(token_rewards),
        action_masks(rollouts),
        [row.group for row in rollouts],
        **options,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cfg = RLConfig(ppo_epochs=1, kl_coef=0.0, max_grad_norm=UNCLIPPED)
    update_policy(
        rollouts, advantages, optimizer, cfg, policy_model=model, temperature=0.8, pad_id=0
    )
    return left_out


def _alignment(tokenizer: Any, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
    alignment = align_completion(tokenizer, ids, None, [tokenizer.eos_token_id])
    return alignment.text, alignment.offsets


@pytest.mark.parametrize(
    ("arguments", "options", "norms"),
    [
        ({}, {}, {}),
        (
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
            {"advantage_norm": "grpo", "advantage_eps": 1e-4},
            {"norm": "grpo", "eps": 1e-4},
        ),
        ({"loss_type": "bnpo"}, {"center_groups": True}, {"center": True}),
    ],
    ids=["batch", "grpo in micro-batches", "centered"],
)
def test_an_update_is_that_of_our_trainer(
    metricx, marking, tmp_path, arguments, options, norms
) -> None:
    functions = reward_funcs(metricx, marking)
    arguments = {"reward_weights": [1.0, 10.0], "max_grad_norm": UNCLIPPED, **arguments}
    trainer = make_trainer(tmp_path, functions, arguments, **options)
    recorded = Recorded(trainer)
    start = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    got = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    model = trainer.model.eval()
    model.load_state_dict(start, strict=False)
    left_out = expected_update(recorded, model, trainer.processing_class, **norms)
    assert 0 < len(left_out) < len(recorded.rows) == 16
    moved = max((got[name] - start[name]).abs().max().item() for name in start)
    distance = max(
        (got[name] - weight).abs().max().item() for name, weight in model.named_parameters()
    )
    print(f"moved {moved:.3g}, distance {distance:.3g}")
    assert moved > 1000 * CLOSE and distance < CLOSE, (moved, distance)
    (coverage,) = (line["coverage"] for line in trainer.state.log_history if "coverage" in line)
    assert coverage == 1 - len(left_out) / 16
    for index in left_out:
        assert not recorded.output["advantages"][index].any()
        assert not recorded.output["tool_mask"][index].any()


@pytest.mark.slow
def test_two_processes_normalize_over_the_batch_of_both(metricx, marking, tmp_path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    module = ["-m", "tests.kits.trainer.trl.rank_tokens", str(tmp_path), metricx, marking]
    done = subprocess.run([*command, *module], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (0, 1))
    assert first["rewards"] == second["rewards"] and len(first["rewards"]) == 8
    sums = [sum(row) for row in first["rewards"]]  # NaN in a row without a reward
    rewards = [None if math.isnan(reward) else reward for reward in sums]
    assert None in rewards
    expected = compute_advantages(
        rewards,
        first["token_rewards"] + second["token_rewards"],
        first["valid"] + second["valid"],
        [0] * 4 + [1] * 4,
    )
    for row, expected_row in zip(first["advantages"] + second["advantages"], expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-5, abs=1e-6)
    assert first["num_items"] == second["num_items"] == first["trained"] + second["trained"]
    assert first["trained"] and second["trained"]
