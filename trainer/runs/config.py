"""Config sections that tasks share, and the protocols that every config fulfills."""

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

#: Name of an evaluation set without a name.
DEFAULT_EVAL_SET = "eval"
#: Names of the other sets; they become part of file names.
SetName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,59}$")]


def set_key(name: str) -> str:
    """Return the config key of an evaluation set."""
    return "data.eval" if name == DEFAULT_EVAL_SET else f"data.eval_sets.{name}"


class StopConfig(Config):
    """Rules that end a run before its last update, with a checkpoint and a message with the
    reason."""

    kl_ceiling: float | None = Field(
        None, gt=0, description="Mean KL to the reference (k3, per token) of `patience` updates."
    )
    reward_drop: float | None = Field(
        None,
        gt=0,
        description="Largest drop of the mean reward (sequence and tokens) of `patience` updates "
        "below the best such mean of the run.",
    )
    patience: int = Field(5, ge=1, description="Updates that are averaged for these rules.")
    skipped_updates: int | None = Field(
        3,
        ge=1,
        description="Updates in a row without a step, or attempts in a row (each of up to "
        "reward.deadline_s) to get rewards for one update, whose prompts then remain unused "
        "(exit code 3); null: any number.",
    )


class HeldOutStopConfig(StopConfig):
    """Stop rules of a task whose evaluations have metrics outside the reward (`eval.metrics`)."""

    held_out_falls: int | None = Field(
        None,
        ge=1,
        description="Evaluations in a row in which the reward rises while a metric of "
        "`eval.metrics` gets worse, compared with the one before: the policy exploits the reward. "
        "Of the set `eval.best_by`; an evaluation with less than 95 % of the scores is left out.",
    )
    held_out_metric: str | None = Field(
        None, description="The metric that is watched; null: the first of `eval.metrics`."
    )


class EvalConfig(Config):
    """When and how the policy is evaluated."""

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
    """Device, data type and seed of a process."""

    seed: int = Field(0, ge=0, description="Fixes data order and sampling.")
    device: str = may_change("auto", description="`cpu`, `cuda`, ...; auto: a GPU if there is one.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of the arithmetic (autocast); weights stay float32."
    )
    threads: int | None = may_change(
        None, ge=1, description="Threads of torch; null: torch's choice."
    )


class MachineConfig(DeviceConfig):
    """Device of a run, and how long its processes wait for each other."""

    patience_s: float = may_change(
        1800.0,
        gt=0,
        description="Seconds that the processes of a run wait for one of them, which may still be "
        "sampling, waiting for rewards, or writing a checkpoint. Then the run ends, and the error "
        "names the process and its phase.",
    )


class PlaceConfig(Config):
    """The folder of a run."""

    run_dir: str = may_change("runs/trainer", description="Folder of logs and checkpoints.")
    overwrite: bool = may_change(False, description="Replace an existing run in run_dir.")


class FolderConfig(PlaceConfig):
    """The folder of a run, and what is written there."""

    save_every_n_updates: int = may_change(
        10,
        ge=0,
        description="Also after an evaluation that is the best so far. 0: only the final one.",
    )
    keep_checkpoints: int = may_change(
        2, ge=1, description="Newest checkpoints to keep, besides the best by evaluation."
    )
    trackers: list[str] = may_change(
        default_factory=list,
        description="Where stats go besides log.jsonl: tensorboard, wandb, mlflow, ... (whatever "
        "accelerate supports and is installed).",
    )
    verbose: bool = may_change(
        False,
        description="Print every stat of an update, also if the terminal is too narrow for one "
        "line; the command's --verbose.",
    )
    dump_every_n_updates: int = may_change(1, ge=0, description="Training completions; 0: none.")


class MiscConfig(FolderConfig, MachineConfig):
    """The section `misc`; a task may add keys."""


class KeptConfig(Protocol):
    """The config of a run that is logged, saved and resumed, with any kind of loop.

    sources: the files it reads, config key -> path.
    """

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
    """The config of a task that uses `TrainingLoop`.

    best_by: the evaluation set that the best checkpoint is chosen by.
    """

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
    """Return whether old_logprobs are the trainer's, and the sampler's are used as a correction."""
    mode, generation = cfg.rl.importance_correction, cfg.generation
    is_truncated = generation.top_p < 1 or generation.top_k > 0
    is_rounded = "bfloat16" in (cfg.misc.dtype, cfg.policy.weights_dtype)
    is_rounded = is_rounded or cfg.policy.load_in_4bit
    may_differ = generation.engine == "vllm" or is_rounded or is_truncated
    return mode == "on" or (mode == "auto" and may_differ)


def check_config(cfg: KeptConfig, original: Mapping[str, Any]) -> None:
    """Log what differs from the config that the run started with.

    Raises UserError if a difference changes the results.
    """
    then = dict(_flat(cfg.model_validate(original).model_dump(mode="json")))
    now = dict(_flat(cfg.model_dump(mode="json")))
    changed_keys = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
    descriptions = {
        key: f"{key}: {then.get(key)!r} then, {now.get(key)!r} now" for key in changed_keys
    }
    # The contents of paths and URLs are compared by digest (`Origin`).
    changeable_keys = changeable(type(cfg))  # type: ignore[arg-type]  # every config is a model
    fixed_keys = [key for key in changed_keys if not _is_among(key, changeable_keys)]
    if fixed_keys:
        raise UserError(
            f"--resume: {cfg.misc.run_dir} was started with another config "
            f"({'; '.join(descriptions[key] for key in fixed_keys)}). Restore it, or choose "
            "another run_dir"
        )
    for key in changed_keys:
        log.warning("changed since the run started: %s", descriptions[key])


def pinned_settings(cfg: BaseModel) -> dict[str, Any]:
    """Return the keys that a run keeps when it is resumed, `section.key`, and their values."""
    changeable_keys = changeable(type(cfg))
    flat = _flat(cfg.model_dump(mode="json"))
    return {key: value for key, value in flat if not _is_among(key, changeable_keys)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _is_among(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
