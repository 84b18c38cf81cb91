"""Provide fixtures for role-play runs: a policy, turns, an embedding server and its anchors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scorekit.config import check_config
from tests.kits.trainer.roleplay import NgramServer, ngram_server, turn, write_policy, write_turns
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.config_data import RoleplayData
from trainer.roleplay.data import load_turns
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.similarity import open_similarity


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Holds the files that all runs read.

    anchors: a calibration.json of the server.
    """

    folder: Path
    policy: Path
    train: Path
    held_out: Path
    anchors: Path
    server: NgramServer

    def config(self, run_dir: Path, **changes: Any) -> RoleplayConfig:
        """Return the config of a short run.

        changes: sections, or keys of them as `grpo__max_steps`."""
        data: dict[str, Any] = {
            "task": "roleplay",
            "data": {"train": str(self.train), "eval": str(self.held_out)},
            "policy": {"path": str(self.policy)},
            "reward": {
                "embedding_model": self.server.url,
                "calibration": str(self.anchors),
            },
            "grpo": {
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "num_generations": 4,
                "max_completion_length": 12,
                "learning_rate": 1e-4,
                "max_steps": 2,
            },
            "eval": {"eval_every_n_updates": 0},
            "start": {"sample_prompts": 2},
            "misc": {"run_dir": str(run_dir), "device": "cpu", "save_every_n_updates": 1},
        }
        for key, value in changes.items():
            section, _, name = key.partition("__")
            data[section][name] = value
        return check_config(RoleplayConfig, data, "test")


@pytest.fixture(scope="session")
def run_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFiles]:
    folder = tmp_path_factory.mktemp("roleplay")
    policy = write_policy(folder / "policy")
    train = write_turns(folder / "train.jsonl", [turn(k) for k in range(6)])
    held_out = write_turns(folder / "eval.jsonl", [turn(k) for k in range(100, 112)])
    many = write_turns(folder / "many.jsonl", [turn(k) for k in range(40)])
    with ngram_server() as server:
        cfg = RewardConfig(embedding_model=server.url)
        turns = load_turns(str(many), RoleplayData())
        open_similarity(cfg, turns, folder).embedder.close()
        yield RunFiles(folder, policy, train, held_out, folder / "calibration.json", server)
