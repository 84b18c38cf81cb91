"""The config of an SFT run. Unknown keys are errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from scorekit.config import Config
from scorekit.rows.samples import BadRows
from trainer.chat.config import MessagesConfig
from trainer.chat.rows import Which
from trainer.config_base import may_change
from trainer.rl.config import PolicyConfig
from trainer.runs.config import KeptConfig, MiscConfig


class SftData(Config):
    """The files of rows, and which of their turns are trained on."""

    train: str | None = Field(
        None,
        description="Rows to train on: a file (JSONL, JSON, CSV, TSV, each also as .gz; "
        "Parquet), a folder of them or of shards, or a hub id. A row has `messages`, a `prompt` "
        "and its `completion` (or `reference`), or `input_ids` and an `action_mask`.",
    )
    train_split: str | None = Field(None, description="Split of `train`, for a folder or hub id.")
    train_limit: int | None = Field(None, ge=1, description="Read this many training rows at most.")
    eval: str | None = Field(None, description="Held-out rows, in the same forms as `train`.")
    eval_split: str | None = Field(None, description="Split of `eval`, for a folder or hub id.")
    bad_rows: BadRows = Field(
        "refuse",
        description="Rows that cannot be used (no JSON, a field that is missing or of another "
        "type): end the run with a list of them, or skip them: a warning counts them and lists "
        "the first 20.",
    )
    turns: Which = Field(
        "all",
        description="The assistant's turns of a row with messages to train on: all of "
        "them, the last, or each in a separate row after the turns before it.",
    )
    max_length: int | None = Field(1024, ge=1, description="Tokens of a row at most; null: any.")
    overlong: Literal["leave_out", "cut_turns", "cut", "refuse"] = Field(
        "leave_out",
        description="How a longer row is handled: it is left out; cut after its last turn that "
        "fits; cut at max_length, also within a turn; or it ends the run. Each case is counted.",
    )
    record: str | None = Field(
        None,
        description="record.jsonl of curation, or its folder: a training row whose `question_id` "
        "or `id` it drops or leaves in doubt is left out, and counted.",
    )
    image_folder: str | None = Field(
        None, description="What paths in `images` are relative to; null: the folder of the file."
    )


class SftSection(Config):
    """The update, in the names of TRL's SFTConfig, with every default that matters."""

    assistant_only_loss: bool = Field(
        True, description="Train on the assistant's turns only; false: on every token."
    )
    per_device_train_batch_size: int = may_change(
        8, ge=1, description="Rows of a forward pass with gradients."
    )
    gradient_accumulation_steps: int = Field(
        1, ge=1, description="Forward passes of an update, in each process."
    )
    num_train_epochs: float = Field(1.0, gt=0, description="Passes over the training rows.")
    max_steps: int | None = Field(
        None, ge=1, description="Updates of the run; null: from num_train_epochs."
    )
    learning_rate: float = Field(2e-5, gt=0, description="Peak learning rate of AdamW.")
    lr_scheduler_type: str = Field(
        "linear", description="Schedule of the learning rate, as transformers names it."
    )
    warmup_steps: int = Field(0, ge=0, description="Updates of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    loss_type: Literal["nll", "dft"] = Field(
        "nll", description="Negative log-likelihood, or dynamic fine-tuning (arXiv 2508.05629)."
    )
    packing: bool = Field(
        False,
        description="Put several rows into one sequence of data.max_length, without cutting them; "
        "each row attends to itself only. Not for rows with images.",
    )
    template_check: Literal["refuse", "warn"] = may_change(
        "refuse", description="Action if the chat template fails its check."
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Any other option of TRL's SFTConfig by its name: optim, "
        "activation_offloading, neftune_noise_alpha, ...",
    )


class SftEval(Config):
    """When the loss on held-out rows is measured."""

    eval_every_n_updates: int = may_change(
        50, ge=0, description="Updates between evaluations; 0: only before and after training."
    )
    eval_limit: int | None = Field(None, ge=1, description="Held-out rows at most.")
    batch_size: int = may_change(8, ge=1, description="Rows of a forward pass.")


class SftConfig(KeptConfig):
    """The config of an SFT run."""

    task: Literal["sft"] = Field("sft", description="The task.")
    data: SftData = may_change(default_factory=SftData, description="Rows.")
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="The model.")
    chat: MessagesConfig = Field(default_factory=MessagesConfig, description="Messages to text.")
    sft: SftSection = Field(default_factory=SftSection, description="Update.")
    eval: SftEval = Field(default_factory=SftEval, description="Held-out loss.")
    misc: MiscConfig = Field(default_factory=MiscConfig, description="The rest.")

    @model_validator(mode="after")
    def _makes_sense(self) -> SftConfig:
        if self.policy.reference_path is not None:
            raise ValueError("policy.reference_path: SFT has no reference model. Remove it")
        if self.sft.packing and (self.data.max_length is None or self.data.overlong == "cut"):
            raise ValueError(
                "sft.packing: set data.max_length, and data.overlong to another value than cut: a "
                "packed sequence has complete rows"
            )
        return self

    @property
    def sources(self) -> dict[str, str | None]:
        """Return the files that a run reads: config key -> path."""
        return super().sources | {
            "data.eval": self.data.eval,
            "data.record": self.data.record,
            "chat.template": self.chat.template,
        }
