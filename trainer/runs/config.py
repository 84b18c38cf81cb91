"""Config sections that tasks share, and the bases of every task's config."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, StringConstraints, model_validator

from scorekit.config import Config
from scorekit.errors import UserError
from scorekit.matmul import MatmulSetting
from scorekit.net.addresses import without_userinfo
from trainer.config_base import changeable, may_change
from trainer.rl.config import PolicyConfig, RLConfig, SamplingConfig

log = logging.getLogger(__name__)
S = TypeVar("S", bound=SamplingConfig)

#: Name of an evaluation set without a name.
DEFAULT_EVAL_SET = "eval"
#: Names of the other sets; they become part of file names.
SetName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,59}$")]


def set_key(name: str) -> str:
    """Return the config key of an evaluation set."""
    return "data.eval" if name == DEFAULT_EVAL_SET else f"data.eval_sets.{name}"


class HeldOutSet(Config):
    """A held-out set."""

    path: str = Field(description="Held-out examples, in the same forms as `train`.")
    split: str | None = Field(None, description="Split of `path`, for a folder or hub id.")

    @model_validator(mode="before")
    @classmethod
    def _a_path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class HeldOutData(Config):
    """The files of a run with several evaluation sets."""

    if TYPE_CHECKING:  # a task declares its keys, in its own order
        train: str | None
        eval: str | None
        eval_sets: Any

    @property
    def held_out(self) -> Mapping[str, HeldOutSet]:
        """Return all evaluation sets by name, that of `eval` first."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if self.eval is not None and DEFAULT_EVAL_SET in self.eval_sets:
            raise ValueError(
                f"eval_sets: the name {DEFAULT_EVAL_SET} is that of data.eval. Choose another"
            )
        return self


class StopConfig(Config):
    """Rules that end a run before its last update, with a checkpoint and a reason."""

    kl_ceiling: float | None = Field(
        None,
        gt=0,
        description="End the run if the mean KL to the reference (k3, per token) of `patience` "
        "updates is above this; null: never.",
    )
    reward_drop: float | None = Field(
        None,
        gt=0,
        description="End the run if the mean reward (sequence and tokens) of `patience` updates "
        "is more than this below the best such mean of the run; null: never.",
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
        10, ge=0, description="Updates between evaluations; 0: only before and after training."
    )
    eval_limit: int | None = may_change(None, ge=1, description="Held-out examples at most.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0: greedy.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus sampling; 1: off.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0: off.")
    max_new_tokens: int | None = Field(
        None, ge=1, description="Longest completion in tokens; null: generation.max_new_tokens."
    )
    best_by: str | None = Field(
        None,
        description="Name of the evaluation set by whose reward_mean the best checkpoint is "
        "chosen; null: the first (`data.eval`, then those of `data.eval_sets` in their order).",
    )

    def sampling(self, generation: S) -> S:
        """Return the settings of an evaluation: one completion a prompt, greedy by default."""
        return generation.model_copy(
            update={
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
                "max_new_tokens": self.max_new_tokens or generation.max_new_tokens,
                "num_samples_per_prompt": 1,
            }
        )


class MachineConfig(Config):
    """Device, data type and seed of a run, and how long its processes wait for each other."""

    seed: int = Field(0, ge=0, description="Fixes data order and sampling.")
    device: str = may_change("auto", description="`cpu`, `cuda`, ...; auto: a GPU if there is one.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Data type of the arithmetic (autocast), not of the weights."
    )
    threads: int | None = may_change(
        None, ge=1, description="Threads of torch; null: torch's choice."
    )
    patience_s: float = may_change(
        1800.0,
        gt=0,
        description="Seconds that the processes of a run wait for one of them, which may still be "
        "sampling, waiting for rewards, or writing a checkpoint. Then the run ends, and the error "
        "names the process and its phase.",
    )


class FolderConfig(Config):
    """The folder of a run, and what is written there."""

    run_dir: str = may_change("runs/trainer", description="Folder of logs and checkpoints.")
    overwrite: bool = may_change(False, description="Replace an existing run in run_dir.")
    save_every_n_updates: int = may_change(
        10,
        ge=0,
        description="Updates between checkpoints; an evaluation that is the best so far also has "
        "one. 0: only the final one.",
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
    dump_every_n_updates: int = may_change(
        1, ge=0, description="Updates between dumps of training completions; 0: none."
    )


class MiscConfig(FolderConfig, MachineConfig):
    """The section `misc`; a task may add keys."""

    matmul: MatmulSetting = Field(
        "auto",
        description="Who multiplies float32 matrices on a CPU: torch, or oneDNN. auto: what "
        "SCOREKIT_MATMUL says, else oneDNN if a trial at the start finds it exact and at least 1.3 "
        "times as fast. The first process of a run decides, and config.yaml has its choice: a "
        "resumed run keeps it.",
    )


class KeptConfig(Config):
    """The config of a run that is logged, saved and resumed, with any kind of loop."""

    @classmethod
    def of_run(cls, recorded: Mapping[str, Any]) -> Self:
        """Return the recorded config of a run.

        A task adds what earlier versions did where a key is missing, if that is not its default.
        """
        return cls.model_validate(recorded)

    def with_matmul(self, choice: MatmulSetting) -> Self:
        """Return this config with another `misc.matmul`."""
        return self.model_copy(update={"misc": self.misc.model_copy(update={"matmul": choice})})

    if TYPE_CHECKING:  # a task declares its sections, in the order of its file
        data: Any
        policy: PolicyConfig
        eval: Any
        misc: MiscConfig

    @property
    def sources(self) -> dict[str, str | None]:
        """Return the files that a run reads: config key -> path."""
        return {
            "policy.path": self.policy.path,
            "policy.tokenizer": self.policy.tokenizer,
            "policy.reference_path": self.policy.reference_path,
            "data.train": self.data.train,
        }


class RunConfig(KeptConfig):
    """The config of a task that uses `TrainingLoop`."""

    if TYPE_CHECKING:
        data: HeldOutData
        generation: SamplingConfig
        rl: RLConfig
        eval: EvalConfig
        stop: StopConfig
        misc: MiscConfig

    @model_validator(mode="after")
    def _best_by_is_a_set(self) -> Self:
        sets = list(self.data.held_out)
        if self.eval.best_by is not None and self.eval.best_by not in sets:
            valid_names = ", ".join(sets) or "none"
            raise ValueError(
                f"eval.best_by: {self.eval.best_by!r} is no evaluation set ({valid_names})"
            )
        return self

    @property
    def best_by(self) -> str:
        """Return the name of the evaluation set that the best checkpoint is chosen by."""
        return self.eval.best_by or next(iter(self.data.held_out), DEFAULT_EVAL_SET)

    @property
    def sources(self) -> dict[str, str | None]:
        """Return the files that a run reads: config key -> path."""
        sets = {set_key(name): eval_set.path for name, eval_set in self.data.held_out.items()}
        return super().sources | sets

    @property
    def corrects_importance(self) -> bool:
        """Return whether old_logprobs are the trainer's, and the sampler's only correct them.

        With `rl.max_staleness` above 0 the sampler's weights may be older than the trainer's.
        """
        mode, generation = self.rl.importance_correction, self.generation
        is_truncated = generation.top_p < 1 or generation.top_k > 0
        is_rounded = "bfloat16" in (self.misc.dtype, self.policy.weights_dtype)
        is_rounded = is_rounded or self.policy.load_in_4bit
        is_stale = self.rl.max_staleness > 0
        may_differ = generation.engine == "vllm" or is_rounded or is_truncated or is_stale
        return mode == "on" or (mode == "auto" and may_differ)

    @property
    def correction_summary(self) -> str:
        """Return what the importance correction does in this run, for a message."""
        rl, correction = self.rl, self.rl.correction
        if not self.corrects_importance:
            return "off"
        ratio = "ratio of a token"
        if correction.is_by_sequence:
            ratio = rl.chosen_algorithm.sequence_ratio_name
        bounds = f"truncated at {correction.cap:g}"
        if correction.is_masking:
            bounds = f"masked outside {correction.floor:g} to {correction.cap:g}"
        return f"{ratio}, {bounds}"


def recorded_matmul(recorded: Mapping[str, Any]) -> MatmulSetting:
    """Return who multiplied in a run with this config; torch did in earlier versions."""
    choice: MatmulSetting = (recorded.get("misc") or {}).get("matmul", "torch")
    return choice


def check_config(cfg: KeptConfig, original: Mapping[str, Any]) -> None:
    """Log what differs from the config that the run started with.

    Raises UserError if a difference changes the results.
    """
    choice = recorded_matmul(original)
    if cfg.misc.matmul == "auto":  # the run keeps its choice
        cfg = cfg.with_matmul(choice)
    then, now = (  # a password may change, and state.json has none
        dict(_flat(without_userinfo(config.model_dump(mode="json"))))
        for config in (cfg.of_run(original).with_matmul(choice), cfg)
    )
    changed_keys = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
    descriptions = {
        key: f"{key}: {then.get(key)!r} then, {now.get(key)!r} now" for key in changed_keys
    }
    # The contents of paths and URLs are compared by digest (`Origin`).
    changeable_keys = changeable(type(cfg))
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
