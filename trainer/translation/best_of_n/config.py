"""The config of best-of-n SFT. Unknown keys are errors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from scorekit.config import Config
from trainer.config_base import may_change
from trainer.rl.config import PolicyConfig, RLConfig
from trainer.runs.config import KeptConfig
from trainer.runs.config import MiscConfig as RunMiscConfig
from trainer.sft.config import SftConfig, SftData, SftEval, SftSection
from trainer.translation.config import (
    DataConfig,
    EvalConfig,
    GenerationConfig,
    MiscConfig,
    TranslationConfig,
)
from trainer.translation.rewards.config import RewardConfig


class SeveralConfig(GenerationConfig):
    """Settings for sampling the translations of which one is chosen."""

    num_samples_per_prompt: int = Field(16, ge=2, description="Completions of each prompt.")


class ChoiceConfig(Config):
    """The rule that chooses one of a source's translations."""

    by: Literal["reward", "random"] = Field(
        "reward",
        description="The one with the highest reward, or one of the samples at random: the "
        "control that tells the reward's part from that of more training on own samples.",
    )


class PairsConfig(Config):
    """Pairs of source and reference that are mixed with the chosen translations."""

    path: str | None = Field(
        None,
        description="Rows with `src_text` and `ref_text`, in the forms and with the columns of "
        "`data.train`, such as the pairs of the policy's own SFT; null: none are mixed in.",
    )
    split: str | None = Field(None, description="Split of `path`, for a folder or hub id.")
    share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the pairs among the rows, which are drawn at random; 1: train on "
        "all pairs and no sample, the control that tells the gain from that of more SFT.",
    )


class BestOfNConfig(KeptConfig):
    """The config of best-of-n SFT."""

    task: Literal["best_of_n"] = Field("best_of_n", description="The task.")
    data: DataConfig = may_change(default_factory=DataConfig, description="Prompts.")
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="The model.")
    generation: SeveralConfig = Field(
        default_factory=SeveralConfig, description="Sampling of the translations."
    )
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Reward.")
    choice: ChoiceConfig = Field(default_factory=ChoiceConfig, description="Choice of one.")
    pairs: PairsConfig = Field(default_factory=PairsConfig, description="Pairs to mix in.")
    sft: SftSection = Field(default_factory=SftSection, description="Update.")
    eval: EvalConfig = Field(
        default_factory=EvalConfig, description="Evaluation, before and after."
    )
    misc: MiscConfig = Field(default_factory=MiscConfig, description="The rest.")

    @model_validator(mode="after")
    def _parts_are_valid(self) -> BestOfNConfig:
        if self.pairs.share == 1 and self.pairs.path is None:
            raise ValueError("pairs.share: 1 trains on pairs alone. Set pairs.path")
        unused = (
            (self.eval, "eval", "eval_every_n_updates"),
            (self.eval, "eval", "best_by"),
            (self.misc, "misc", "dump_every_n_updates"),
        )
        for section, name, key in unused:
            if getattr(section, key) != type(section).model_fields[key].default:
                raise ValueError(
                    f"{name}.{key}: best-of-n SFT evaluates before and after, and keeps all "
                    "candidates. Leave it out"
                )
        self.sft_run("rows.jsonl")
        return self

    @property
    def sources(self) -> dict[str, str | None]:
        """Return the files that a run reads: config key -> path."""
        return super().sources | {"pairs.path": self.pairs.path}

    @property
    def translation(self) -> TranslationConfig:
        """Return the config of a translation run with this policy, data and reward."""
        return TranslationConfig(
            data=self.data,
            policy=self.policy,
            generation=self.generation,
            reward=self.reward,
            rl=RLConfig(kl_coef=0.0),  # no update follows
            eval=self.eval,
            misc=self.misc,
        )

    def sft_run(self, rows: str) -> SftConfig:
        """Return the config of the SFT run on rows of ids, in the folder `sft` of the run."""
        shared = {name: getattr(self.misc, name) for name in RunMiscConfig.model_fields}
        folder = f"{self.misc.run_dir}/sft"
        return SftConfig(
            data=SftData(train=rows, max_length=None),
            policy=self.policy,
            sft=self.sft,
            eval=SftEval(eval_every_n_updates=0),
            misc=RunMiscConfig(**shared | {"run_dir": folder, "overwrite": False}),
        )
