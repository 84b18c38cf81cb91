"""The config of a translation run. Unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config_base import may_change
from trainer.rl.config import PolicyConfig, RLConfig, SamplingConfig
from trainer.runs import config as runs
from trainer.runs.config import HeldOutStopConfig, RunConfig, SetName
from trainer.translation.config_data import DataConfig
from trainer.translation.rewards.config import RewardConfig, Urls


class GenerationConfig(SamplingConfig):
    """Settings for sampling translations."""

    prompt_template: str = may_change(
        "translategemma",
        description="A template's name (scorekit.prompts) or a file's path; not used if the "
        "chat template takes the source text and language codes instead (TranslateGemma's).",
    )
    postprocess: str = Field(
        "strip",
        description="How a decoded completion is changed before it is scored: strip (remove white "
        "space at both ends), none, or module:function, which maps a text to a text.",
    )


class EvalConfig(runs.EvalConfig):
    """When and how the policy is evaluated."""

    metrics: dict[SetName, Annotated[Urls, Field(min_length=1)]] = may_change(
        default_factory=dict,
        description="Services that score evaluations by names of your own, as reward.metricx_urls; "
        "none may run a model of the reward. Those that read references get them.",
    )


class TranslationStopConfig(HeldOutStopConfig):
    """Rules that end a run before its last update, with a checkpoint and a message with the
    reason."""

    @property
    def watches(self) -> str | None:
        """Return the key of the rule that needs `eval.metrics`; None: none is set."""
        return next(
            (k for k in ("held_out_falls", "held_out_metric") if getattr(self, k) is not None), None
        )


class MiscConfig(runs.MiscConfig):
    """Seed, device, files."""

    caching: bool = may_change(True, description="Let the services answer from their score caches.")


class TranslationConfig(RunConfig):
    """The config of a translation run."""

    task: Literal["translation"] = Field("translation", description="The task.")
    data: DataConfig = may_change(default_factory=DataConfig, description="Prompts.")
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="Models.")
    generation: GenerationConfig = Field(
        default_factory=GenerationConfig, description="Sampling of rollouts."
    )
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Reward.")
    rl: RLConfig = Field(default_factory=RLConfig, description="Update.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Evaluation.")
    stop: TranslationStopConfig = may_change(
        default_factory=TranslationStopConfig, description="Early ends."
    )
    misc: MiscConfig = Field(default_factory=MiscConfig, description="The rest.")

    @model_validator(mode="after")
    def _watched_is_a_metric(self) -> TranslationConfig:
        names = list(self.eval.metrics)
        watched = self.stop.held_out_metric or next(iter(names), None)
        if self.stop.watches and watched not in names:
            valid_names = ", ".join(names) or "none"
            raise ValueError(f"stop.{self.stop.watches}: no metric of eval.metrics ({valid_names})")
        return self

    @property
    def sources(self) -> dict[str, str | None]:
        """Return the files that a run reads: config key -> path."""
        return super().sources | {"generation.prompt_template": self.generation.prompt_template}

    def eval_generation(self) -> GenerationConfig:
        """Return the sampling settings of an evaluation."""
        return self.eval.sampling(self.generation)


#: The name in version 0.2.
TrainerConfig = TranslationConfig
