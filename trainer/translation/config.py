"""The config of a run, with a sentence for each key. Unknown keys are errors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from scorekit.config import Config
from trainer.config_base import may_change
from trainer.rl.config import RLConfig
from trainer.translation.config_data import THE_SET, DataConfig
from trainer.translation.config_reward import RewardConfig


class LoraConfig(Config):
    """Low-rank adapters (arXiv 2106.09685) in place of full fine-tuning."""

    r: int = Field(0, ge=0, description="Rank of the adapters; 0: every weight learns.")
    alpha: float = Field(32.0, gt=0, description="The adapters' output is scaled by alpha / r.")
    target_modules: str | list[str] = Field(
        "all-linear", description="Names of the layers that get one; all-linear: all but the head."
    )


class PolicyConfig(Config):
    """The model that learns, and the frozen one it is held to."""

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
        description="In which the policy's weights are held. Adapters learn in float32; without "
        "them it must be float32, since bfloat16 rounds small updates away.",
    )
    load_in_4bit: bool = Field(
        False, description="Hold the frozen weights in 4 bits (bitsandbytes); needs adapters."
    )
    gradient_checkpointing: bool = may_change(
        False, description="Keep less of the forward pass and compute it again: memory for time."
    )

    @model_validator(mode="after")
    def _learns_in_float32(self) -> PolicyConfig:
        if self.lora.r == 0 and self.load_in_4bit:
            raise ValueError("load_in_4bit freezes the weights: set lora.r above 0")
        if self.lora.r == 0 and self.weights_dtype == "bfloat16":
            raise ValueError("weights_dtype bfloat16 rounds small updates away: set lora.r above 0")
        return self


class VLLMConfig(Config):
    """A running vLLM server as the sampler. Its key stands in VLLM_API_KEY."""

    url: str | None = Field(None, description="Root of the server, such as http://127.0.0.1:8000.")
    model: str | None = Field(None, description="Its --served-model-name; null: the only one.")
    sync_dir: str | None = Field(
        None,
        description="Folder that trainer and server both see, where the policy's weights are "
        "written after each update; null: `sync` in misc.run_dir.",
    )
    concurrency: int = Field(64, ge=1, description="Prompts under way at once.")
    timeout_s: float = Field(600.0, gt=0, description="Seconds that one prompt may take.")


class GenerationConfig(Config):
    """How completions are sampled. Every sampling field is explicit: nothing is taken from a
    model's generation_config.json but the ids that end a turn."""

    prompt_template: str = may_change(
        "translategemma",
        description="A template's name (scorekit.prompts) or a file's path; not used where the "
        "chat template takes the source text and language codes instead (TranslateGemma's).",
    )
    postprocess: str = Field(
        "strip",
        description="What becomes of a decoded completion before it is scored: strip (white space "
        "at its ends goes), none, or module:function, a text to a text.",
    )
    max_new_tokens: int = Field(128, ge=1, description="Longest completion in tokens.")
    temperature: float = Field(
        1.0, ge=0.0, description="Sampling temperature; 0: greedy (evaluation only)."
    )
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus sampling; 1: off.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0: off.")
    num_samples_per_prompt: int = Field(4, ge=1, description="Completions of each prompt.")
    batch_size: int = may_change(64, ge=1, description="Sequences that generate side by side.")
    engine: Literal["generate", "vllm"] = Field(
        "generate", description="Who samples: this process, or a vLLM server."
    )
    vllm: VLLMConfig = may_change(default_factory=VLLMConfig, description="The vLLM server.")

    @model_validator(mode="after")
    def _engine_is_named(self) -> GenerationConfig:
        if self.engine == "vllm" and self.vllm.url is None:
            raise ValueError("engine vllm: give the server's vllm.url")
        return self


class EvalConfig(Config):
    """How the policy is looked at: rewards, spans, and (shown only) chrF and BLEU."""

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


class MiscConfig(Config):
    """Seed, device, files."""

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
    patience_s: float = may_change(
        1800.0,
        gt=0,
        description="Seconds that the processes of a run wait for one of them, which may still be "
        "sampling, waiting for rewards, or writing a checkpoint; then the run ends and says for "
        "which it waited, and where that was.",
    )
    caching: bool = may_change(True, description="Let the services answer from their score caches.")
    run_dir: str = may_change("runs/trainer", description="Folder of logs and checkpoints.")
    overwrite: bool = may_change(False, description="Replace the run that stands in run_dir.")
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


class TrainerConfig(Config):
    """A whole run."""

    data: DataConfig = may_change(default_factory=DataConfig, description="Prompts.")
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="Models.")
    generation: GenerationConfig = Field(
        default_factory=GenerationConfig, description="Sampling of rollouts."
    )
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Reward.")
    rl: RLConfig = Field(default_factory=RLConfig, description="Update.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Evaluation.")
    stop: StopConfig = may_change(default_factory=StopConfig, description="Early ends.")
    misc: MiscConfig = Field(default_factory=MiscConfig, description="The rest.")

    @model_validator(mode="after")
    def _best_by_is_a_set(self) -> TrainerConfig:
        sets = list(self.data.held_out)
        if self.eval.best_by is not None and self.eval.best_by not in sets:
            known = ", ".join(sets) or "none"
            raise ValueError(f"eval.best_by: {self.eval.best_by!r} is no evaluation set ({known})")
        return self

    @property
    def best_by(self) -> str:
        """Name of the evaluation set that the best checkpoint is chosen by."""
        return self.eval.best_by or next(iter(self.data.held_out), THE_SET)

    @property
    def corrects_importance(self) -> bool:
        """Whether old_logprobs are the trainer's own, and the sampler's a correction."""
        chosen, generation = self.rl.importance_correction, self.generation
        cut = generation.top_p < 1 or generation.top_k > 0
        rounded = "bfloat16" in (self.misc.dtype, self.policy.weights_dtype)
        rounded = rounded or self.policy.load_in_4bit
        may_differ = generation.engine == "vllm" or rounded or cut
        return chosen == "on" or (chosen == "auto" and may_differ)

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
