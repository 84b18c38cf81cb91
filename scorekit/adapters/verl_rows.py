"""Check the first rows of verl's dataset before Ray starts.

verl takes an error of a reward for the failure of one completion, and its asynchronous trainers
sample other prompts without a limit. So a field that no row has must be found here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from scorekit.adapters.rewards import RewardSettings, Samples, message_text
from scorekit.errors import UserError
from scorekit.rewards.engine import FirstSamples, check_languages
from scorekit.rewards.rules import load_gate

#: Rows of each file that are checked.
NUM_ROWS = 256
_KEYS = ("train_files", "val_files")


def check_rows(
    data: Mapping[str, Any], settings: RewardSettings, *, gets_prompt: bool = False
) -> None:
    """Raise UserError if the reward cannot be computed for the first rows of a Parquet file.

    data: the section `data` of verl's config. Files of another kind, and those that do not exist
    here, are left to verl. gets_prompt: whether the reward gets the row's prompt, as our agent loop
    does; verl passes none to a function.
    """
    samples = Samples(settings)
    for key in _KEYS:
        paths = data.get(key) or ()
        for path in [paths] if isinstance(paths, str) else paths:
            if str(path).endswith(".parquet") and Path(path).is_file():
                try:
                    _check_file(Path(path), samples, settings, gets_prompt)
                except UserError as error:
                    raise UserError(f"data.{key}: {path}: {error}") from None


def _check_file(path: Path, samples: Samples, settings: RewardSettings, gets_prompt: bool) -> None:
    rows = []
    for index, row in enumerate(islice(_rows(path), NUM_ROWS)):
        try:
            fields, prompt = _fields(row, gets_prompt)
            rows.append(samples.sample(fields, prompt, "."))
        except UserError as error:
            raise UserError(f"row {index}: {error}") from None
    definition = settings.definition
    if definition is None:
        return
    rules = {name: load_gate(f"gates.{name}", gate) for name, gate in definition.gates.items()}
    FirstSamples(definition, rules).check_fields(rows)
    languages = {row.get("tgt_lang") for row in rows} - {None, ""}
    check_languages(definition, rules, sorted(map(str, languages)))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=NUM_ROWS):
                yield from batch.to_pylist()
    except (OSError, ArrowException) as error:
        raise UserError(f"cannot be read: {' '.join(str(error).split())[:200]}") from None


def _fields(row: Mapping[str, Any], gets_prompt: bool) -> tuple[dict[str, Any], str | None]:
    """Return the fields and the prompt of a row that our reward gets."""
    model, extra = (row.get(key) or {} for key in ("reward_model", "extra_info"))
    for key, value in (("reward_model", model), ("extra_info", extra)):
        if not isinstance(value, Mapping):
            raise UserError(
                f"{key} is a {type(value).__name__}. Write it as a struct with named fields"
            )
    fields = {**extra, "ground_truth": model.get("ground_truth")}
    prompt = row.get("prompt") if gets_prompt else fields.get("prompt")
    return fields, None if prompt is None else message_text(prompt)
