"""The config of a role-play run. Unknown keys are errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from scorekit.config import Config
from trainer.chat.config import MessagesConfig
from trainer.config_base import may_change
from trainer.rl.config import PolicyConfig, SamplingConfig
from trainer.roleplay.config_data import RoleplayData
from trainer.roleplay.reward_config import RewardConfig
from trainer.runs.config import KeptConfig, MiscConfig

LossType = Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]


class GRPOSection(Config):
    """The update, in the names of TRL's GRPOConfig, with every default that matters."""

    num_generations: int = Field(4, ge=2, description="Completions of a prompt: its group.")
    per_device_train_batch_size: int = may_change(
        1, ge=1, description="Completions of a forward pass with gradients."
    )
    gradient_accumulation_steps: int = Field(
        16,
        ge=1,
        description="Forward passes of an update: it has this number times "
        "per_device_train_batch_size completions of each process.",
    )
    steps_per_generation: int | None = Field(
        None,
        ge=1,
        description="Passes for one sampling of completions; null: those of an update.",
    )
    num_iterations: int = Field(1, ge=1, description="Times that a batch is trained on.")
    num_train_epochs: float = may_change(2.0, gt=0, description="Passes over the training turns.")
    max_steps: int | None = may_change(
        None, ge=1, description="Updates of the run; null: from num_train_epochs."
    )
    learning_rate: float = Field(2e-6, gt=0, description="Peak learning rate of AdamW.")
    lr_scheduler_type: str = Field(
        "linear", description="Schedule of the learning rate, as transformers names it."
    )
    warmup_steps: int = Field(0, ge=0, description="Updates of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    max_completion_length: int = Field(220, ge=1, description="Longest completion in tokens.")
    temperature: float = Field(1.0, gt=0, description="Of sampling and log-probabilities.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1: off.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0: off.")
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Least probability of a sampled token, as a share of the likeliest one's; "
        "null: off.",
    )
    repetition_penalty: float = Field(
        1.0, gt=0, description="Makes tokens that were written before less likely; 1: off."
    )
    loss_type: LossType = Field("dapo", description="How tokens are weighed, as TRL names it.")
    beta: float = Field(0.0, ge=0, description="Weight of the KL to the start; 0: not computed.")
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group", description="Advantages are divided by the deviation of the group, or the batch."
    )
    epsilon: float = Field(0.2, gt=0, description="Clip range of the ratio.")
    epsilon_high: float | None = Field(None, gt=0, description="Upper side; null: epsilon.")
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="Ratios of tokens, or of whole sequences (GSPO)."
    )
    mask_truncated_completions: bool = Field(
        False, description="Do not train on completions that max_completion_length truncated."
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Any other option of TRL's GRPOConfig by its name: use_vllm, vllm_mode, optim, "
        "...",
    )


class EvalConfig(Config):
    """When and how the policy is evaluated."""

    eval_every_n_updates: int = may_change(
        50, ge=0, description="Updates between evaluations; 0: only before and after training."
    )
    eval_limit: int | None = may_change(None, ge=1, description="Held-out turns at most.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0: greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1: off.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0: off.")
    batch_size: int = may_change(8, ge=1, description="Turns in one generation batch.")
    kl: bool = may_change(
        True,
        description="Measure the KL to the start on the held-out replies; if every weight "
        "is trained, a second model is loaded meanwhile.",
    )


class StartConfig(Config):
    """Checks before the first update."""

    template_check: Literal["refuse", "warn"] = may_change(
        "refuse", description="Action if the chat template fails its check."
    )
    sample_prompts: int = may_change(
        20, ge=0, description="Prompts to sample replies for, to count those that end."
    )


class RoleplayConfig(KeptConfig):
    """The config of a role-play run."""

    task: Literal["roleplay"] = Field("roleplay", description="The task.")
    data: RoleplayData = may_change(default_factory=RoleplayData, description="Turns.")
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="The model.")
    chat: MessagesConfig = Field(default_factory=MessagesConfig, description="Messages to text.")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Reward.")
    grpo: GRPOSection = Field(default_factory=GRPOSection, description="Update.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Evaluation.")
    start: StartConfig = Field(default_factory=StartConfig, description="Before the first update.")
    misc: MiscConfig = Field(default_factory=MiscConfig, description="The rest.")

    @model_validator(mode="after")
    def _check_reference(self) -> RoleplayConfig:
        if self.policy.reference_path is not None:
            raise ValueError(
                "policy.reference_path: the reference of role-play is its own start (grpo.beta). "
                "Remove it"
            )
        return self

    @property
    def sources(self) -> dict[str, str | None]:
        """Return the files that a run reads: config key -> path."""
        return super().sources | {
            "data.eval": self.data.eval,
            "chat.template": self.chat.template,
        }

    def sampling(self, *, evaluation: bool) -> SamplingConfig:
        """Return how replies are sampled: one each, as in an evaluation or as in training."""
        section = self.eval if evaluation else self.grpo
        return SamplingConfig(
            max_new_tokens=self.grpo.max_completion_length,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            num_samples_per_prompt=1,
            batch_size=self.eval.batch_size,
        )
