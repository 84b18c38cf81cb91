"""Prompts: rows of a file, folder or hub dataset -> Example -> the text of a prompt."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.languages import find_language
from scorekit.prompts import fill, load_template
from scorekit.prompts import postprocess_translation as postprocess_translation

log = logging.getLogger(__name__)

REQUIRED = ("src_text", "src_lang", "tgt_lang")
OPTIONAL = ("id", "src_lang_code", "tgt_lang_code", "ref_text")
FILE_TYPES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class Example:
    """A source text to translate.

    src_lang, tgt_lang: English names ("Korean"); the codes are tags such as "ko-KR".
    ref_text: a true translation where one is known; shown in reports, never part of a reward.
    where: its row ("train.jsonl line 7"), for messages.
    """

    id: str
    src_text: str
    src_lang: str
    tgt_lang: str
    src_lang_code: str
    tgt_lang_code: str
    ref_text: str | None = None
    where: str = dataclasses.field(default="", compare=False)


def load_examples(
    source: str | Path,
    *,
    split: str | None = None,
    limit: int | None = None,
    columns: Mapping[str, str] | None = None,
) -> list[Example]:
    """Read examples.

    source: a JSONL or Parquet file; a folder with `<split>.jsonl` or `<split>.parquet`, or one
        written by `datasets`; else a hub id.
    split: names a part of a folder or hub dataset (there: default "train").
    limit: read this many rows at most.
    columns: our field name -> the column that holds it.

    A missing id becomes a hash of the row's source and languages; a missing language code is that
    of the language's name, else the name itself. Raises UserError that names file, row and field.
    """
    columns = dict(columns or {})
    unknown = sorted(set(columns) - {*REQUIRED, *OPTIONAL})
    if unknown:
        known = ", ".join((*REQUIRED, *OPTIONAL))
        raise UserError(f"data.columns: unknown field {unknown[0]!r}; known: {known}")
    rows = islice(_rows(str(source), split), limit)
    examples = [_example(row, where, columns) for where, row in rows]
    if not examples:
        raise UserError(f"{source}: no rows")
    again = [
        name for name, count in Counter(example.id for example in examples).items() if count > 1
    ]
    if again:
        log.warning("%s: %d ids stand more than once, %r first", source, len(again), again[0])
    return examples


def batch_indices(examples: int, batch_size: int, update: int, seed: int) -> list[int]:
    """The prompts of update `update` (from 1): shuffled passes over the data, one after another.

    A function of its arguments alone, so that a run can start again anywhere.
    """
    import torch

    indices: list[int] = []
    for position in range((update - 1) * batch_size, update * batch_size):
        epoch, place = divmod(position, examples)
        if place == 0 or not indices:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            order = torch.randperm(examples, generator=generator).tolist()
        indices.append(order[place])
    return indices


def format_translation_prompt(example: Example, template: str = "translategemma") -> str:
    """The prompt of an example. `template`: a name of scorekit.prompts or a path."""
    return fill(
        load_template(template),
        {
            "source_lang": example.src_lang,
            "src_lang_code": example.src_lang_code,
            "target_lang": example.tgt_lang,
            "tgt_lang_code": example.tgt_lang_code,
            "text": example.src_text,
        },
    )


def _rows(source: str, split: str | None) -> Iterator[tuple[str, Any]]:
    """Rows with a name for error messages."""
    path = Path(source)
    if path.is_dir():
        yield from _folder_rows(path, split)
    elif path.is_file() or path.suffix in FILE_TYPES:
        if split is not None:
            raise UserError(f"{source}: a single file has no split {split!r}; name a folder")
        yield from _file_rows(path)
    elif source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UserError(f"{source}: no such file or folder")
    else:
        yield from _dataset_rows(source, split, on_disk=False)


def _folder_rows(path: Path, split: str | None) -> Iterator[tuple[str, Any]]:
    if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        yield from _dataset_rows(str(path), split, on_disk=True)
        return
    if split is None:
        raise UserError(f"{path}: name the split of this folder (a file <split>.jsonl)")
    for suffix in FILE_TYPES:
        if (path / f"{split}{suffix}").is_file():
            yield from _file_rows(path / f"{split}{suffix}")
            return
    raise UserError(f"{path}: has no {split}.jsonl, {split}.json or {split}.parquet")


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path} line {number}", _parse(line, f"{path} line {number}")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        fault = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UserError(f"{where}: not JSON, one object a line: {fault}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        number = 0
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not Parquet that can be read: {error}") from None


def _dataset_rows(source: str, split: str | None, *, on_disk: bool) -> Iterator[tuple[str, Any]]:
    import datasets
    import pyarrow

    try:
        if on_disk:
            data = datasets.load_from_disk(source)
            if isinstance(data, datasets.DatasetDict):
                data = data[split or "train"]
            elif split is not None:
                raise UserError(f"{source}: a dataset without splits; leave the split out")
        else:
            data = datasets.load_dataset(source, split=split or "train")
    except KeyError:
        raise UserError(f"{source}: has no split {split or 'train'!r}") from None
    # the hub's many ways to say no
    except (OSError, ValueError, RuntimeError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{source}: neither a file, a folder nor a dataset: {reason}") from None
    rows: Iterable[Any] = data
    try:
        for number, row in enumerate(rows, 1):
            yield f"{source} row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{source}: cannot be read: {' '.join(str(error).split())}") from None


def _example(row: Any, where: str, columns: dict[str, str]) -> Example:
    if not isinstance(row, dict):
        kind = "an array" if isinstance(row, list) else type(row).__name__
        raise UserError(f"{where}: a row is an object of fields, one a line, not {kind}")
    values = {
        field: _text(row.get(columns.get(field, field)), where, columns.get(field, field))
        for field in (*REQUIRED, *OPTIONAL)
        if field != "id"
    }
    column = columns.get("id", "id")
    values["id"] = _id(row.get(column), where, column) or _hash(values)
    for field in REQUIRED:
        if not (values[field] or "").strip():
            raise UserError(f"{where}: {columns.get(field, field)}: missing or empty")
    for side in ("src", "tgt"):
        name = values[f"{side}_lang"] or ""
        language = find_language(name)
        code = language.tag if language else name
        if language is not None and name.lower() != language.name.lower():
            # A code, as a corpus or `synth`'s export has it: the prompt wants the name.
            values[f"{side}_lang"] = language.name
            code = name if "-" in name else code
        values[f"{side}_lang_code"] = values[f"{side}_lang_code"] or code
    return Example(**values, where=where)  # type: ignore[arg-type]


def _id(value: Any, where: str, column: str) -> str | None:
    if isinstance(value, float) and value.is_integer():  # a data frame's, where one was missing
        value = int(value)
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return None if value is None else str(value)
    raise UserError(f"{where}: {column}: a text or whole number is wanted, not {value!r:.40}")


def _text(value: Any, where: str, column: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise UserError(f"{where}: {column}: a text is wanted, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: {column}: not valid Unicode (a lone surrogate)") from None
    return value


def _hash(values: Mapping[str, str | None]) -> str:
    text = "\x1f".join(str(values[field]) for field in REQUIRED)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
