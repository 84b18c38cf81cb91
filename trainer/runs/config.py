"""The sections of a run's config that no task has to itself, and what every config has."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import BaseModel, Field, StringConstraints

from scorekit.config import Config
from scorekit.errors import UserError
from trainer.config_base import changeable, may_change
from trainer.rl.config import PolicyConfig, RLConfig, SamplingConfig

log = logging.getLogger(__name__)

#: Name of the evaluation set that has none.
THE_SET = "eval"
#: Of the others; it becomes part of file names.
SetName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,59}$")]


def set_key(name: str) -> str:
    """The config's key of an evaluation set."""
    return "data.eval" if name == THE_SET else f"data.eval_sets.{name}"


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


class HeldOutStopConfig(StopConfig):
    """Of a task whose evaluations have metrics that are no part of the reward (`eval.metrics`)."""

    held_out_falls: int | None = Field(
        None,
        ge=1,
        description="Evaluations in a row in which the reward rises while a metric of "
        "`eval.metrics` gets worse, each against the one before: the policy pleases the reward "
        "alone. Of the set `eval.best_by`; one with less than 95 % of the scores is left out.",
    )
    held_out_metric: str | None = Field(
        None, description="The metric that is watched; null: the first of `eval.metrics`."
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


class DeviceConfig(Config):
    """What a process computes on, and from which seed."""

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


class MachineConfig(DeviceConfig):
    """What a run computes on, and how long its processes wait for each other."""

    patience_s: float = may_change(
        1800.0,
        gt=0,
        description="Seconds that the processes of a run wait for one of them, which may still be "
        "sampling, waiting for rewards, or writing a checkpoint; then the run ends and says for "
        "which it waited, and where that was.",
    )


class PlaceConfig(Config):
    """Where a run stands."""

    run_dir: str = may_change("runs/trainer", description="Folder of logs and checkpoints.")
    overwrite: bool = may_change(False, description="Replace the run that stands in run_dir.")


class FolderConfig(PlaceConfig):
    """The folder of a run, and what is written there."""

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


class KeptConfig(Protocol):
    """What stands in a config of a run that is logged, saved and gone on with, whoever goes round.
    sources: what it reads, config key -> path."""

    @property
    def policy(self) -> PolicyConfig: ...

    @property
    def misc(self) -> PlaceConfig: ...

    @property
    def sources(self) -> dict[str, str | None]: ...

    @classmethod
    def model_validate(cls, obj: Any) -> Self: ...

    def model_dump(self, *, mode: str = "python") -> dict[str, Any]: ...


class RunConfig(KeptConfig, Protocol):
    """What the config of every task has that goes round in `Loop`. best_by: the evaluation set that
    the best checkpoint is chosen by."""

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


def corrects_importance(cfg: RunConfig) -> bool:
    """Whether old_logprobs are the trainer's own, and the sampler's a correction."""
    chosen, generation = cfg.rl.importance_correction, cfg.generation
    cut = generation.top_p < 1 or generation.top_k > 0
    rounded = "bfloat16" in (cfg.misc.dtype, cfg.policy.weights_dtype)
    rounded = rounded or cfg.policy.load_in_4bit
    may_differ = generation.engine == "vllm" or rounded or cut
    return chosen == "on" or (chosen == "auto" and may_differ)


def check_config(cfg: KeptConfig, begun: Mapping[str, Any]) -> None:
    """Tell what differs from the config that the run was begun with. Raises UserError if it changes
    the mathematics."""
    then = dict(_flat(cfg.model_validate(begun).model_dump(mode="json")))
    now = dict(_flat(cfg.model_dump(mode="json")))
    differ = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
    told = {key: f"{key}: {then.get(key)!r} then, {now.get(key)!r} now" for key in differ}
    # What is behind the paths and URLs is held against the run's own by digest (`Origin`).
    free = changeable(type(cfg))  # type: ignore[arg-type]  # every config is a model
    fixed = [key for key in differ if not _is_among(key, free)]
    if fixed:
        raise UserError(
            f"--resume: {cfg.misc.run_dir} was begun with another config "
            f"({'; '.join(told[key] for key in fixed)}): set it back, or choose another run_dir"
        )
    for key in differ:
        log.warning("changed since the run began: %s", told[key])


def lasting(cfg: BaseModel) -> dict[str, Any]:
    """The keys that a run keeps when it goes on, `section.key`, and their values."""
    free = changeable(type(cfg))
    flat = _flat(cfg.model_dump(mode="json"))
    return {key: value for key, value in flat if not _is_among(key, free)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _is_among(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
