"""The sections of a run's config that no task has to itself, and what every config has."""

from __future__ import annotations

from typing import Any, Literal, Protocol, Self

from pydantic import Field

from scorekit.config import Config
from trainer.config_base import may_change
from trainer.rl.config import PolicyConfig, RLConfig, SamplingConfig

#: Name of the evaluation set that has none.
THE_SET = "eval"


class StopConfig(Config):
    """When a run ends before its last update: with a checkpoint, and a message that says why."""

    kl_ceiling: float | None = Field(
        None, gt=0, description="Mean KL to the reference (k3, per token) of `patience` updates."
    )
    reward_drop: float | None = Field(
        None,
        gt=0,
        description="How far the mean reward (sequence and tokens) of `patience` updates may fall "
        "below the best such mean of the run.",
    )
    patience: int = Field(5, ge=1, description="Updates that are averaged for these rules.")
    skipped_updates: int | None = Field(
        3,
        ge=1,
        description="Updates in a row that learned nothing, or attempts in a row (each of up to "
        "reward.deadline_s) to have rewards for one update, whose prompts are not used up by that "
        "(exit code 3); null: any number.",
    )


class EvalConfig(Config):
    """When and how the policy is looked at."""

    eval_every_n_updates: int = may_change(
        10, ge=0, description="0: only before and after training."
    )
    eval_limit: int | None = may_change(None, ge=1, description="Held-out examples at most.")
    temperature: float = Field(0.0, ge=0, description="0: greedy.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus sampling; 1: off.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0: off.")
    max_new_tokens: int | None = Field(None, ge=1, description="Null: generation's.")
    best_by: str | None = Field(
        None,
        description="Name of the evaluation set by whose reward_mean the best checkpoint is "
        "chosen; null: the first (`data.eval`, then those of `data.eval_sets` in their order).",
    )


class MachineConfig(Config):
    """What a run computes on, and from which seed."""

    seed: int = Field(0, ge=0, description="Fixes data order and sampling.")
    device: str = may_change(
        "auto", description="`cpu`, `cuda`, ...; auto: a GPU where there is one."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of the arithmetic (autocast); weights stay float32."
    )
    threads: int | None = may_change(
        None, ge=1, description="Threads of torch; null: torch's choice."
    )
    patience_s: float = may_change(
        1800.0,
        gt=0,
        description="Seconds that the processes of a run wait for one of them, which may still be "
        "sampling, waiting for rewards, or writing a checkpoint; then the run ends and says for "
        "which it waited, and where that was.",
    )


class FolderConfig(Config):
    """The folder of a run, and what is written there."""

    run_dir: str = may_change("runs/trainer", description="Folder of logs and checkpoints.")
    overwrite: bool = may_change(False, description="Replace the run that stands in run_dir.")
    save_every_n_updates: int = may_change(
        10,
        ge=0,
        description="Also after an evaluation that is the best so far. 0: only the final one.",
    )
    keep_checkpoints: int = may_change(
        2, ge=1, description="The newest so many stay, and the best by evaluation."
    )
    trackers: list[str] = may_change(
        default_factory=list,
        description="Where figures go besides log.jsonl: tensorboard, wandb, mlflow, ... (whatever "
        "accelerate knows and is installed).",
    )
    verbose: bool = may_change(
        False,
        description="Every figure of an update in the terminal, also where it is too narrow for "
        "one line; the command's --verbose.",
    )
    dump_every_n_updates: int = may_change(1, ge=0, description="Training completions; 0: none.")


class MiscConfig(FolderConfig, MachineConfig):
    """The section `misc`; a task may have more keys there."""


class RunConfig(Protocol):
    """What the config of every task has. best_by: the evaluation set that the best checkpoint is
    chosen by. sources: what a run reads, config key -> path."""

    @property
    def policy(self) -> PolicyConfig: ...

    @property
    def generation(self) -> SamplingConfig: ...

    @property
    def rl(self) -> RLConfig: ...

    @property
    def eval(self) -> EvalConfig: ...

    @property
    def stop(self) -> StopConfig: ...

    @property
    def misc(self) -> MiscConfig: ...

    @property
    def best_by(self) -> str: ...

    @property
    def sources(self) -> dict[str, str | None]: ...

    @classmethod
    def model_validate(cls, obj: Any) -> Self: ...

    def model_dump(self, *, mode: str = "python") -> dict[str, Any]: ...
