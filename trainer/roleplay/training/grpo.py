"""TRL's GRPOTrainer with exact resume in any epoch, complete checkpoints, and stats of groups and
time; its reward functions, and its lines of log.jsonl.

The overridden methods are those of TRL 1.16 and transformers.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.trainer.grpo_trainer import GRPOTrainer

from scorekit.errors import UserError
from trainer.rl.distributed import DistributedContext
from trainer.rl.policy import embedding_rows
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.evaluation.diagnostics import EchoWatch
from trainer.roleplay.rewards import REWARDS
from trainer.roleplay.turn import COLUMNS, Message
from trainer.runs.checkpoints.checkpoint import RandomState, put_random_state, random_state
from trainer.runs.stats import Stats
from trainer.runs.trl.arguments import learn_in_float32
from trainer.runs.trl.callback import RunCallback
from trainer.runs.trl.checkpoints import TrlCheckpointMixin
from trainer.runs.trl.processes import update_size
from trainer.runs.trl.run import TrlRun

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


# -- the callback ----------------------------------------------------------------------------------


#: TRL's name of a stat -> ours, if more than `_` for `/` differs.
_NAMES = {
    "reward": "reward_mean",
    "completions/mean_length": "completion_length_mean",
    "completions/clipped_ratio": "clipped_ratio",
    **{stat.key: stat.key for reward in REWARDS for stat in reward.components},
}


class RoleplayCallback(RunCallback):
    """Writes the run's log, and decides when a `RoleplayTrainer` evaluates, saves and stops.

    echo: warns if the policy learns to repeat the user.
    """

    def __init__(self, run: TrlRun[RoleplayConfig], echo: EchoWatch) -> None:
        super().__init__(run)
        self.echo = echo
        self.last = run.done  # update

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide whether to evaluate, save and stop after an update."""
        self.run.trainer.note_end()
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write a line of log.jsonl, and the completions."""
        logs: dict[str, Any] = kwargs["logs"]
        if "train_runtime" in logs or state.global_step == self.last:
            return
        self.last = state.global_step
        run, trainer = self.run, self.run.trainer
        line: dict[str, Any] = {"update": self.last, **self._stats(logs)}
        every = run.cfg.misc.dump_every_n_updates
        if run.log and trainer.sampled and every and self.last % every == 0:
            run.log.write_completions(self.last, trainer.completions())
        trainer.sampled = False
        self.write(line)
        self.echo.add_update(self.last, line)

    def _stats(self, logs: dict[str, Any]) -> Stats:
        """Return TRL's stats under our names; values that are not finite are None."""
        stats: Stats = {}
        for key, value in logs.items():
            name = _NAMES.get(key) or key.removeprefix("rewards/").replace("/", "_")
            is_number = isinstance(value, int | float) and math.isfinite(value)
            stats[name] = value if is_number else None
        trainer = self.run.trainer
        seconds = trainer.take_seconds()
        total_s = stats.pop("step_time", None) or 0.0
        stats["samples"] = update_size(self.run.cfg.grpo, self.run.start.world.size)
        stats["update_s"] = round(max(0.0, total_s - sum(seconds.values())), 3)
        return stats | seconds


# -- the reward functions --------------------------------------------------------------------------


#: Returns a number or None for each completion.
RewardFunction = Callable[..., list[Any]]


def of_whole_batch(function: RewardFunction, world: DistributedContext) -> RewardFunction:
    """Return a reward function that every process calls, and that only the main one computes.

    TRL calls a reward function in each process, with that process's completions. The texts of a
    group that lies in two processes would then be embedded twice, and a service that is away would
    end one process while the others wait for it.

    Its stats are of the whole batch. An error of this project is raised in every process.
    """
    if world.size == 1:
        return function

    @functools.wraps(function)
    def shared(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Any]:
        rows = {name: columns[name] for name in COLUMNS if name in columns}
        rows |= {"prompts": prompts, "completions": completions}
        parts = world.gather([{name: list(values) for name, values in rows.items()}])

        def score() -> tuple[list[Any], dict[str, list[Any]]]:
            batch = {name: [value for part in parts for value in part[name]] for name in rows}
            extras: dict[str, list[Any]] = {}
            logs = {"log_metric": columns.get("log_metric"), "log_extra": extras.__setitem__}
            return function(**batch, **logs), extras

        rewards, extras = world.from_main(score)
        start = sum(len(part["prompts"]) for part in parts[: world.rank])
        local_rows = slice(start, start + len(prompts))
        if log_extra := columns.get("log_extra"):
            for name, values in extras.items():
                log_extra(name, values[local_rows])
        return rewards[local_rows]

    return shared
