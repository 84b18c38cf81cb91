"""Run our binding in verl's own classes, in the environment of `make env-verl`.

.venv-verl/bin/python -m tests.kits.trainer.verl_probe '{"metricx": URL, "xcomet": URL, ...}'

It prints one JSON object with what verl made of each case.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from scorekit.adapters.verl_run import check_config
from scorekit.adapters.verl_tokens import TokenRewardLoop
from scorekit.errors import UserError

FUNCTION = "reward.custom_reward_function"
TRUTH = "Das Haus ist rot."
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop=scorekit_tokens"
LOOP_FILE = "actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/verl/agent_loops.yaml"


def verl_config(*overrides: str) -> Any:
    """Return verl's own config with overrides."""
    folder = str(Path(verl.__file__).parent / "trainer/config")
    with initialize_config_dir(folder, version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def function_overrides(url: str) -> list[str]:
    """Return the documented keys of our reward function."""
    return [
        f"{FUNCTION}.path=pkg://scorekit.adapters.verl",
        f"{FUNCTION}.name=compute_score",
        f"+{FUNCTION}.reward_kwargs.url={url}",
        f"+{FUNCTION}.reward_kwargs.deadline_s=2",
        f"+{FUNCTION}.reward_kwargs.reward_manager=${{reward.reward_manager.name}}",
    ]


def row(tokenizer: Any, text: str) -> DataProto:
    """Return one sampled row as verl's agent loop hands it to a reward manager."""
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[1]]),
            "responses": ids,
            "attention_mask": torch.ones(1, 1 + ids.shape[1], dtype=torch.long),
        },
        non_tensors={
            "data_source": np.array(["wmt"], dtype=object),
            "reward_model": np.array([{"ground_truth": TRUTH}], dtype=object),
            "extra_info": np.array([{"src": "a"}], dtype=object),
        },
    )


def managed(tokenizer: Any, manager: str, url: str, text: str, *more: str) -> Any:
    """Return a reward manager's answer, or the name of the exception that left it."""
    config = verl_config(*function_overrides(url), f"reward.reward_manager.name={manager}", *more)
    manager_object = load_reward_manager(config, tokenizer)
    try:
        return manager_object.loop.run_until_complete(
            manager_object.run_single(row(tokenizer, text))
        )
    except BaseException as error:
        return type(error).__name__


class FixedServer:
    """Stands in for verl's sampler: answers with given ids."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    async def generate(self, **request: Any) -> TokenOutput:
        """Return the completion."""
        return TokenOutput(token_ids=self.ids, log_probs=[-1.0] * len(self.ids))


def token_rewards(tokenizer: Any, url: str, text: str) -> Any:
    """Return the ids and the `rm_scores` of our agent loop, or the name of its exception."""
    config = verl_config(LOOP, LOOP_FILE)
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    async def run() -> Any:
        loop = TokenRewardLoop(
            DictConfigWrap(config),
            FixedServer(ids),
            tokenizer,
            None,
            RLHFDataset,
            DictConfigWrap(config.data),
            credit="examples.verl.credit:assign_credit",
            severity_weights={"MINOR": -1.0, "MAJOR": -5.0, "CRITICAL": -10.0},
            settings={"url": url, "deadline_s": 2},
        )
        return await loop.run(
            {},
            raw_prompt=[{"role": "user", "content": "a"}],
            reward_model={"ground_truth": TRUTH},
            extra_info={"src": "a"},
        )

    try:
        output = asyncio.run(run())
    except Exception as error:
        return type(error).__name__
    fields = output.as_dict()
    return {
        "ids": fields["responses"].tolist(),
        "rewards": fields["rm_scores"].tolist(),
        "reward_score": output.reward_score,
        "extra": fields["extra_fields"]["reward_extra_info"],
    }


def advantages(rewards: list, mask: list, groups: list[str]) -> list:
    """Return verl's advantages with our estimator."""
    data = DataProto.from_dict(
        tensors={
            "token_level_rewards": torch.tensor(rewards),
            "response_mask": torch.tensor(mask),
        },
        non_tensors={"uid": np.array(groups, dtype=object)},
    )
    config = verl_config().algorithm
    scored = compute_advantage(data, "scorekit_tokens", config=config)
    result: list = scored.batch["advantages"].tolist()
    return result


def checked(*overrides: str) -> str:
    """Return what the check of a config says, or an empty text."""
    try:
        check_config(OmegaConf.to_container(verl_config(*overrides), resolve=True))
    except UserError as error:
        return str(error)
    return ""


def check_results(url: str) -> dict[str, str]:
    """Return what the check says of several configs."""
    ours = function_overrides(url)
    tokens = [LOOP, LOOP_FILE, "actor_rollout_ref.rollout.n=4"]
    return {
        "documented": checked(*ours),
        "rate_limited": checked(*ours, "reward.reward_manager.name=rate_limited"),
        "batch": checked(*ours, "reward.reward_manager.name=batch"),
        "no_function": checked(),
        "old_key": checked(*ours, "custom_reward_function.path=scorekit/adapters/verl.py"),
        "setting": checked(*ours, f"+{FUNCTION}.reward_kwargs.srckey=src"),
        "manager_untold": checked(*ours[:4]),
        "tokens": checked(*tokens, "algorithm.adv_estimator=scorekit_tokens"),
        "tokens_grpo": checked(*tokens, "algorithm.adv_estimator=grpo"),
        "tokens_v0": checked(
            *tokens, "algorithm.adv_estimator=scorekit_tokens", "trainer.use_v1=false"
        ),
        "tokens_alone": checked(LOOP, LOOP_FILE, "algorithm.adv_estimator=scorekit_tokens"),
    }


def main() -> None:
    """Print the results of all cases."""
    case = json.loads(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(case["tokenizer"])
    good = case["metricx"]
    results = {
        "managers": {name: managed(tokenizer, name, good, "가") for name in case["managers"]},
        "nan": {name: managed(tokenizer, name, good, "nan") for name in case["managers"]},
        "sick": {
            name: managed(tokenizer, "naive", url, "가") for name, url in case["sick"].items()
        },
        "tokens": token_rewards(tokenizer, case["xcomet"], case["text"]),
        "tokens_nan": token_rewards(tokenizer, case["xcomet"], "nan"),
        "tokens_sick": {
            name: token_rewards(tokenizer, url, "가") for name, url in case["sick"].items()
        },
        "advantages": advantages(*case["batch"]),
        "checks": check_results(good),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
