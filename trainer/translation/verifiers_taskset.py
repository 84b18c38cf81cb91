"""A taskset for verifiers 0.4 of the rows of a translation data set.

This module imports verifiers: import it only where that is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from scorekit.adapters.verifiers import (
    TranslationData,
    TranslationRowTask,
    TranslationTaskConfig,
    translation_settings,
)
from scorekit.errors import UserError
from trainer.translation.data import chat_prompt, load_examples


class TranslationTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The rows and how they are asked for."""

    task: TranslationTaskConfig = TranslationTaskConfig()
    data: str = ""
    """Rows to translate: a file, a folder or a hub id, as `data.train` of our own trainer."""
    limit: int | None = None
    """Read this many rows at most."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Our field -> its column, as `data.columns` of our own trainer."""
    template: str = "translategemma"
    """The prompt: a name of scorekit/prompts.py, or a file."""


class TranslationTaskset(vf.Taskset[TranslationRowTask, TranslationTasksetConfig]):  # type: ignore[misc]
    """One task for each row."""

    def __init__(self, config: TranslationTasksetConfig) -> None:
        """Check the reward's settings. Raises UserError if one is wrong."""
        super().__init__(config)
        translation_settings(config.task.reward)
        if not config.data:
            raise UserError("env.taskset.data: not set. Give a file of rows to translate")

    def load(self) -> Iterator[Any]:
        """Read the rows. Raises UserError that names file, row and field."""
        config = self.config
        for example in load_examples(config.data, limit=config.limit, columns=config.columns):
            row = {
                "src": example.src_text,
                "src_lang": example.src_lang_code,
                "tgt_lang": example.tgt_lang_code,
            }
            if example.ref_text is not None:
                row["ref"] = example.ref_text
            prompt = chat_prompt(example, config.template)
            yield TranslationRowTask(
                TranslationData(id=example.id, prompt=prompt, row=row), config.task
            )
