"""Human judgements of translations: JSON lines, or the MQM files of WMT as they are published.

In a row of WMT's files, `<v>` and `</v>` surround an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from scorekit.errors import UserError
from scorekit.rows.read import RowFile
from scorekit.rows.samples import text_of

#: Penalties of errors: Freitag et al. 2021 (Experts, Errors, and Context, arXiv 2104.14478).
#: TRIVIAL is from Marot, the viewer of the published files. CRITICAL is not in that paper (Marot:
#: 5); 10 is xCOMET's (arXiv 2310.10482).
WEIGHTS = {"MINOR": 1.0, "MAJOR": 5.0, "CRITICAL": 10.0, "NEUTRAL": 0.0, "TRIVIAL": 0.1}
NON_TRANSLATION = 25.0
MINOR_PUNCTUATION = 0.1
#: Columns whose values together name a segment, as far as they exist.
_DOCUMENT = ("doc", "document", "doc_id")
_SEGMENT = ("globalSegId", "docSegId", "seg_id", "segment", "seg", "segment_id")
_MARK = re.compile(r"</?v>")
_LONGEST_NAME = 80
#: Kind of rows -> the note about them.
_NOTES = {
    "tests": "rows that test the raters' attention (HOTW) are left out",
    "bare": "rows without a rater (metadata) are left out",
    "source": "errors of the source, or reinterpretations, count for nothing",
    "unplaced": "errors have no mark in the translation: in the score alone",
    "quoted": "rows have a text in a CSV's quotes: they are taken off",
}


class Span(NamedTuple):
    """`mt[start:end]`, code points; severity in capitals."""

    start: int
    end: int
    severity: str


@dataclass(slots=True)
class Rating:
    """One rater's judgement.

    score: higher is better.
    spans: None if only a score was given.
    """

    score: float
    spans: list[Span] | None


@dataclass(slots=True)
class JudgedTranslation:
    """A system's translation of a segment, with its ratings.

    line: the first one about it.
    """

    system: str
    segment: str
    src: str
    mt: str
    ref: str | None = None
    src_lang: str | None = None
    tgt_lang: str | None = None
    ratings: list[Rating] = field(default_factory=list)
    line: int = 0

    @property
    def score(self) -> float:
        """Return the mean over its raters."""
        return sum(rating.score for rating in self.ratings) / len(self.ratings)


@dataclass
class Judgements:
    """Translations in the order of the file.

    notes: what was left out, and why.
    """

    translations: list[JudgedTranslation]
    notes: list[str]

    @property
    def systems(self) -> list[str]:
        """Return the names of the systems, sorted."""
        return sorted({translation.system for translation in self.translations})


def weight(severity: str, category: str) -> float:
    """Return the penalty of an error. Raises ValueError for an unknown severity."""
    normalized = category.lower().replace("_", "-").replace(" ", "-")
    if is_ignored_category(category):
        return 0.0
    if "non-translation" in normalized:
        return NON_TRANSLATION
    if severity not in WEIGHTS:
        valid_severities = ", ".join(WEIGHTS)
        raise ValueError(f"severity {severity[:40]!r} is none of {valid_severities}")
    if severity == "MINOR" and "punctuation" in normalized:
        return MINOR_PUNCTUATION
    return WEIGHTS[severity]


def is_ignored_category(category: str) -> bool:
    """Return True for a category that does not count against the translation.

    It is an error of the source or a creative reinterpretation. Marot gives both no weight
    either."""
    normalized = category.strip().lower()
    return normalized.startswith("source") or "reinterpretation" in normalized


def read_judgements(path: Path, *, lower_is_better: bool = False) -> Judgements:
    """Read a file of judgements.

    .jsonl: one row per rater, with `src`, `mt`, `system` and `spans` or `score` (if both, the score
    counts); `rater`, `ref`, `src_lang`, `tgt_lang` and a segment's name are optional.
    .tsv: WMT's MQM, one row per error.
    A segment without a name is identified by its source; several translations of it by one system
    are separate segments.

    lower_is_better: of `score`.
    Raises UserError that names the line.
    """
    file = RowFile(path, remedy="judgements are .jsonl or .tsv")
    if file.format in ("csv", "txt"):  # they cannot hold spans
        raise UserError(f"{path}: judgements are .jsonl or .tsv")
    if file.format == "tsv":  # most of the published files are not quoted; `remove_quotes` decides
        judgements = _read_published(RowFile(path, "tsv-unquoted"))
    else:
        judgements = _read_jsonl(file, lower_is_better)
    if not judgements.translations:
        raise UserError(f"{path}: it has no judgements")
    return judgements


def _read_jsonl(file: RowFile, lower_is_better: bool) -> Judgements:
    by_key: dict[tuple[str, str, str], JudgedTranslation] = {}
    by_rater: dict[tuple[int, str], tuple[int, Rating]] = {}
    empty = blameless = repeated = 0
    for number, row, _ in file.rows((), None):
        try:
            translation = _translation(row)
            translation.line = number
            rating, num_ignored = _rating(row, translation.mt, lower_is_better)
        except ValueError as error:
            raise UserError(f"{file.path}, line {number}: {error}") from None
        first = _put(by_key, translation)
        _check_same_texts(first, translation, file.path)
        if row.get("rater") not in (None, ""):
            earlier, rating_before = by_rater.setdefault(
                (id(first), str(row["rater"])), (number, rating)
            )
            if earlier != number:
                if rating_before != _without_empty(rating):
                    raise UserError(
                        f"{file.path}, lines {earlier} and {number}: rater "
                        f"{str(row['rater'])[:_LONGEST_NAME]!r} judges one translation twice, and "
                        "differently. Remove one of them"
                    )
                repeated += 1
                continue
        blameless += num_ignored
        listed = len(rating.spans or ())
        rating.spans = _without_empty(rating).spans
        empty += listed - len(rating.spans or ())
        first.ratings.append(rating)
    notes = [f"{empty:,} human spans are empty: they count in the score alone"] if empty else []
    notes += [f"{blameless:,} {_NOTES['source']}"] if blameless else []
    notes += [f"{repeated:,} equal rows of a rater and a translation count once"] * bool(repeated)
    return Judgements(_check_names(by_key, file.path), notes)


def _without_empty(rating: Rating) -> Rating:
    """Return a rating without its empty spans."""
    if rating.spans is None:
        return rating
    return Rating(rating.score, [span for span in rating.spans if span.end > span.start])


def _check_same_texts(first: JudgedTranslation, other: JudgedTranslation, path: Path) -> None:
    """Raise UserError if two rows of a translation differ in its source, reference or languages."""
    for name in ("src", "ref", "src_lang", "tgt_lang"):
        values = getattr(first, name), getattr(other, name)
        if None not in values and values[0] != values[1]:
            raise UserError(
                f"{path}, lines {first.line} and {other.line}: one translation of system "
                f"{first.system[:_LONGEST_NAME]!r} has two values of {name!r}. Correct one of them"
            )
        if values[0] is None:
            setattr(first, name, values[1])


def _translation(row: Mapping[str, Any]) -> JudgedTranslation:
    system, src, mt = (text_of(row, name) for name in ("system", "src", "mt"))
    optional: dict[str, Any] = {
        name: text_of(row, name) if row.get(name) else None
        for name in ("ref", "src_lang", "tgt_lang")
    }
    parts = [
        str(row[name])
        for names in (_DOCUMENT, _SEGMENT)
        for name in names
        if row.get(name) is not None
    ]
    is_named = any(row.get(name) is not None for name in _SEGMENT)
    return JudgedTranslation(system, "/".join(parts) if is_named else "", src, mt, **optional)


def _put(
    by_key: dict[tuple[str, str, str], JudgedTranslation], translation: JudgedTranslation
) -> JudgedTranslation:
    segment = translation.segment or translation.src
    return by_key.setdefault((translation.system, segment, translation.mt), translation)


def _rating(row: Mapping[str, Any], mt: str, lower_is_better: bool) -> tuple[Rating, int]:
    listed, score = row.get("spans"), row.get("score")
    if listed is None and score is None:
        raise ValueError("neither 'spans' nor 'score'")
    if score is not None:
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise ValueError("field 'score' is not a number")
        if not math.isfinite(score := _as_float(score)):
            raise ValueError("field 'score' is not finite")
        score = -score if lower_is_better else score
    if listed is None:
        assert score is not None
        return Rating(score, None), 0
    if not isinstance(listed, list) or not all(isinstance(span, dict) for span in listed):
        raise ValueError("field 'spans' is not a list of objects")
    penalty = 0.0
    spans = []
    for raw_span in listed:
        span, category = checked_span(raw_span, len(mt)), str(raw_span.get("category") or "")
        penalty += weight(span.severity, category)
        spans += [] if is_ignored_category(category) else [span]
    return Rating(-penalty if score is None else score, spans), len(listed) - len(spans)


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer with hundreds of digits
        return math.inf


def checked_span(raw_span: Mapping[str, Any], length: int) -> Span:
    """Return a checked span within a text of `length` characters. Raises ValueError."""
    start, end, severity = (raw_span.get(name) for name in ("start", "end", "severity"))
    if type(start) is not int or type(end) is not int or not isinstance(severity, str):
        raise ValueError("a span needs whole numbers 'start' and 'end', and a 'severity'")
    if not 0 <= start <= end <= length:
        raise ValueError(f"span {start} to {end} is not in a translation of {length} characters")
    return Span(start, end, severity.strip().upper())


def _read_published(file: RowFile) -> Judgements:
    """Read one row per error; a rater's rows of a translation may be apart."""
    by_key: dict[tuple[str, str, str], JudgedTranslation] = {}
    raters: dict[tuple[int, str], Rating] = {}
    counts = dict.fromkeys(_NOTES, 0)
    columns = ("system", "rater", "source", "target", "category", "severity")
    for number, row, _ in file.rows(columns, None):
        if note := _no_judgement(row):
            counts[note] += 1
            continue
        try:
            src, mt, error = errors_of_row(row)
            new = _translation(row | {"src": src, "mt": mt})
            new.line = number
            translation = _put(by_key, new)
            penalty = weight(error.severity, row["category"]) if error else 0.0
        except ValueError as row_error:
            raise UserError(f"{file.path}, line {number}: {row_error}") from None
        counts["quoted"] += any(
            remove_quotes(row[name]) != row[name] for name in ("source", "target")
        )
        rating = raters.get((id(translation), row["rater"]))
        if rating is None:
            rating = raters[id(translation), row["rater"]] = Rating(0.0, [])
            translation.ratings.append(rating)
        if error is None:
            continue
        if is_ignored_category(row["category"]):
            counts["source"] += 1
            continue
        rating.score -= penalty
        assert rating.spans is not None
        rating.spans += [Span(start, end, error.severity) for start, end in error.ranges]
        counts["unplaced"] += not error.ranges
    notes = [f"{counts[name]:,} {text}" for name, text in _NOTES.items() if counts[name]]
    return Judgements(_check_names(by_key, file.path), notes)


def _no_judgement(row: Mapping[str, Any]) -> str | None:
    if "hotw" in row["severity"].lower():  # WMT 2022's and later checks of the raters' attention
        return "tests"
    return None if row["rater"].strip() else "bare"


class Marked(NamedTuple):
    """An error.

    severity: in capitals.
    ranges: (start, end) in the translation.
    """

    severity: str
    ranges: list[tuple[int, int]]


def errors_of_row(row: Mapping[str, Any]) -> tuple[str, str, Marked | None]:
    """Return (source, translation, error) of a row; the error is None if the rater marked none."""
    src, _ = remove_marks(remove_quotes(row["source"]))
    mt, ranges = remove_marks(remove_quotes(row["target"]))
    severity = row["severity"].strip().upper()
    # Names depend on the annotators' tools: `No-error`, `no_error`.
    if "NO-ERROR" in (_dash(severity), _dash(row["category"].strip().upper())):
        return src, mt, None
    return src, mt, Marked(severity, ranges)


def remove_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without its marks, and the (start, end) of the marked ranges.

    Raises ValueError for an unpaired mark.
    """
    ranges: list[tuple[int, int]] = []
    parts: list[str] = []
    length = end = 0
    opened: int | None = None
    for mark in _MARK.finditer(text):
        parts.append(text[end : mark.start()])
        length += mark.start() - end
        end = mark.end()
        if (mark.group() == "<v>") != (opened is None):
            raise ValueError("an unpaired <v> or </v>")
        if opened is None:
            opened = length
        else:
            if length > opened:
                ranges.append((opened, length))
            opened = None
    if opened is not None:
        raise ValueError("a <v> without its </v>")
    return "".join((*parts, text[end:])), ranges


def remove_quotes(cell: str) -> str:
    """Return a cell without the quotes of a CSV, which only some of the files have (newstest2020).

    In those, a quoted cell has its inner quotes doubled. A text that is itself in quotes has single
    inner quotes, or none, and stays as it is."""
    inner = cell[1:-1]
    is_csv = len(cell) > 1 and cell[0] == cell[-1] == '"' and '""' in inner
    if is_csv and '"' not in inner.replace('""', ""):
        return inner.replace('""', '"')
    return cell


def _dash(name: str) -> str:
    return name.replace("_", "-").replace(" ", "-")


def _check_names(
    by_key: dict[tuple[str, str, str], JudgedTranslation], path: Path
) -> list[JudgedTranslation]:
    """Name segments without a name. Raises UserError for a named one with two translations."""
    counts: dict[tuple[str, str], int] = {}
    lines: dict[tuple[str, str], int] = {}
    for (system, name, _), translation in by_key.items():
        count = counts[system, name] = counts.get((system, name), 0) + 1
        if count > 1 and translation.segment:
            raise UserError(
                f"{path}, lines {lines[system, name]} and {translation.line}: system "
                f"{system[:_LONGEST_NAME]!r} has two translations of segment "
                f"{name[:_LONGEST_NAME]!r}: name documents and segments apart"
            )
        lines.setdefault((system, name), translation.line)
        translation.segment = translation.segment or (name if count == 1 else f"{name}\n{count}")
    return list(by_key.values())


def each_rating(translations: list[JudgedTranslation]) -> Iterator[tuple[int, Rating, float]]:
    """Yield (index of the translation, rating, weight), where the weights of a translation add to
    1.

    Only ratings with spans are included."""
    for number, translation in enumerate(translations):
        with_spans = [rating for rating in translation.ratings if rating.spans is not None]
        for rating in with_spans:
            yield number, rating, 1 / len(with_spans)
