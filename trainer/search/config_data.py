"""The section `data` of a search config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from scorekit.rows.samples import BadRows
from trainer.runs.config import DEFAULT_EVAL_SET, HeldOutData, HeldOutSet, SetName

#: Field of a question -> the columns that may hold it; the first one with a value is used. `a.b` is
#: the field b within the column a, as in the Parquet files of veRL-like trainers.
COLUMNS: dict[str, tuple[str, ...]] = {
    "id": ("id", "uid", "extra_info.uid", "extra_info.index"),
    "question": ("question", "extra_info.question", "query"),
    "reference_answer": (
        "reference_answer",
        "ground_truth",
        "extra_info.reference_answer",
        "extra_info.ground_truth",
        "reward_model.ground_truth",
        "answer",
        "extra_info.answer",
    ),
    "reference_answers": ("reference_answers", "extra_info.reference_answers"),
    "file_name": ("file_name", "extra_info.file_name"),
    "reference_page": ("reference_page", "extra_info.reference_page"),
    "gold_pages": ("gold_pages", "extra_info.gold_pages"),
    "alternatives": ("alternatives", "extra_info.alternatives"),
    "question_type": ("question_type", "extra_info.question_type", "type"),
    "max_turns": ("max_turns", "extra_info.max_turns"),
    "temperature": ("temperature", "extra_info.temperature"),
    "n_agent": ("n_agent", "extra_info.n_agent"),
}


class SearchData(HeldOutData):
    """The files of questions and how to read them."""

    train: str | None = Field(
        None,
        description="Questions to learn from: a file (JSONL, JSON, CSV, TSV, each also as .gz; "
        "Parquet), a folder of them or of shards, or a hub id.",
    )
    train_split: str | None = Field(None, description="Split of `train`, for a folder or hub id.")
    train_limit: int | None = Field(None, ge=1, description="Read this many rows of it at most.")
    eval: str | None = Field(None, description="Held-out questions, in the same forms as `train`.")
    eval_split: str | None = Field(None, description="Split of `eval`, for a folder or hub id.")
    eval_sets: dict[SetName, HeldOutSet] = Field(
        default_factory=dict,
        description="Further held-out sets by name, each a path or keys of its own: all are "
        "evaluated, with figures of their own.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Our field (question, reference_page, ...) -> the column that holds it; "
        "`meta.page`: the field `page` within the column `meta`.",
    )
    max_prompt_length: int | None = Field(
        None,
        ge=1,
        description="Questions whose message has more tokens are left out, and counted; the "
        "instructions, which all questions share, are not counted. null: none is left out.",
    )
    overlong_prompts: Literal["leave_out", "refuse"] = Field(
        "leave_out", description="Or such a question ends the run before it begins."
    )
    bad_rows: BadRows = Field(
        "refuse",
        description="Rows that cannot be used (no JSON, a field that is missing or of another "
        "type): end the run with a list of them, or skip them: a warning counts them and lists "
        "the first 20.",
    )
    missing_gold: Literal["refuse", "leave_out"] = Field(
        "refuse",
        description="What a question does whose gold page is not in the index: end the run before "
        "it begins, or be left out, and counted.",
    )

    @field_validator("columns")
    @classmethod
    def _has_known_columns(cls, value: dict[str, str]) -> dict[str, str]:
        unknown = sorted(set(value) - set(COLUMNS))
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}; known: {', '.join(COLUMNS)}")
        return value

    @property
    def held_out(self) -> dict[str, HeldOutSet]:
        """Return all evaluation sets by name, first that of `eval`."""
        first = {}
        if self.eval is not None:
            first[DEFAULT_EVAL_SET] = HeldOutSet(path=self.eval, split=self.eval_split)
        return first | self.eval_sets
