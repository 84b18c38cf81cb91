"""Convert what Python programs have to samples: lists, data frames and datasets; add results to it.

A frame or a dataset is recognized by its class's name: neither package is imported for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scorekit.client.deduplication import Sample, failure, is_missing, shown_value
from scorekit.errors import UserError
from scorekit.schemas import Failed, Result, Scored
from scorekit.scorers import SampleForScoring, check_is_list

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import DataFrame

#: The columns that results become; the last four only if a result has them.
_RESULT_COLUMNS = ("score", "ok", "error", "error_spans", "omissions", "unplaced", "windows")
#: The fields of a translation to score.
_FIELDS = ("src", "mt", "ref", "src_lang", "tgt_lang", "id")
_TABLES = ("DataFrame", "Dataset", "DatasetDict")


def as_sample_list(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples of a call: mappings or SampleForScoring, from any iterable.

    Of a dataset the columns that a translation has; one with a column `task` is a judge's, and has
    all. Raises UserError that names the first element that is no sample."""
    kind = _table_kind(samples)
    if kind == "pandas.DataFrame":
        raise UserError("samples: a DataFrame. Use score_frame(frame) of SyncScoringClient")
    if kind == "polars.DataFrame":
        raise UserError("samples: a DataFrame of polars. Give frame.to_dicts()")
    if kind in ("datasets.DatasetDict", "datasets.IterableDatasetDict"):
        raise UserError(f"samples: a {type(samples).__name__}. Choose a split, as in data['train']")
    if kind in ("datasets.Dataset", "datasets.IterableDataset"):
        return _dataset_samples(samples)
    check_is_list("samples", samples)
    sample_list = list(samples)
    for index, sample in enumerate(sample_list):
        if not isinstance(sample, Mapping | SampleForScoring):
            name = type(sample).__name__
            raise UserError(f"samples.{index}: a {name}. Give a dict with src and mt")
    return sample_list


def _dataset_samples(dataset: Any) -> list[Sample]:
    """Return the samples of the rows. An id that is no text is left out: rows keep their order."""
    names = dataset.column_names
    if names is not None and "task" not in names:
        columns = [name for name in _FIELDS if name in names]
        if not {"src", "mt"} <= set(columns):
            missing = "src" if "src" not in columns else "mt"
            raise UserError(f"the dataset has no column {missing!r}; it has: {', '.join(names)}")
        dataset = dataset.select_columns(columns)  # others (pictures) are not decoded
    samples: list[Sample] = []
    for row in dataset.with_format(None):
        sample = row if "task" in row else {name: row[name] for name in _FIELDS if name in row}
        if not isinstance(sample.get("id"), str):
            sample.pop("id", None)
        samples.append(sample)
    return samples


def samples_of_frame(
    frame: DataFrame, task: str | None = None, prefix: str = ""
) -> list[dict[str, Any] | Failed]:
    """Return a sample for each row, or the failure of a row without a text.

    task: of a judge that scores translations; its rows name their languages.
    prefix: of the new columns.
    Raises UserError if a column is missing or exists already, or if no row is a sample.
    """
    if _table_kind(frame) != "pandas.DataFrame":
        name = type(frame).__name__
        raise UserError(f"score_frame: a {name}. Give a pandas data frame; score takes a list")
    names = _text_columns("data frame", list(frame.columns), task, prefix)
    return _samples("data frame", {name: frame[name] for name in names}, task, list(frame.index))


def samples_of_dataset(
    dataset: Dataset, task: str | None = None, prefix: str = ""
) -> list[dict[str, Any] | Failed]:
    """Return a sample for each row of a dataset of Hugging Face. See `samples_of_frame`."""
    if _table_kind(dataset) != "datasets.Dataset":
        name = type(dataset).__name__
        raise UserError(f"score_dataset: a {name}. Give a datasets.Dataset, of one split in memory")
    plain = dataset.with_format(None)
    names = _text_columns("dataset", plain.column_names, task, prefix)
    cells = {name: plain[name] for name in names}
    return _samples("dataset", cells, task, range(len(plain)))


def _text_columns(table: str, columns: list[str], task: str | None, prefix: str) -> tuple[str, ...]:
    """Return the columns of the samples. Raises UserError if one is missing or new ones exist."""
    needed = ("src", "mt") if task is None else ("src", "mt", "src_lang", "tgt_lang")
    missing = [name for name in needed if name not in columns]
    if missing:
        column_list = ", ".join(map(str, columns))
        raise UserError(f"the {table} has no column {missing[0]!r}; it has: {column_list}")
    duplicates = [name for name in (*needed, "ref") if columns.count(name) > 1]
    if duplicates:
        raise UserError(f"the {table} has several columns {duplicates[0]!r}: leave one")
    existing = [name for name in (prefix + result for result in _RESULT_COLUMNS) if name in columns]
    if existing:
        raise UserError(
            f"the {table} has a column {existing[0]!r} already. Rename or drop it, or give the "
            'new columns a prefix, such as prefix="xcomet_"'
        )
    return tuple(name for name in (*needed, "ref") if name in columns)


def _samples(
    table: str, columns: Mapping[str, Iterable[Any]], task: str | None, index: Sequence[Any]
) -> list[dict[str, Any] | Failed]:
    rows: list[dict[str, Any] | Failed] = []
    for cells in zip(*columns.values(), strict=True):
        sample = dict(zip(columns, cells, strict=True))
        if is_missing(sample.get("ref")):
            sample.pop("ref", None)
        bad_columns = [name for name, text in sample.items() if not isinstance(text, str)]
        if bad_columns:
            text = f"column {bad_columns[0]!r}: {shown_value(sample[bad_columns[0]])} is not text"
            rows.append(failure("invalid_input", text))
        else:
            rows.append(sample if task is None else sample | {"task": task})
    if rows and isinstance(rows[0], Failed) and all(isinstance(row, Failed) for row in rows):
        first = f"row {index[0]!r}, {rows[0].error.message}"
        raise UserError(f"no row of the {table} can be scored: {first}")
    return rows


def frame_with_results(frame: DataFrame, results: Sequence[Result], prefix: str = "") -> DataFrame:
    """Return a copy of the frame with a column for each part of the results."""
    from pandas import Series

    new = frame.copy()
    for name, values in _result_columns(results).items():
        kind = {"score": "float", "ok": "bool"}.get(name, "object")
        new[prefix + name] = Series(values, index=frame.index, dtype=kind)
    return new


def dataset_with_results(dataset: Dataset, results: Sequence[Result], prefix: str = "") -> Dataset:
    """Return the dataset with a column for each part of the results."""
    from datasets import Value

    kinds = {"score": Value("float64"), "ok": Value("bool"), "error": Value("string")}
    for name, values in _result_columns(results).items():
        dataset = dataset.add_column(prefix + name, values, feature=kinds.get(name))
    return dataset


def score_rows(
    rows: Sequence[dict[str, Any] | Failed], score: Callable[[list[dict[str, Any]]], list[Result]]
) -> list[Result]:
    """Return a result for each row: its failure, or what `score` returns for its sample."""
    answers = iter(score([row for row in rows if not isinstance(row, Failed)]))
    return [row if isinstance(row, Failed) else next(answers) for row in rows]


def _result_columns(results: Sequence[Result]) -> dict[str, list[Any]]:
    """Return the values of each column: None where a result has none."""
    columns: dict[str, list[Any]] = {
        "score": [r.score if isinstance(r, Scored) else None for r in results],
        "ok": [isinstance(result, Scored) for result in results],
        "error": [_error(result) for result in results],
    }
    for name in _RESULT_COLUMNS[3:]:
        lists = [getattr(r, name) if isinstance(r, Scored) else None for r in results]
        if any(entries is not None for entries in lists):
            columns[name] = [
                entries if entries is None else [entry.model_dump() for entry in entries]
                for entries in lists
            ]
    return columns


def _error(result: Result) -> str | None:
    if isinstance(result, Failed):
        return f"{result.error.type}: {result.error.message}"
    return None


def _table_kind(value: Any) -> str:
    """Return the package and the name of a table's class, or of the one that it extends."""
    for base in type(value).__mro__:
        package = base.__module__.partition(".")[0]
        if package in ("pandas", "polars", "datasets") and base.__name__.endswith(_TABLES):
            return f"{package}.{base.__name__}"
    return ""
