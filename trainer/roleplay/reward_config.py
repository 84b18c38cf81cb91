"""The section `reward` of a role-play config."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from scorekit.config import Config
from trainer.config_base import may_change


class RewardConfig(Config):
    """Settings of the five reward functions. Formulas: docs/explanation/roleplay-rewards.md."""

    embedding_model: str = may_change(
        "data/embedding/BGE-m3-ko",
        description="URL of an embedding server (ours, TEI, vLLM, OpenAI), or a folder that the "
        "run starts a server for. The answering model is compared with the calibration.",
    )
    embedding_batch_size: int = may_change(16, ge=1, description="Texts of one request.")
    calibration: Path | None = Field(
        None,
        description="calibration.json of `trainer roleplay calibrate`; null: the run fits one on "
        "its training data and writes it into its folder.",
    )
    calibration_rows: int = Field(
        512, ge=1, description="Turns of the training data that are sampled to fit one."
    )
    weights: dict[str, float] = Field(
        default_factory=dict,
        description="Function (reward_format, ...) -> its weight, if it is not the default.",
    )
    corner_quotes: bool = Field(
        False, description="「」 and 『』 are quotation marks of speech, too."
    )
    player_name_rule: Literal["subject", "literal"] = Field(
        "subject",
        description="When the player's name has a penalty. subject: as subject or topic of a "
        "clause that the narration tells as a fact. literal: anywhere in the reply, before a "
        "particle.",
    )

    echo_guard: bool = Field(
        False,
        description="A reply that repeats the user turn and adds little gets 0 from "
        "reward_grounded_to_user; off: it loses at most 0.10.",
    )

    @property
    def is_url(self) -> bool:
        """Return whether `embedding_model` is the address of a server."""
        return self.embedding_model.startswith(("http://", "https://"))
