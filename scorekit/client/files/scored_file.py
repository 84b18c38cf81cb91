"""Read the output of `scorekit score`: a line a sample, and OUT.meta.json with what scored it.

A line has the result of one metric (`--url`), or an object for each metric (`--metric`).
OUT.meta.json also says what the output was made from: only the same job may resume it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel

from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.report.worst import ScoredRow
from scorekit.rows.read import Format, Row, RowFile
from scorekit.rows.samples import JudgeColumns, SampleFile, TranslationColumns
from scorekit.schemas import ErrorSpan, Failed, UnplacedError

Direction = Literal["higher", "lower"]
#: Services whose lower scores are better, and such tasks of a judge; an output of --url names its
#: service and no direction.
_LOWER_IS_BETTER = {"metricx", "mqm"}
_HIGHER_IS_BETTER = {"xcomet", "judge"}
#: Fields that an output may have of its input, in the order in which they are shown.
_TEXTS = ("src", "ref", "mt")
_SPANS: dict[str, type[BaseModel]] = {
    "error_spans": ErrorSpan,
    "omissions": ErrorSpan,
    "unplaced": UnplacedError,
}


@dataclass(frozen=True)
class ScoredBy:
    """Tells what made the scores of a metric.

    source: service, model, revision, dtype, task and options; empty if no description is there.
    higher_is_better: None if the output does not tell.
    """

    source: Mapping[str, Any]
    higher_is_better: bool | None

    def require_direction(self, metric: str, location: str) -> bool:
        """Return whether higher is better. Raises UserError if it is not known."""
        if self.higher_is_better is None:
            raise UserError(
                f"{location}: does not tell whether a higher {metric} is better. "
                "Say --better higher or --better lower"
            )
        return self.higher_is_better


class ScoredFile:
    """An output of `scorekit score`.

    description: the contents of OUT.meta.json; None if there is none.
    scored_by: metric -> what made its scores. An output of --url has one, named after the service.
    """

    def __init__(self, path: Path, better: Direction | None = None) -> None:
        """Raise UserError for a file without results.

        better: for metrics whose output does not tell."""
        self.file = RowFile(path, "jsonl")
        self.path = self.file.path
        self.description = None if self.file.is_stdin else _checked_description(path)
        first = next(self.file.rows((), None), None)
        if first is None:
            raise UserError(f"{self.path}: has no results")
        self._is_single = "ok" in first.fields
        self.scored_by = self._scored_by(first, None if better is None else better == "higher")
        if not self.scored_by:
            raise UserError(f"{self.file.location(first.number)}: no result of `scorekit score`")

    def metric(self, name: str | None) -> str:
        """Return the name of a metric of this file; None: of the first. Raises UserError."""
        if name is None:
            return next(iter(self.scored_by))
        if name not in self.scored_by:
            valid_names = ", ".join(self.scored_by)
            raise UserError(f"--metric {name}: {self.path} has {valid_names}")
        return name

    def rows(self) -> Iterator[ScoredRow]:
        """Yield the lines in order. Raises UserError for one that is none."""
        for row in self.file.rows((), None):
            try:
                yield self._row(row.fields)
            except (ValueError, KeyError, TypeError, AttributeError):
                location = self.file.location(row.number)
                raise UserError(f"{location}: no result of `scorekit score`") from None

    def with_texts(self, rows: Iterable[ScoredRow], source: Path | None) -> list[ScoredRow]:
        """Return the rows with their texts: those that the output has, else those of its input.

        Raises UserError if neither has them, and for an input that is another file.
        """
        chosen = list(rows)
        if source is not None:
            texts = self._texts_of(source, {row.number for row in chosen})
            chosen = [
                row._replace(texts={**texts.get(row.number, {}), **row.texts}) for row in chosen
            ]
        elif chosen and not any(row.texts for row in chosen):
            raise UserError(f"{self.path}: has no texts. Say --input IN: the file that was scored")
        for row in chosen:
            try:
                for result in row.results.values():
                    _check_spans(result)
            except (ValueError, TypeError):
                location = self.file.location(row.number)
                raise UserError(f"{location}: its error spans cannot be read") from None
        return chosen

    def _texts_of(self, source: Path, numbers: set[int]) -> dict[int, dict[str, str]]:
        """Return the texts of these lines of the input."""
        described = self.description
        if described is None:
            raise UserError(
                f"--input {source}: {self.path.name}.meta.json does not exist, so nothing tells "
                "whether this file was scored"
            )
        name = described["format"]
        if name not in ("jsonl", "json", "tsv, quoted", "tsv", "csv", "txt", "parquet"):
            raise UserError(f"--input {source}: {self.path} was made from {name}. Leave it out")
        fields = described["fields"]
        columns = JudgeColumns if "task" in fields else TranslationColumns
        samples = SampleFile(
            source,
            format_of(name),
            columns(**fields),
            encoding=described.get("encoding"),
            bad_rows="skip",
        )
        if samples.file.digest() != described["input"]:
            raise UserError(f"--input {source}: is not the file that {self.path} was made from")
        texts = {}
        for line in samples.lines():
            if line.number in numbers:
                ordered = {name: line.sample[name] for name in _TEXTS if name in line.sample}
                texts[line.number] = ordered | line.sample
        return texts

    def _scored_by(self, first: Row, is_higher: bool | None) -> dict[str, ScoredBy]:
        described = self.description or {}
        metrics = described.get("metrics")
        if metrics is None and not self._is_single:
            metrics = {
                name: {}
                for name, value in first.fields.items()
                if isinstance(value, dict) and "ok" in value
            }
        if metrics is not None:
            return {
                name: ScoredBy(
                    {key: value for key, value in source.items() if key != "higher_is_better"},
                    source.get("higher_is_better", is_higher),
                )
                for name, source in metrics.items()
            }
        model = described.get("model") or {}
        if not model:
            return {"score": ScoredBy({}, is_higher)}
        task = described["fields"].get("task")
        source = {**model, "task": task, "options": described["options"]}
        if {model["service"], task} & _LOWER_IS_BETTER:
            is_higher = False
        elif model["service"] in _HIGHER_IS_BETTER:
            is_higher = True
        return {model["service"]: ScoredBy(source, is_higher)}

    def _row(self, fields: Mapping[str, Any]) -> ScoredRow:
        """Return a line. Raises ValueError, KeyError, TypeError or AttributeError."""
        if self._is_single:
            results = dict.fromkeys(self.scored_by, fields)
        else:
            results = {name: fields[name] for name in self.scored_by}
        for result in results.values():
            _check_result(result)
        system = fields.get("system")
        return ScoredRow(
            fields["line"] + 0,
            fields.get("id"),
            None if system is None else _as_text(system),
            {
                name: _as_text(fields[name])
                for name in _TEXTS
                if fields.get(name) is not None and (name != "ref" or fields[name] != "")
            },
            results,
        )


def _check_result(result: Mapping[str, Any]) -> None:
    if not result["ok"]:
        Failed.model_validate({"id": None, "ok": False, "error": result["error"]})
        return
    if isinstance(result["score"], bool) or not math.isfinite(result["score"]):
        raise ValueError


def _check_spans(result: Mapping[str, Any]) -> None:
    for name, type in _SPANS.items():
        for span in result.get(name) or ():
            type.model_validate(span)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _checked_description(path: Path) -> dict[str, Any] | None:
    meta = path.with_name(f"{path.name}.meta.json")
    if not meta.exists():
        return None
    content = read_description(path)
    if content is None or not {"input", "fields"} <= content.keys():
        raise UserError(f"{meta}: does not describe an output of `scorekit score`")
    return content


#: Formats of an input that have another name in OUT.meta.json: older versions read a TSV as
#: unquoted.
_DESCRIBED_FORMATS: dict[str, str] = {"tsv": "tsv, quoted", "tsv-unquoted": "tsv"}


def described_format(format: str) -> str:
    """Return the name of an input's format in a description."""
    return _DESCRIBED_FORMATS.get(format, format)


def format_of(name: str) -> Format:
    """Return the format that has this name in a description."""
    formats = {name: format for format, name in _DESCRIBED_FORMATS.items()}
    return cast(Format, formats.get(name, name))


def read_description(out: Path) -> dict[str, Any] | None:
    """Return what an output was made from (OUT.meta.json), or None if it is not known."""
    try:
        return dict(json.loads(_meta_path(out).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def write_description(out: Path, description: Mapping[str, Any]) -> None:
    """Write OUT.meta.json."""
    content = json.dumps(description, indent=1, ensure_ascii=False)
    write_atomic(_meta_path(out), content, alone=True)


def check_description(out: Path, description: Mapping[str, Any], remedy: str) -> None:
    """Raise UserError with the remedy if an output was made from something else."""
    earlier = read_description(out)
    if earlier is None:
        name = _meta_path(out).name
        raise UserError(f"{out} exists, but {name} does not say what it was made from: {remedy}")
    names = dict.fromkeys((*description, *earlier))
    changed = [name for name in names if earlier.get(name) != description.get(name)]
    if changed:
        raise UserError(f"{out} was made from something else ({', '.join(changed)}): {remedy}")


def _meta_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.meta.json")
