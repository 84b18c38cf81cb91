"""TRL's GRPOTrainer with exact resume in any epoch, complete checkpoints, and stats of groups and
time.

The overridden methods are those of TRL 1.16 and transformers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.trainer.grpo_trainer import GRPOTrainer

from scorekit.errors import UserError
from trainer.rl.policy import embedding_rows
from trainer.roleplay.turn import Message
from trainer.runs.checkpoints.checkpoint import RandomState, put_random_state, random_state
from trainer.runs.trl.arguments import learn_in_float32
from trainer.runs.trl.checkpoints import TrlCheckpointMixin

#: Keys of `generation_kwargs` with which a completion may end elsewhere.
ENDING_OPTIONS = frozenset({"stop", "stop_token_ids", "max_tokens"})


def lost_completions(
    ids_of_completions: Sequence[Sequence[int]],
    stops: Collection[int],
    max_length: int | None,
    vocabulary_size: int,
) -> str | None:
    """Return what is wrong with completions of vLLM, which are not the policy's; None if nothing.

    TRL does not read `finish_reason`, so an aborted completion looks like a short one. It has no
    stop id at its end, though, and is shorter than requested.
    max_length: None: completions may end elsewhere.
    """
    num_lost = 0
    for ids in ids_of_completions:
        outside = [token_id for token_id in ids if not 0 <= token_id < vocabulary_size]
        if outside:
            return (
                f"vLLM returned id {outside[0]}, but the policy has {vocabulary_size} ids. Start "
                "it with policy.path"
            )
        is_cut = max_length is not None and len(ids) < max_length
        num_lost += not ids or (is_cut and ids[-1] not in stops)
    if not num_lost:
        return None
    return (
        f"vLLM broke {num_lost} of {len(ids_of_completions)} completions off: they have no stop "
        "token and are shorter than grpo.max_completion_length. None is learned. Let nothing else "
        "pause the server, and start it with a --max-model-len of the policy's context"
    )


class RoleplayTrainer(TrlCheckpointMixin, GRPOTrainer):
    """GRPOTrainer for a run directory.

    epochs_done: full passes over the training turns before this process.
    """

    def __init__(self, *args: Any, epochs_done: int, **kwargs: Any) -> None:
        self._epochs_done = epochs_done
        #: Seconds of sampling and of rewards since the last line of the log.
        self.seconds = {"rollout_s": 0.0, "reward_s": 0.0}
        #: Whether completions were sampled since then.
        self.sampled = False
        #: Random states and number of seen tokens at the end of the last update, which a failed
        #: sampling would change.
        self.random: RandomState = {}
        self.tokens_seen = 0
        super().__init__(*args, **kwargs)
        learn_in_float32(self.model)

    # -- data --------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Return TRL's sampler in the state of the current epoch.

        It shuffles again in each epoch, and starts with the first in each process.
        """
        sampler = super()._get_train_sampler(dataset)
        if sampler.shuffle:
            for _ in range(self._epochs_done):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    # -- completions -------------------------------------------------------------------------------

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's completions. Raises UserError if vLLM has lost some of them."""
        generate: Any = super()._generate_single_turn
        outputs = generate(*args, **kwargs)
        if self.use_vllm:
            ids_of_completions: Sequence[Sequence[int]] = outputs[0]
            arguments: Any = self.args
            options = arguments.generation_kwargs or {}
            max_length = None if ENDING_OPTIONS & options.keys() else self.max_completion_length
            model: Any = self.accelerator.unwrap_model(self.model)
            problem = lost_completions(
                ids_of_completions,
                {*self.eos_token_ids, self._tokenizer.pad_token_id},
                max_length,
                embedding_rows(model),
            )
            # All processes raise the error, or the others would wait for this one.
            problems = [text for text in gather_object([problem]) if text is not None]
            if problems:
                raise UserError(f"grpo.options.use_vllm: {problems[0]}")
        return outputs

    # -- stats -------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started, reward_s_before = time.monotonic(), self.seconds["reward_s"]
        outputs = super()._generate_and_score_completions(inputs)
        elapsed = time.monotonic() - started
        self.seconds["rollout_s"] += elapsed - (self.seconds["reward_s"] - reward_s_before)
        self.sampled = True
        return outputs

    def _calculate_rewards(
        self,
        inputs: Sequence[dict[str, Any]],
        prompts: Sequence[Sequence[Message]],
        completions: Sequence[Any],
        completion_ids_list: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Return the rewards, [N, F] of all processes; log the turn of each completion."""
        started = time.monotonic()
        rewards_NF: torch.Tensor = super()._calculate_rewards(
            inputs, prompts, completions, completion_ids_list
        )
        self.seconds["reward_s"] += time.monotonic() - started
        stops = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        has_eos_flags = [bool(ids) and ids[-1] in stops for ids in completion_ids_list]
        self._log_completion_extra("id", [row["id"] for row in inputs])
        self._log_completion_extra("tokens", [len(ids) for ids in completion_ids_list])
        self._log_completion_extra(
            "finish_reason", ["eos" if has_eos else "length" for has_eos in has_eos_flags]
        )
        rewards = (rewards_NF * self.reward_weights.to(rewards_NF.device)).nansum(dim=1)
        rewards[rewards_NF.isnan().all(dim=1)] = torch.nan  # its group is left out of the mean
        groups = rewards.view(-1, self.num_generations)
        self._metrics["train"]["reward_group_std"].append(groups.std(dim=1).nanmean().item())
        return rewards_NF

    def completions(self) -> list[dict[str, Any]]:
        """Return a dump line for each completion of the last sampling. A missing reward is None."""
        logs: Any = self._logs
        size = len(logs["completion"])
        weights = dict(zip(self.reward_func_names, self.reward_weights.tolist(), strict=True))
        lines = []
        for index in range(size):
            rewards = {
                name: None if math.isnan(values[index]) else values[index]
                for name, values in logs["rewards"].items()
            }
            parts = [weights[name] * value for name, value in rewards.items() if value is not None]
            lines.append(
                {
                    **{name: values[index] for name, values in logs["extra"].items()},
                    "group": index // int(self.num_generations or 1),
                    "user": logs["prompt"][index][-1]["content"],
                    "completion": logs["completion"][index][-1]["content"],
                    "reward": sum(parts) if parts else None,
                    "rewards": rewards,
                    "advantage": logs["advantages"][index],
                }
            )
        return lines

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        rounded = {key: round(value, 3) for key, value in self.seconds.items()}
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return rounded

    # -- checkpoints -------------------------------------------------------------------------------

    def note_end(self) -> None:
        """Record the state at the end of an update."""
        self.random, self.tokens_seen = random_state(), self.state.num_input_tokens_seen

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the state of the last complete update."""
        if self.random:
            put_random_state(self.random)
            self.state.num_input_tokens_seen = self.tokens_seen
        super()._save_checkpoint(model, trial)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: transformers would read a length that TRL's batch does not have."""
        return 0
