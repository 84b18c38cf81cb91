"""The section `reward` of a role-play's config."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from scorekit.config import Config
from trainer.config_base import may_change


class RewardConfig(Config):
    """What the five functions are asked with. Their formulas: docs/roleplay.md."""

    embedding_model: str = may_change(
        "data/embedding/BGE-m3-ko",
        description="URL of an embedding server (ours, TEI, vLLM, OpenAI), or a folder that the "
        "run starts one for. Which model answers is held against the calibration.",
    )
    embedding_batch_size: int = may_change(16, ge=1, description="Texts of one request.")
    calibration: Path | None = Field(
        None,
        description="calibration.json of `trainer roleplay calibrate`; null: the run fits one on "
        "its training data and writes it into its folder.",
    )
    calibration_rows: int = Field(
        512, ge=1, description="Turns that are drawn of the training data to fit one."
    )
    weights: dict[str, float] = Field(
        default_factory=dict,
        description="Function (reward_format, ...) -> its weight, where that is another.",
    )
    corner_quotes: bool = Field(
        False, description="「」 and 『』 are quotation marks of speech, too."
    )
    player_name_rule: Literal["subject", "literal"] = Field(
        "subject",
        description="When the player's name costs: as subject or topic of a finite clause of the "
        "narration; or (literal) anywhere before such a particle.",
    )

    echo_guard: bool = Field(
        False,
        description="A reply that says the user turn again and little else gets 0 from "
        "reward_grounded_to_user; off: it loses 0.10 at most.",
    )

    @property
    def is_url(self) -> bool:
        """Whether `embedding_model` is a server's address."""
        return self.embedding_model.startswith(("http://", "https://"))
