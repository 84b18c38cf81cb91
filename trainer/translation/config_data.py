"""The `data` section of a translation run's config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from scorekit.rows.samples import BadRows
from trainer.runs.config import DEFAULT_EVAL_SET, HeldOutData, HeldOutSet, SetName


class EvalSet(HeldOutSet):
    """A held-out set. Null values are those of the section `data`."""

    name: str | None = Field(None, description="Configuration, for a hub id.")
    columns: dict[str, str] | None = Field(None, description="As `data.columns`.")
    src_lang: str | None = Field(None, description="As `data.src_lang`.")
    tgt_lang: str | None = Field(None, description="As `data.tgt_lang`.")


class DataConfig(HeldOutData):
    """The files that prompts come from."""

    train: str | None = Field(
        None,
        description="Prompts to train on: a file (JSONL, JSON, CSV, TSV, each also as .gz; "
        "Parquet), a folder of them or of shards, or a hub id.",
    )
    train_split: str | None = Field(None, description="Split of `train`, for a folder or hub id.")
    train_name: str | None = Field(None, description="Configuration of `train`, for a hub id.")
    train_limit: int | None = Field(None, ge=1, description="Read this many training rows at most.")
    eval: str | None = Field(None, description="Held-out prompts, in the same forms as `train`.")
    eval_split: str | None = Field(None, description="Split of `eval`, for a folder or hub id.")
    eval_name: str | None = Field(None, description="Configuration of `eval`, for a hub id.")
    src_lang: str | None = Field(None, description="Source language of rows without one.")
    tgt_lang: str | None = Field(None, description="Target language of rows without one.")
    bad_rows: BadRows = Field(
        "refuse",
        description="Rows that cannot be used (no JSON, a field that is missing or of another "
        "type): end the run with a list of them, or skip them: a warning counts them and lists "
        "the first 20.",
    )
    bad_sources: Literal["leave_out", "refuse"] = Field(
        "leave_out",
        description="Training rows whose source a reward service refuses with any translation "
        "(a NUL, too long): leave them out, with a warning that lists them, or end the run.",
    )
    overlong_prompts: Literal["leave_out", "refuse"] = Field(
        "leave_out",
        description="Rows whose prompt and max_new_tokens exceed the policy's positions: leave "
        "them out of training and evaluation, with a warning and their number, or end the run.",
    )
    eval_sets: dict[SetName, EvalSet] = Field(
        default_factory=dict,
        description="Further held-out sets by name, each a path or a mapping of keys: all are "
        "evaluated, with separate stats.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Our field name (src_text, src_lang, ...) -> the column that holds it; "
        "`translation.en`: the field `en` within the column `translation`.",
    )

    @property
    def held_out(self) -> dict[str, EvalSet]:
        """Return all evaluation sets by name, that of `eval` first, with null values filled in."""
        sets = {}
        if self.eval is not None:
            sets[DEFAULT_EVAL_SET] = EvalSet(
                path=self.eval, split=self.eval_split, name=self.eval_name
            )
        shared = {key: getattr(self, key) for key in ("columns", "src_lang", "tgt_lang")}
        return {
            name: chosen.model_copy(
                update={key: value for key, value in shared.items() if getattr(chosen, key) is None}
            )
            for name, chosen in (sets | self.eval_sets).items()
        }
