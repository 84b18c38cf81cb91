"""Run our binding in verl's own classes, in the environment of `make env-verl`.

.venv-verl/bin/python -m tests.kits.trainer.verl.probe CALLS.json

CALLS.json: {"tokenizer": FOLDER, "calls": {NAME: [FUNCTION, {ARGUMENT: VALUE}]}}, with a function
of this file. It prints one JSON object: what each call returns, or "TYPE: MESSAGE" of the exception
that leaves it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from scorekit.adapters import verl_run
from scorekit.adapters.verl_run import check_config
from scorekit.adapters.verl_tokens import TokenRewardLoop

ROOT = Path(__file__).parents[4]
FUNCTION = "reward.custom_reward_function"
ROW = {"src": "a"}
TOKENIZER: Any = None


def verl_config(overrides: list[str]) -> Any:
    """Return verl's own config with overrides."""
    folder = str(Path(verl.__file__).parent / "trainer/config")
    with initialize_config_dir(folder, version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def reward_config(manager: str, settings: dict[str, Any], overrides: list[str]) -> Any:
    """Return a config with the documented keys of our reward function."""
    keys = [
        f"{FUNCTION}.path=pkg://scorekit.adapters.verl",
        f"{FUNCTION}.name=compute_score",
        f"+{FUNCTION}.reward_kwargs.reward_manager=${{reward.reward_manager.name}}",
        f"reward.reward_manager.name={manager}",
    ]
    config = verl_config([*keys, *overrides])
    for name, value in settings.items():
        OmegaConf.update(config, f"{FUNCTION}.reward_kwargs.{name}", value, force_add=True)
    return config


def row(text: str, extra_info: dict[str, Any]) -> DataProto:
    """Return one sampled row as verl's agent loop hands it to a reward manager."""
    ids = torch.tensor([TOKENIZER(text)["input_ids"]])
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[1]]),
            "responses": ids,
            "attention_mask": torch.ones(1, 1 + ids.shape[1], dtype=torch.long),
        },
        non_tensors={
            "data_source": np.array(["wmt"], dtype=object),
            "reward_model": np.array([{"ground_truth": "ref"}], dtype=object),
            "extra_info": np.array([dict(extra_info)], dtype=object),
        },
    )


def managed(
    manager: str,
    settings: dict[str, Any],
    texts: list[str],
    extra_info: dict[str, Any] = ROW,
    at_once: bool = True,
) -> Any:
    """Return a reward manager's answers for texts that arrive at once, or one after another."""
    config = reward_config(manager, settings, [])
    manager_object = load_reward_manager(config, TOKENIZER)

    async def run() -> list[Any]:
        limit = asyncio.Semaphore(len(texts) if at_once else 1)

        async def run_one(text: str) -> Any:
            async with limit:
                return await manager_object.run_single(row(text, extra_info))

        results = await asyncio.gather(*map(run_one, texts), return_exceptions=True)
        return [answer_of(result) for result in results]

    return manager_object.loop.run_until_complete(run())


def answer_of(result: Any) -> Any:
    """Return a result, or "TYPE: MESSAGE" of an exception."""
    return f"{type(result).__name__}: {result}" if isinstance(result, BaseException) else result


class TextServer:
    """Stands in for verl's sampler: answers with the next of some texts."""

    def __init__(self, texts: list[str], ends: bool = True) -> None:
        self.answers = [self._ids(text, ends) for text in texts]

    @staticmethod
    def _ids(text: str, ends: bool) -> list[int]:
        return [*TOKENIZER(text)["input_ids"], *([TOKENIZER.eos_token_id] if ends else [])]

    async def generate(self, **request: Any) -> TokenOutput:
        """Return the completion."""
        ids = self.answers.pop(0)
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids))


def tokens(
    texts: list[str],
    settings: dict[str, Any],
    ends: bool = True,
    extra_info: dict[str, Any] = ROW,
    **options: Any,
) -> Any:
    """Return what our agent loop gives for each text, one after another.

    settings, options: those of the loop's entry, which verl reads by OmegaConf."""
    config = verl_config([])
    server = TextServer(texts, ends)

    async def run_one() -> Any:
        loop = TokenRewardLoop(
            DictConfigWrap(config),
            server,
            TOKENIZER,
            None,
            RLHFDataset,
            DictConfigWrap(config.data),
            **OmegaConf.create({"settings": settings, **options}),
        )
        output = await loop.run(
            {},
            raw_prompt=[{"role": "user", "content": "a"}],
            reward_model={"ground_truth": "ref"},
            extra_info=extra_info,
        )
        fields = output.as_dict()
        return {
            "ids": fields["responses"].tolist(),
            "rewards": fields["rm_scores"].tolist(),
            "mask": fields["response_mask"].tolist(),
            "reward_score": output.reward_score,
            "extra": fields["extra_fields"]["reward_extra_info"],
        }

    async def run() -> list[Any]:
        results: list[Any] = []
        for _ in texts:
            results += await asyncio.gather(run_one(), return_exceptions=True)
        return [answer_of(result) for result in results]

    return asyncio.run(run())


class Queue:
    """Stands in for verl's TransferQueue: keeps the last tag and fields of each key."""

    def __init__(self) -> None:
        self.tags: dict[str, Any] = {}
        self.fields: dict[str, Any] = {}

    def init(self) -> None:
        """Connect to nothing."""

    async def async_kv_put(self, key: str, partition_id: str, tag: Any) -> None:
        """Keep a tag."""
        self.tags[key] = tag["status"]

    async def async_kv_batch_put(
        self, keys: list[str], fields: Any, tags: Any, partition_id: str
    ) -> None:
        """Keep fields."""
        for index, key in enumerate(keys):
            self.fields[key] = fields["rm_scores"][index].tolist()


def group(texts: list[str], settings: dict[str, Any], loop_file: str | None = None) -> Any:
    """Return what verl's worker keeps of one prompt's completions: its status, and `rm_scores`.

    loop_file: of our agent loop; without it our reward function gives the reward.
    """
    keys = [
        f"actor_rollout_ref.model.path={ROOT / 'demo/models/policy'}",
        f"actor_rollout_ref.rollout.n={len(texts)}",
        "actor_rollout_ref.rollout.name=vllm",
    ]
    if loop_file is not None:
        keys.append(f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loop_file}")
    config = reward_config("naive", settings, keys)
    queue = agent_loop_tq.tq = Queue()
    worker_class = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class

    async def run() -> Any:
        manager = load_reward_manager(config, TOKENIZER)
        handle = SimpleNamespace(compute_score=SimpleNamespace(remote=manager.run_single))
        worker = worker_class(config, TextServer(texts), None, [handle])
        worker.tokenizer = TOKENIZER
        prompt = {
            "uid": "p",
            "agent_name": "scorekit_tokens" if loop_file else "single_turn_agent",
            "raw_prompt": [{"role": "user", "content": "a"}],
            "data_source": "wmt",
            "reward_model": {"ground_truth": "ref"},
            "extra_info": dict(ROW),
            "global_steps": 1,
            "index": 0,
        }
        trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
        await worker._run_prompt(prompt, {}, trajectory)
        return {"status": queue.tags["p"], "rm_scores": queue.fields}

    return asyncio.run(run())


def advantages(
    rewards: list, mask: list, groups: list[str], estimator: str = "scorekit_tokens"
) -> list:
    """Return verl's advantages."""
    data = DataProto.from_dict(
        tensors={
            "token_level_rewards": torch.tensor(rewards),
            "response_mask": torch.tensor(mask),
        },
        non_tensors={"uid": np.array(groups, dtype=object)},
    )
    scored = compute_advantage(data, estimator, config=verl_config([]).algorithm)
    result: list = scored.batch["advantages"].tolist()
    return result


def validation_means(values: list[float | None]) -> Any:
    """Return the means that verl's validation takes of a component of samples of one prompt."""
    infos = {"reward": [0.0] * len(values), "part": values}
    metrics = process_validation_metrics(["wmt"] * len(values), ["p"] * len(values), infos)
    return {name: value for name, value in metrics["wmt"]["part"].items() if "mean@" in name}


def checked(settings: dict[str, Any], overrides: list[str], manager: str = "naive") -> str:
    """Check a config with our reward function."""
    config = reward_config(manager, settings, overrides)
    check_config(OmegaConf.to_container(config, resolve=True))
    return ""


def checked_plainly(overrides: list[str]) -> str:
    """Check a config with nothing but overrides."""
    check_config(OmegaConf.to_container(verl_config(overrides), resolve=True))
    return ""


def started(overrides: list[str]) -> Any:
    """Return what the command hands to Ray for all of verl's processes."""
    handed: dict[str, Any] = {}

    def stop(**arguments: Any) -> None:
        handed.update(arguments)
        raise SystemExit("ray would start now")

    vars(ray)["init"] = stop
    sys.argv = ["verl_run", *overrides]
    try:
        verl_run.main()
    except SystemExit as error:
        return {"exit": str(error), "variables": handed["runtime_env"]["env_vars"]}


def main() -> None:
    """Print the results of all calls."""
    global TOKENIZER
    case = json.loads(Path(sys.argv[1]).read_text())
    TOKENIZER = AutoTokenizer.from_pretrained(case["tokenizer"])
    results = {}
    for name, (function, arguments) in case["calls"].items():
        try:
            results[name] = globals()[function](**arguments)
        except BaseException as error:
            results[name] = answer_of(error)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
