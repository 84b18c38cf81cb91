"""The config of a run, with a sentence for each key. Unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from scorekit.config import Config

# `rl` keeps the seed's key names (batch_size, grad_accum, ...), which say prompts, not sequences.


def _split_commas(value: Any) -> Any:
    if isinstance(value, str):
        return [url.strip() for url in value.split(",") if url.strip()]
    return value


Urls = Annotated[list[str], BeforeValidator(_split_commas)]


class DataConfig(Config):
    """Where prompts come from."""

    train: str | None = Field(
        None, description="Prompts to learn from: a JSONL or Parquet file, a folder, or a hub id."
    )
    train_split: str | None = Field(None, description="Split of `train`, for a folder or hub id.")
    train_limit: int | None = Field(None, ge=1, description="Read this many training rows at most.")
    eval: str | None = Field(None, description="Held-out prompts, in the same forms as `train`.")
    eval_split: str | None = Field(None, description="Split of `eval`, for a folder or hub id.")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Our field name (src_text, src_lang, ...) -> the column that holds it.",
    )


class PolicyConfig(Config):
    """The model that learns, and the frozen one it is held to."""

    path: str | None = Field(None, description="Folder or hub id of the causal LM to train.")
    tokenizer: str | None = Field(None, description="Folder or hub id; null: the policy's own.")
    revision: str | None = Field(None, description="Hub revision of the policy.")
    reference_path: str | None = Field(
        None, description="The KL reference; null: the policy's weights when training starts."
    )


class GenerationConfig(Config):
    """How completions are sampled. Every sampling field is explicit: nothing is taken from a
    model's generation_config.json but the ids that end a turn."""

    prompt_template: str = Field(
        "translategemma",
        description="A template's name (scorekit.prompts) or a file's path; not used where the "
        "chat template takes the source text and language codes instead (TranslateGemma's).",
    )
    max_new_tokens: int = Field(128, ge=1, description="Longest completion in tokens.")
    temperature: float = Field(
        1.0, ge=0.0, description="Sampling temperature; 0: greedy (evaluation only)."
    )
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus sampling; 1: off.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0: off.")
    num_samples_per_prompt: int = Field(4, ge=1, description="Completions of each prompt.")
    batch_size: int = Field(64, ge=1, description="Sequences that generate side by side.")


class SeverityWeights(Config):
    """Reward of a token inside an error span, by the span's severity."""

    MINOR: float = Field(-1.0, le=0, description="Weight of a minor error.")
    MAJOR: float = Field(-5.0, le=0, description="Weight of a major error.")
    CRITICAL: float = Field(-10.0, le=0, description="Weight of a critical error.")

    @model_validator(mode="before")
    @classmethod
    def _any_case(cls, data: Any) -> Any:
        return {str(k).upper(): v for k, v in data.items()} if isinstance(data, dict) else data


class RewardConfig(Config):
    """What a completion earns, and who says so. References are never part of it."""

    metricx_urls: Urls = Field(
        default_factory=list,
        description="MetricX services, a list or comma-separated; empty: METRICX_URL of the "
        "environment. A `module:Class` instead of a URL scores in this process.",
    )
    metricx_scorer_args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of a `module:Class` in metricx_urls."
    )
    metricx_model_name: str | None = Field(
        None, description="The model that the service must run; null: any."
    )
    metricx_tokenizer_name: str | None = Field(
        None, description="The tokenizer that the service must use; null: any."
    )
    metricx_offset: float = Field(5.0, description="metricx_reward = metricx_offset - score.")
    w_metricx: float = Field(1.0, description="Weight of metricx_reward; 0: never asked for.")
    xcomet_urls: Urls = Field(
        default_factory=list,
        description="xCOMET services, as metricx_urls; empty: XCOMET_URL of the environment.",
    )
    xcomet_scorer_args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of a `module:Class` in xcomet_urls."
    )
    xcomet_model_name: str | None = Field(
        None, description="The model that the service must run; null: any."
    )
    w_xcomet_seq: float = Field(0.0, description="Weight of the xCOMET sentence score.")
    xcomet_seq_scale: float = Field(1.0, description="Factor on the xCOMET sentence score.")
    w_xcomet_span: float = Field(1.0, description="Weight of the token rewards of error spans.")
    severity_weights: SeverityWeights = Field(
        default_factory=SeverityWeights, description="Reward of a token inside an error span."
    )
    overlap_policy: Literal["any_overlap", "majority_overlap"] = Field(
        "any_overlap",
        description="A token is hit by a span that shares one character with it, or by one that "
        "covers at least `overlap_threshold` of it.",
    )
    overlap_threshold: float = Field(
        0.5, gt=0.0, le=1.0, description="Share of a token's characters, for majority_overlap."
    )
    span_combine: Literal["sum", "min", "max"] = Field(
        "sum", description="Several spans on a token: their sum, the weakest (min), the strongest."
    )
    use_confidence: bool = Field(False, description="Multiply a penalty by its span's confidence.")
    overlong: Literal["truncate", "error"] = Field(
        "truncate", description="Input over the reward model's limit: cut, or a failed sample."
    )
    max_input_length: int | None = Field(
        None, ge=16, description="The reward model's limit in tokens; null: the model's own."
    )
    on_failure: Literal["drop_sample", "fail"] = Field(
        "drop_sample",
        description="A score that a service failed to give: leave the sample out of the batch and "
        "of its mean and deviation, or end the run.",
    )
    text_error_reward: float = Field(
        -20.0,
        description="Sequence reward of a completion that cannot be scored by its own fault "
        "(overlong, invalid_input); never dropped, or the policy would learn to hide there.",
    )
    no_eos_penalty: float = Field(
        0.0, ge=0.0, description="Taken off the reward of a completion cut by max_new_tokens."
    )
    batch_size: int = Field(64, ge=1, description="Samples in one request to a service.")
    timeout_s: float = Field(60.0, gt=0, description="Seconds that one request may take.")
    deadline_s: float = Field(
        300.0, gt=0, description="Seconds after which a service that fails is given up for a batch."
    )

    @property
    def needs_metricx(self) -> bool:
        """Whether the reward has a MetricX term."""
        return self.w_metricx != 0

    @property
    def needs_spans(self) -> bool:
        """Whether the reward has a span term."""
        return self.w_xcomet_span != 0 and any(self.severity_weights.model_dump().values())

    @property
    def needs_xcomet(self) -> bool:
        """Whether the reward has an xCOMET term."""
        return self.w_xcomet_seq * self.xcomet_seq_scale != 0 or self.needs_spans

    @property
    def has_terms(self) -> bool:
        """Whether anything at all is rewarded."""
        return self.needs_metricx or self.needs_xcomet or self.no_eos_penalty > 0


class RLConfig(Config):
    """The update of the policy."""

    algorithm: Literal["ppo", "reinforce"] = Field(
        "ppo", description="Clipped surrogate, or plain policy gradient (one step a batch)."
    )
    num_updates: int = Field(20, ge=1, description="Updates of the run.")
    batch_size: int = Field(8, ge=1, description="Prompts of a rollout round.")
    grad_accum: int = Field(
        1, ge=1, description="Rollout rounds of an update: it sees batch_size x grad_accum prompts."
    )
    micro_batch_tokens: int = Field(
        4096, ge=1, description="Padded tokens of a forward pass; changes memory, not the result."
    )
    ppo_epochs: int = Field(
        2, ge=1, description="Passes over a batch (PPO); with 1 the ratio is 1 and clips nothing."
    )
    minibatches: int = Field(1, ge=1, description="Optimiser steps of a pass (PPO).")
    lr: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    warmup_updates: int = Field(0, ge=0, description="Updates of linear warm-up.")
    lr_decay: Literal["none", "linear"] = Field(
        "none", description="Learning rate after the warm-up: constant, or falling to 0."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    clip_eps: float = Field(0.2, gt=0, lt=1, description="PPO's clip range of the ratio.")
    kl_coef: float = Field(
        0.05, ge=0, description="Weight of the KL to the reference; 0: no reference is kept."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k2", description="KL as a loss: k2 has the gradient of the KL; k1 is the seed's formula."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    center_groups: bool = Field(
        False, description="Subtract the mean sequence reward of a prompt's samples first."
    )
    advantage_eps: float = Field(1e-8, gt=0, description="Added to the deviation of the batch.")

    @model_validator(mode="after")
    def _warm_up_ends(self) -> RLConfig:
        if self.warmup_updates >= self.num_updates:
            raise ValueError(
                f"warmup_updates {self.warmup_updates} must be less than num_updates "
                f"{self.num_updates}, or the learning rate never reaches lr"
            )
        return self


class EvalConfig(Config):
    """How the policy is looked at: rewards, spans, and (shown only) chrF and BLEU."""

    eval_every_n_updates: int = Field(10, ge=0, description="0: only before and after training.")
    eval_limit: int | None = Field(None, ge=1, description="Held-out examples at most.")
    temperature: float = Field(0.0, ge=0, description="0: greedy.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus sampling; 1: off.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0: off.")
    max_new_tokens: int | None = Field(None, ge=1, description="Null: generation's.")


class MiscConfig(Config):
    """Seed, device, files."""

    seed: int = Field(0, ge=0, description="Fixes data order and sampling.")
    device: str = Field("auto", description="`cpu`, `cuda`, ...; auto: a GPU where there is one.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of the arithmetic (autocast); weights stay float32."
    )
    threads: int | None = Field(None, ge=1, description="Threads of torch; null: torch's choice.")
    caching: bool = Field(True, description="Let the services answer from their score caches.")
    run_dir: str = Field("runs/trainer", description="Folder of logs and checkpoints.")
    overwrite: bool = Field(False, description="Replace the run that stands in run_dir.")
    save_every_n_updates: int = Field(0, ge=0, description="0: only the final checkpoint.")
    dump_every_n_updates: int = Field(1, ge=0, description="Training completions; 0: none.")


class TrainerConfig(Config):
    """A whole run."""

    data: DataConfig = Field(default_factory=DataConfig, description="Prompts.")
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="Models.")
    generation: GenerationConfig = Field(
        default_factory=GenerationConfig, description="Sampling of rollouts."
    )
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Reward.")
    rl: RLConfig = Field(default_factory=RLConfig, description="Update.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Evaluation.")
    misc: MiscConfig = Field(default_factory=MiscConfig, description="The rest.")

    def eval_generation(self) -> GenerationConfig:
        """Sampling settings of an evaluation: one completion a prompt, greedy by default."""
        return self.generation.model_copy(
            update={
                "temperature": self.eval.temperature,
                "top_p": self.eval.top_p,
                "top_k": self.eval.top_k,
                "max_new_tokens": self.eval.max_new_tokens or self.generation.max_new_tokens,
                "num_samples_per_prompt": 1,
            }
        )
