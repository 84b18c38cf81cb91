"""Sections `policy`, `generation` and `rl` of a run's config.

The key names (`batch_size`, `grad_accum`, ...) are fixed, because configs use them. They count
prompts, not sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from scorekit.config import Config
from scorekit.errors import UserError
from trainer.config_base import may_change
from trainer.rl.algorithms import ALGORITHMS
from trainer.rl.algorithms.algorithm import Algorithm, ImportanceCorrection, ImportanceMode

if TYPE_CHECKING:
    AlgorithmName = str
else:
    AlgorithmName = Literal[tuple(ALGORITHMS)]


class LoraConfig(Config):
    """Low-rank adapters (arXiv 2106.09685) instead of full fine-tuning."""

    r: int = Field(0, ge=0, description="Rank of the adapters; 0: every weight is trained.")
    alpha: float = Field(32.0, gt=0, description="The adapters' output is scaled by alpha / r.")
    target_modules: str | list[str] = Field(
        "all-linear",
        description="Names of the layers with adapters, or a pattern of full names; all-linear: "
        "all except the head and the layers that only process images. A layer that shares its "
        "weight (tied embeddings) can have none.",
    )


class PolicyConfig(Config):
    """The model that is trained, and its frozen reference model."""

    path: str | None = may_change(None, description="Folder or hub id of the causal LM to train.")
    tokenizer: str | None = may_change(
        None, description="Folder or hub id; null: the policy's own."
    )
    revision: str | None = may_change(None, description="Hub revision of the policy.")
    reference_path: str | None = may_change(
        None, description="The KL reference; null: the policy's weights when training starts."
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="Low-rank adapters.")
    weights_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Data type of the policy's weights. Adapters are float32; without "
        "them it must be float32, since bfloat16 rounds small updates away.",
    )
    load_in_4bit: bool = Field(
        False, description="Store the frozen weights in 4 bits (bitsandbytes); requires adapters."
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = Field(
        "nf4", description="4-bit normal floats (arXiv 2305.14314), or 4-bit floats."
    )
    bnb_4bit_use_double_quant: bool = Field(
        True, description="Store the scales of the 4-bit weights in 8 bits, too."
    )
    bnb_4bit_compute_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Data type of products with the 4-bit weights."
    )
    gradient_checkpointing: bool = may_change(
        False,
        description="Store less of the forward pass and recompute it: less memory, more time.",
    )

    @model_validator(mode="after")
    def _trained_weights_are_float32(self) -> PolicyConfig:
        if self.lora.r == 0 and self.load_in_4bit:
            raise ValueError("load_in_4bit freezes the weights: set lora.r above 0")
        if self.lora.r == 0 and self.weights_dtype == "bfloat16":
            raise ValueError("weights_dtype bfloat16 rounds small updates away: set lora.r above 0")
        return self


def _split_commas(value: Any) -> Any:
    """Return a comma-separated text as a list; one URL stays a text. Spaces around it go."""
    if isinstance(value, list):
        return [url.strip() if isinstance(url, str) else url for url in value]
    if not isinstance(value, str):
        return value
    return (
        [url.strip() for url in value.split(",") if url.strip()] if "," in value else value.strip()
    )


class VLLMConfig(Config):
    """Running vLLM servers as the sampler. Their API key is read from VLLM_API_KEY."""

    url: Annotated[str | list[str] | None, BeforeValidator(_split_commas)] = Field(
        None,
        description="Root of the server, such as http://127.0.0.1:8000; several: a list, or "
        "comma-separated. A server that fails is left out until it answers again.",
    )
    model: str | None = Field(None, description="Their --served-model-name; null: the only one.")
    sync_dir: str | None = Field(
        None,
        description="Folder that trainer and servers all see, where the policy's weights are "
        "written after each update; null: `sync` in misc.run_dir.",
    )
    concurrency: int = Field(
        256, ge=1, description="Prompts in flight at each server, of each process of the run."
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds that one prompt may take, all attempts together. With several "
        "servers, one of them may take half of it.",
    )

    @property
    def urls(self) -> list[str]:
        """Return the URLs of all servers."""
        if isinstance(self.url, str):
            return [self.url] if self.url else []
        return list(self.url or ())

    @model_validator(mode="after")
    def _urls_are_valid_and_different(self) -> VLLMConfig:
        from scorekit.client.transport import checked_url  # slow to import

        for url in self.urls:
            try:
                checked_url(url)
            except UserError as error:
                raise ValueError(f"url: {error}") from None
        roots = [checked_url(url).removesuffix("/v1") for url in self.urls]
        for root in roots:
            if roots.count(root) > 1:
                raise ValueError(f"url: {root} is listed twice. List each server once")
        return self


class SamplingConfig(Config):
    """Settings of the sampler.

    All of them are explicit: of generation_config.json only the ids that end a turn are used.
    """

    max_new_tokens: int = Field(128, ge=1, description="Longest completion in tokens.")
    temperature: float = Field(
        1.0, ge=0.0, description="Sampling temperature; 0: greedy (evaluation only)."
    )
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus sampling; 1: off.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0: off.")
    num_samples_per_prompt: int = Field(4, ge=1, description="Completions of each prompt.")
    batch_size: int = may_change(64, ge=1, description="Sequences in one generation batch.")
    engine: Literal["generate", "vllm"] = Field(
        "generate", description="What samples: this process, or a vLLM server."
    )
    vllm: VLLMConfig = may_change(default_factory=VLLMConfig, description="The vLLM server.")

    @model_validator(mode="after")
    def _engine_is_named(self) -> SamplingConfig:
        if self.engine == "vllm" and not self.vllm.urls:
            raise ValueError("engine vllm: give the server's vllm.url")
        return self


class RLConfig(Config):
    """Settings of a policy update."""

    algorithm: AlgorithmName = Field(
        "ppo",
        description="ppo: the clipped loss, with the ratio of each token's probabilities (new over "
        "old). gspo: with one ratio for the sequence. reinforce: plain policy gradient, one step a "
        "batch.",
    )
    num_updates: int = may_change(20, ge=1, description="Updates of the run.")
    batch_size: int = Field(8, ge=1, description="Prompts of a rollout round.")
    grad_accum: int = Field(
        1, ge=1, description="Rollout rounds of an update: it has batch_size x grad_accum prompts."
    )
    max_staleness: int = may_change(
        0,
        ge=0,
        le=100,
        description="Largest age, in updates, of the weights that sampled a token to learn from; "
        "0: generation and update alternate. Above 0, the batches of the next updates are "
        "generated while this one learns.",
    )
    micro_batch_tokens: int = may_change(
        4096, ge=1, description="Padded tokens of a forward pass; changes memory, not the result."
    )
    ppo_epochs: int = Field(
        2,
        ge=1,
        description="Passes over a batch (reinforce has one). With one pass and one minibatch the "
        "ratio is 1, so nothing is clipped.",
    )
    minibatches: int = Field(1, ge=1, description="Optimizer steps of a pass (not of reinforce).")
    minibatch_size: int | None = Field(
        None,
        ge=1,
        description="Sequences of an optimizer step, instead of `minibatches`: a pass has as many "
        "steps as its sequences need.",
    )
    lr: float = may_change(1e-6, gt=0, description="Peak learning rate of AdamW.")
    warmup_updates: int = may_change(0, ge=0, description="Updates of linear warm-up.")
    lr_decay: Literal["none", "linear", "cosine"] = may_change(
        "none",
        description="Learning rate after the warm-up: constant, or falling to 0, evenly or along "
        "half a cosine.",
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    clip_eps: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="The ratio is clipped to at least 1 - clip_eps, and at most 1 + clip_eps. The "
        "default of gspo is 3e-4 below and 4e-4 above 1.",
    )
    clip_eps_high: float | None = Field(
        None, gt=0, description="Upper limit of the ratio, 1 + clip_eps_high; null: clip_eps."
    )
    loss_mean: Literal["token", "sequence"] = Field(
        "token",
        description="Every token of the batch weighs the same, or every sequence does (the mean "
        "of its tokens first).",
    )
    mask_truncated: bool = Field(
        False, description="Do not train on completions that max_new_tokens truncated."
    )
    max_log_ratio: float = Field(
        20.0, gt=0, description="Log-ratios are clamped to this before exp()."
    )
    importance_correction: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Weigh each token by the ratio of its probability in the trainer (computed "
        "again, before the update) and in the sampler. auto: where the two may differ "
        "(max_staleness above 0, a vLLM sampler, bfloat16 or 4-bit weights or arithmetic, top_p or "
        "top_k).",
    )
    importance_mode: ImportanceMode = Field(
        "token_truncate",
        description="The ratio is each token's, or one of the sequence on all its tokens (the "
        "product; with gspo, whose default is sequence_truncate, the geometric mean). truncate: "
        "at most importance_cap. mask: tokens or sequences with a ratio below importance_floor or "
        "above importance_cap are not learned from.",
    )
    importance_cap: float = Field(
        2.0,
        gt=0,
        description="Largest ratio of the importance correction, of a token or of a sequence.",
    )
    importance_floor: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Smallest ratio that importance_mode keeps if it masks; null: "
        "1 / importance_cap.",
    )
    kl_coef: float = may_change(
        0.05,
        ge=0,
        description="Weight of the KL divergence to the frozen reference model: how strongly the "
        "policy is kept close to it; 0: no reference model, unless stop.kl_ceiling needs one.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = may_change(
        "k2",
        description="How a token's KL is estimated from d, its log-probability in the policy minus "
        "in the reference. k2: d^2 / 2, right with kl_in loss. k1: d, right with kl_in reward and "
        "its default there; without effect as a loss. k3: exp(-d) - 1 + d.",
    )
    kl_in: Literal["loss", "reward"] = may_change(
        "loss",
        description="How the KL keeps the policy close to the reference. loss: as a term of the "
        "loss. reward: a token's KL is a penalty on that token and on all before it, which is part "
        "of the token rewards (see advantage_norm).",
    )
    entropy_coef: float = Field(
        0.0, ge=0, description="Weight of a bonus for entropy, against too certain a policy."
    )
    center_groups: bool = Field(
        False,
        description="Subtract from each sequence reward the mean of its prompt's samples, before "
        "the token rewards are added.",
    )
    advantage_norm: Literal["batch", "group", "grpo"] = Field(
        "batch",
        description="Over what advantages get mean 0 and deviation 1. batch: all valid tokens of "
        "the batch. group: the tokens of the prompt's samples. grpo: only the sequence rewards, "
        "over the prompt's samples (unbiased deviation); token rewards are added unchanged.",
    )
    advantage_eps: float = Field(
        1e-8,
        gt=0,
        description="Added to the deviation of advantage_norm; the default of grpo is TRL's 1e-4.",
    )

    @field_validator("importance_correction", mode="before")
    @classmethod
    def _convert_yaml_booleans(cls, value: Any) -> Any:
        """Convert a plain on or off, which YAML reads as true or false."""
        return ("on" if value else "off") if isinstance(value, bool) else value

    @model_validator(mode="before")
    @classmethod
    def _defaults_follow_choices(cls, data: Any) -> Any:
        """Default to the KL estimator whose gradient is right, to TRL's epsilon with its norm, and
        to the settings of the algorithm's paper."""
        if not isinstance(data, dict):
            return data
        if data.get("kl_in") == "reward":
            data = {"kl_estimator": "k1"} | data
        if data.get("advantage_norm") == "grpo":
            data = {"advantage_eps": 1e-4} | data
        algorithm = data.get("algorithm")
        return ALGORITHMS[algorithm].with_defaults(data) if algorithm in [*ALGORITHMS] else data

    @property
    def chosen_algorithm(self) -> Algorithm:
        """Return the algorithm with the name `algorithm`."""
        return ALGORITHMS[self.algorithm]

    @property
    def correction(self) -> ImportanceCorrection:
        """Return the settings of the importance correction, also if it is off."""
        floor = 1 / self.importance_cap if self.importance_floor is None else self.importance_floor
        return ImportanceCorrection(
            self.importance_mode, self.importance_cap, floor, self.max_log_ratio
        )

    def num_steps(self, sequences: int) -> int:
        """Return the number of steps of a pass over so many sequences, equal up to one sequence."""
        steps = self.minibatches
        if self.chosen_algorithm.takes_one_step:
            steps = 1
        elif self.minibatch_size is not None:
            steps = -(-sequences // self.minibatch_size)
        return min(steps, sequences)

    @model_validator(mode="after")
    def _warm_up_ends(self) -> RLConfig:
        if self.warmup_updates >= self.num_updates:
            raise ValueError(
                f"warmup_updates {self.warmup_updates} must be less than num_updates "
                f"{self.num_updates}, or the learning rate never reaches lr"
            )
        return self

    @model_validator(mode="after")
    def _stale_samples_are_corrected(self) -> RLConfig:
        if self.importance_correction == "off" and self.max_staleness > 0:
            raise ValueError(
                f"importance_correction off: with max_staleness {self.max_staleness} older weights "
                "sample, and without a correction the gradient is not the policy's. Set "
                "importance_correction to auto or on, or max_staleness to 0"
            )
        return self

    @model_validator(mode="after")
    def _importance_settings_have_an_effect(self) -> RLConfig:
        mode, is_masking = self.importance_mode, self.correction.is_masking
        is_default = mode == self.chosen_algorithm.importance_mode
        if self.importance_correction == "off" and not is_default:
            raise ValueError(
                f"importance_mode {mode}: importance_correction is off. Set it to auto or on, or "
                "remove importance_mode"
            )
        if self.importance_floor is not None and not is_masking:
            raise ValueError(
                f"importance_floor {self.importance_floor:g}: {mode} has no lower bound. Set "
                f"importance_mode to {mode.replace('truncate', 'mask')}, or remove importance_floor"
            )
        if is_masking and self.importance_cap < 1:
            raise ValueError(
                f"importance_cap {self.importance_cap:g}: {mode} would mask every sample of the "
                "current policy, whose ratio is 1. Set importance_cap to 1 or more"
            )
        return self
