"""The section `data` of a role-play config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from scorekit.config import Config
from scorekit.rows.samples import BadRows

#: Fields of a turn, besides its prompt, that a column can have.
STATED_FIELDS = ("player_name", "character_name", "speech_level", "scenario", "dialogue", "place")
FIELDS = ("id", "prompt", "prompt_messages", "reference", *STATED_FIELDS)


class RoleplayData(Config):
    """The files that prompts come from."""

    train: str | None = Field(
        None,
        description="Turns to train on: a file (JSONL, JSON, CSV, TSV, each also as .gz; "
        "Parquet), a folder of them or of shards, or a hub id.",
    )
    train_split: str | None = Field(None, description="Split of `train`, for a folder or hub id.")
    train_limit: int | None = Field(None, ge=1, description="Read this many training rows at most.")
    eval: str | None = Field(None, description="Held-out turns, in the same forms as `train`.")
    eval_split: str | None = Field(None, description="Split of `eval`, for a folder or hub id.")
    bad_rows: BadRows = Field(
        "refuse",
        description="Rows that cannot be used (no JSON, a field that is missing or of another "
        "type): end the run with a list of them, or skip them: a warning counts them and lists "
        "the first 20.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Our field (player_name, ...) -> its column; `meta.player`: the "
        "field `player` within the column `meta`.",
    )
    from_prompt: bool = Field(
        True,
        description="Read names and speech level from the system turn if no column has them.",
    )
    max_prompt_length: int | None = Field(
        1024,
        ge=1,
        description="Rows whose rendered prompt has more tokens are left out, and counted; null: "
        "no limit.",
    )
    overlong_prompts: Literal["leave_out", "refuse"] = Field(
        "leave_out", description="Leave such rows out, or end the run before it starts."
    )

    @field_validator("columns")
    @classmethod
    def _check_fields(cls, value: dict[str, str]) -> dict[str, str]:
        unknown = sorted(set(value) - set(FIELDS))
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}. Choose from {', '.join(FIELDS)}")
        return value
