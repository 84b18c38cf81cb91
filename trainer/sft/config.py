"""The config of an SFT run, with a sentence for each key. Unknown keys are errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from scorekit.config import Config
from trainer.chat.config import ChatConfig
from trainer.chat.rows import Which
from trainer.config_base import may_change
from trainer.rl.config import PolicyConfig
from trainer.runs.config import DeviceConfig, FolderConfig


class SftData(Config):
    """Where rows come from, and which of them are learned."""

    train: str | None = Field(
        None,
        description="Rows to learn from: a file (JSONL, JSON, CSV, TSV, each also as .gz; "
        "Parquet), a folder of them or of shards, or a hub id. A row has `messages`, a `prompt` "
        "and its `completion` (or `reference`), or `input_ids` and an `action_mask`.",
    )
    train_split: str | None = Field(None, description="Split of `train`, for a folder or hub id.")
    train_limit: int | None = Field(None, ge=1, description="Read this many training rows at most.")
    eval: str | None = Field(None, description="Held-out rows, in the same forms as `train`.")
    eval_split: str | None = Field(None, description="Split of `eval`, for a folder or hub id.")
    turns: Which = Field(
        "all",
        description="Which of the assistant's turns are learned of a row with messages: all of "
        "them, the last, or each in a row of its own behind what stands before it.",
    )
    max_length: int | None = Field(1024, ge=1, description="Tokens of a row at most; null: any.")
    overlong: Literal["leave_out", "cut_turns", "cut", "refuse"] = Field(
        "leave_out",
        description="What becomes of a longer row: it is left out; cut behind its last turn that "
        "fits; cut at max_length, also through a turn; or it ends the run. Counted each time.",
    )
    record: str | None = Field(
        None,
        description="record.jsonl of curation, or its folder: a training row whose `question_id` "
        "or `id` it condemns or leaves in doubt is left out, and counted.",
    )
    image_folder: str | None = Field(
        None, description="What paths in `images` are relative to; null: the folder of the file."
    )


class SftSection(Config):
    """The update, in the names of TRL's SFTConfig; every default that matters stands here."""

    assistant_only_loss: bool = Field(
        True, description="Learn the assistant's turns alone; false: every token."
    )
    per_device_train_batch_size: int = may_change(
        8, ge=1, description="Rows of a forward pass with gradients."
    )
    gradient_accumulation_steps: int = Field(1, ge=1, description="Such passes of an update.")
    num_train_epochs: float = Field(1.0, gt=0, description="Passes over the training rows.")
    max_steps: int | None = Field(
        None, ge=1, description="Updates of the run; null: num_train_epochs says."
    )
    learning_rate: float = Field(2e-5, gt=0, description="Peak learning rate of AdamW.")
    lr_scheduler_type: str = Field("linear", description="As transformers names them.")
    warmup_steps: int = Field(0, ge=0, description="Updates of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    loss_type: Literal["nll", "dft"] = Field(
        "nll", description="Negative log-likelihood, or dynamic fine-tuning (arXiv 2508.05629)."
    )
    packing: bool = Field(
        False,
        description="Put several rows into one sequence of data.max_length, none of them cut; "
        "each sees itself alone. Not of rows with images.",
    )
    template_check: Literal["refuse", "warn"] = may_change(
        "refuse", description="What a fault of the chat template does."
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Any other option of TRL's SFTConfig by its name: optim, "
        "activation_offloading, neftune_noise_alpha, ...",
    )


class SftEval(Config):
    """When the policy is looked at: its loss on held-out rows."""

    eval_every_n_updates: int = may_change(
        50, ge=0, description="0: only before and after training."
    )
    eval_limit: int | None = Field(None, ge=1, description="Held-out rows at most.")
    batch_size: int = may_change(8, ge=1, description="Rows of a forward pass.")


class SftMisc(FolderConfig, DeviceConfig):
    """Seed, device, files."""


class SftConfig(Config):
    """A whole run."""

    task: Literal["sft"] = Field("sft", description="What is learned.")
    data: SftData = may_change(default_factory=SftData, description="Rows.")
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="The model.")
    chat: ChatConfig = Field(default_factory=ChatConfig, description="Messages to text.")
    sft: SftSection = Field(default_factory=SftSection, description="Update.")
    eval: SftEval = Field(default_factory=SftEval, description="Held-out loss.")
    misc: SftMisc = Field(default_factory=SftMisc, description="The rest.")

    @model_validator(mode="after")
    def _makes_sense(self) -> SftConfig:
        if self.policy.reference_path is not None:
            raise ValueError("policy.reference_path: SFT is held to no reference: leave it out")
        if self.sft.packing and (self.data.max_length is None or self.data.overlong == "cut"):
            raise ValueError(
                "sft.packing: set data.max_length, and data.overlong to another than cut: a packed "
                "sequence holds whole rows"
            )
        return self

    @property
    def sources(self) -> dict[str, str | None]:
        """What a run reads: config key -> path."""
        return {
            "policy.path": self.policy.path,
            "policy.tokenizer": self.policy.tokenizer,
            "data.train": self.data.train,
            "data.eval": self.data.eval,
            "data.record": self.data.record,
            "chat.template": self.chat.template,
        }
