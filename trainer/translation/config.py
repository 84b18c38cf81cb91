"""The config of a translation run. Unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scorekit.rows.samples import BadRows
from trainer.config_base import may_change
from trainer.rl.config import PolicyConfig, RLConfig, SamplingConfig
from trainer.runs import config as runs
from trainer.runs.config import (
    DEFAULT_EVAL_SET,
    HeldOutData,
    HeldOutSet,
    HeldOutStopConfig,
    RunConfig,
    SetName,
)
from trainer.translation.rewards.config import RewardConfig, Urls


class EvalSet(HeldOutSet):
    """A held-out set. Null values are those of the section `data`."""

    name: str | None = Field(None, description="Configuration, for a hub id.")
    columns: dict[str, str] | None = Field(None, description="As `data.columns`.")
    src_lang: str | None = Field(None, description="As `data.src_lang`.")
    tgt_lang: str | None = Field(None, description="As `data.tgt_lang`.")


class DataConfig(HeldOutData):
    """The files that prompts come from."""

    train: str | None = Field(
        None,
        description="Prompts to train on: a file (JSONL, JSON, CSV, TSV, each also as .gz; "
        "Parquet), a folder of them or of shards, or a hub id.",
    )
    train_split: str | None = Field(None, description="Split of `train`, for a folder or hub id.")
    train_name: str | None = Field(None, description="Configuration of `train`, for a hub id.")
    train_limit: int | None = Field(None, ge=1, description="Read this many training rows at most.")
    eval: str | None = Field(None, description="Held-out prompts, in the same forms as `train`.")
    eval_split: str | None = Field(None, description="Split of `eval`, for a folder or hub id.")
    eval_name: str | None = Field(None, description="Configuration of `eval`, for a hub id.")
    src_lang: str | None = Field(None, description="Source language of rows without one.")
    tgt_lang: str | None = Field(None, description="Target language of rows without one.")
    bad_rows: BadRows = Field(
        "refuse",
        description="Rows that cannot be used (no JSON, a field that is missing or of another "
        "type): end the run with a list of them, or skip them: a warning counts them and lists "
        "the first 20.",
    )
    bad_sources: Literal["leave_out", "refuse"] = Field(
        "leave_out",
        description="Training rows whose source a reward service refuses with any translation "
        "(a NUL, too long): leave them out, with a warning that lists them, or end the run.",
    )
    overlong_prompts: Literal["leave_out", "refuse"] = Field(
        "leave_out",
        description="Rows whose prompt and max_new_tokens exceed the policy's positions: leave "
        "them out of training and evaluation, with a warning and their number, or end the run.",
    )
    eval_sets: dict[SetName, EvalSet] = Field(
        default_factory=dict,
        description="Further held-out sets by name, each a path or a mapping of keys: all are "
        "evaluated, with separate stats.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Our field name (src_text, src_lang, ...) -> the column that holds it; "
        "`translation.en`: the field `en` within the column `translation`.",
    )

    @property
    def held_out(self) -> dict[str, EvalSet]:
        """Return all evaluation sets by name, that of `eval` first, with null values filled in."""
        sets = {}
        if self.eval is not None:
            sets[DEFAULT_EVAL_SET] = EvalSet(
                path=self.eval, split=self.eval_split, name=self.eval_name
            )
        shared = {key: getattr(self, key) for key in ("columns", "src_lang", "tgt_lang")}
        return {
            name: chosen.model_copy(
                update={key: value for key, value in shared.items() if getattr(chosen, key) is None}
            )
            for name, chosen in (sets | self.eval_sets).items()
        }


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
