"""TRL's GRPOTrainer with what it leaves out: exact resume in any epoch, whole checkpoints, figures
of groups and of time. What is overridden is TRL 1.16's and transformers' own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from trainer.roleplay.turn import Message
from trainer.runs.checkpoints.checkpoint import (
    RandomState,
    State,
    put_random_state,
    random_state,
)
from trainer.runs.checkpoints.sealed import SealedCheckpoints
from trainer.runs.on_trl import learn_in_float32


class RoleplayTrainer(SealedCheckpoints, GRPOTrainer):
    """GRPOTrainer for a run's folder.

    checkpoints: their folder. keep: how many stay. state_of: what state.json of a checkpoint says,
    but its files. look: evaluates the policy after an update. epochs_done: whole passes over the
    training turns before this process.
    """

    def __init__(
        self,
        *args: Any,
        checkpoints: Path,
        keep: int,
        state_of: Callable[[int], State],
        look: Callable[[int], dict[str, Any]],
        epochs_done: int,
        **kwargs: Any,
    ) -> None:
        self.keep_in(checkpoints, keep, state_of)
        self._look, self._epochs_done = look, epochs_done
        #: Seconds since the last line of the log: of sampling, and of the rewards.
        self.seconds = {"rollout_s": 0.0, "reward_s": 0.0}
        #: Whether completions were sampled since then.
        self.sampled = False
        #: Of the end of the last update, which a failing sampling moves on: random states, and
        #: how many tokens were seen.
        self.random: RandomState = {}
        self.tokens_seen = 0
        super().__init__(*args, **kwargs)
        learn_in_float32(self.policy)

    @property
    def policy(self) -> Any:
        """The model that learns."""
        return self.model

    # -- data --------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """TRL's sampler shuffles anew in each epoch, and begins with the first in each process."""
        sampler = super()._get_train_sampler(dataset)
        if sampler.shuffle:
            for _ in range(self._epochs_done):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    # -- figures -----------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        begun, scored = time.monotonic(), self.seconds["reward_s"]
        found = super()._generate_and_score_completions(inputs)
        passed = time.monotonic() - begun
        self.seconds["rollout_s"] += passed - (self.seconds["reward_s"] - scored)
        self.sampled = True
        return found

    def _calculate_rewards(
        self,
        inputs: Sequence[dict[str, Any]],
        prompts: Sequence[Sequence[Message]],
        completions: Sequence[Any],
        completion_ids_list: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """The rewards, [N, F] of all processes; notes which turn each completion is of."""
        begun = time.monotonic()
        found: torch.Tensor = super()._calculate_rewards(
            inputs, prompts, completions, completion_ids_list
        )
        self.seconds["reward_s"] += time.monotonic() - begun
        stops = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        ended = [bool(ids) and ids[-1] in stops for ids in completion_ids_list]
        self._log_completion_extra("id", [row["id"] for row in inputs])
        self._log_completion_extra("tokens", [len(ids) for ids in completion_ids_list])
        self._log_completion_extra("finish_reason", ["eos" if e else "length" for e in ended])
        rewards = (found * self.reward_weights.to(found.device)).nansum(dim=1)
        groups = rewards.view(-1, self.num_generations)
        self._metrics["train"]["reward_group_std"].append(groups.std(dim=1).mean().item())
        return found

    def completions(self) -> list[dict[str, Any]]:
        """A line for each completion of the last sampling: of the dump."""
        logs: Any = self._logs
        size = len(logs["completion"])
        weights = dict(zip(self.reward_func_names, self.reward_weights.tolist(), strict=True))
        lines = []
        for place in range(size):
            rewards = {name: of[place] for name, of in logs["rewards"].items()}
            lines.append(
                {
                    **{name: of[place] for name, of in logs["extra"].items()},
                    "group": place // int(self.num_generations or 1),
                    "user": logs["prompt"][place][-1]["content"],
                    "completion": logs["completion"][place][-1]["content"],
                    "reward": sum(weights[name] * value for name, value in rewards.items()),
                    "rewards": rewards,
                    "advantage": logs["advantages"][place],
                }
            )
        return lines

    def take_seconds(self) -> dict[str, float]:
        """Seconds since the last time that this was asked."""
        taken = {key: round(value, 3) for key, value in self.seconds.items()}
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return taken

    # -- evaluation and checkpoints ----------------------------------------------------------------

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Our evaluation in place of TRL's, which samples groups as in training."""
        self.control.should_evaluate = False
        return self._look(self.state.global_step)

    def note_end(self) -> None:
        """An update is done: where the next one begins."""
        self.random, self.tokens_seen = random_state(), self.state.num_input_tokens_seen

    def save_last_update(self) -> None:
        """A checkpoint of the last whole update, whatever has been begun since."""
        self._save_checkpoint(self.model, None)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Of the last whole update."""
        if self.random:
            put_random_state(self.random)
            self.state.num_input_tokens_seen = self.tokens_seen
        super()._save_checkpoint(model, trial)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: transformers reads the length of a batch that TRL's has not."""
        return 0
