"""The section `rl` of a search run, with the defaults of this task."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from scorekit.config import Config
from trainer.config_base import may_change
from trainer.rl.config import RLConfig

#: The defaults of this task.
_DEFAULTS: dict[str, Any] = {
    "algorithm": "gspo",
    "batch_size": 16,
    "minibatch_size": 8,
    "ppo_epochs": 1,
    "kl_coef": 0.0,
    "advantage_norm": "grpo",
    "advantage_eps": 1e-6,
}


class OnlineBudgetConfig(Config):
    """The number of episodes of each question, chosen from the results so far."""

    n_max: int | None = Field(
        None,
        ge=2,
        description="Most episodes of a question in an update, whose total stays rl.batch_size x "
        "rollout.n_agent; null: off, each question has its own n_agent or rollout.n_agent.",
    )
    n_min: int = Field(2, ge=2, description="Fewest episodes of a question in an update.")
    success: float = Field(
        0.5, description="An episode succeeds that earns this: a group teaches if some do."
    )
    earlier: list[str] = Field(
        default=[],
        description="Folders of runs with the same reward whose results count from the start.",
    )


class SearchRLConfig(RLConfig):
    """The update of the policy: GSPO over groups, without a KL and without an entropy bonus."""

    epochs: int | None = may_change(
        None,
        ge=1,
        description="Passes over the questions, in place of num_updates; what does not fill an "
        "update waits for the next pass.",
    )
    warmup_ratio: float | None = may_change(
        None,
        ge=0,
        lt=1,
        description="Share of the updates that warm up, in place of warmup_updates.",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_this_task(cls, data: Any) -> Any:
        return _DEFAULTS | data if isinstance(data, dict) else data

    def over(self, questions: int) -> SearchRLConfig:
        """Return the config with num_updates and warmup_updates for a number of questions."""
        values = self.model_dump()
        if self.epochs is not None:
            values["num_updates"] = max(
                1, self.epochs * questions // (self.batch_size * self.grad_accum)
            )
        if self.warmup_ratio is not None:
            values["warmup_updates"] = int(self.warmup_ratio * values["num_updates"])
        return SearchRLConfig(**values)
