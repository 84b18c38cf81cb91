"""The worksheet of `verify`: people see rows, decide them, and are compared with the verifier."""

from __future__ import annotations

import csv
import hashlib
import io
from base64 import b64encode
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar, cast

from markupsafe import Markup

from scorekit.errors import UserError
from scorekit.report.render import visible
from scorekit.rows.read import MissingColumn, RowFile
from trainer.runs.readers import shorten
from trainer.search.images.image_data import ImageError, read_image
from trainer.search.steps.agreement import CLASSES, TruthClass
from trainer.search.steps.episodes import (
    CuratedPrompt,
)
from trainer.search.steps.step import Decision

#: Columns of a worksheet that are read back.
ID, PERSON, NOTE = "id", "person", "note"

#: A cell that begins with one of these is a formula to a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")

_QUALITY = 80  # of JPEG
#: The classes in the order in which people should check them.
_ORDER = ("GT_ERROR", "BOTH_WRONG", "UNCERTAIN", "FORMAT_DIFF", "GEN_ERROR", "OK")
#: Page id -> PNG.
Pages = Callable[[str], bytes]
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class HumanLabel:
    """The decision of a person."""

    truth: TruthClass
    note: str = ""


def csv_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> bytes:
    """Return a CSV that spreadsheets open correctly.

    It is UTF-8 with a byte order mark, for Korean text. No cell is a formula or has several lines.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(head)
    writer.writerows([[_harmless(cell) for cell in row] for row in rows])
    return text.getvalue().encode("utf-8-sig", "replace")


def _harmless(cell: str) -> str:
    text = visible(cell)
    return f"'{text}" if cell.startswith((*_FORMULA, "'")) else text


def read_people(path: Path, ids: Collection[str]) -> tuple[dict[str, HumanLabel], str]:
    """Return people's decisions by row id, and the SHA-256 of the file.

    ids: of the data's rows. A spreadsheet may have saved the file with another separator, or in the
    encoding of Korean Windows. Raises UserError with a line for each invalid row.
    """
    file = RowFile(path, "csv")
    id_by_cell = {_harmless(row_id): row_id for row_id in ids}
    labels: dict[str, HumanLabel] = {}
    errors = []
    try:
        digest = _digest(path)
        for number, cells, problem in file.rows((ID, PERSON), (ID, PERSON, NOTE), with_bad=True):
            truth = "_".join(cells.get(PERSON, "").upper().replace("_", " ").split())
            row_id = id_by_cell.get(cells.get(ID, ""))
            if not truth and not problem:
                continue
            row_error = problem or _row_error(row_id, cells[ID], truth, labels)
            if row_error:
                errors.append(f"line {number}: {visible(row_error)}")
            elif row_id is not None:
                labels[row_id] = HumanLabel(cast(TruthClass, truth), cells.get(NOTE, "").strip())
    except MissingColumn as error:
        raise UserError(
            f"--decisions {error}. Use worksheet.csv and write your classes into its column "
            f"{PERSON!r}"
        ) from None
    except UserError as error:
        raise UserError(f"--decisions {error}") from None
    if errors:
        count = len(errors)
        raise UserError(f"--decisions {path}: {count} rows cannot be used:", shorten(errors))
    return labels, digest


def _digest(path: Path) -> str:
    """Return the SHA-256 of the file. Raises UserError if there is nothing in it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    if not data.strip():
        raise UserError(f"{path}: is empty")
    return hashlib.sha256(data).hexdigest()


def _row_error(
    row_id: str | None, written: str, truth: str, labels: Mapping[str, HumanLabel]
) -> str:
    if truth not in CLASSES:
        return f"{truth[:40]!r} is not a class: {', '.join(CLASSES)}"
    if row_id is None:
        return f"no row of the data has the id {written[:80]!r}: did a spreadsheet change it?"
    if row_id in labels:
        return f"the id {row_id[:80]!r} is a duplicate"
    return ""


def kappa(pairs: Sequence[tuple[T, T]]) -> float | None:
    """Return Cohen's kappa of two raters (Cohen 1960): (p_o - p_e) / (1 - p_e).

    p_o: the share of agreements; p_e: the expected share by chance. None without pairs, and if both
    raters use only the same single class (p_e is 1).
    """
    if not pairs:
        return None
    count = len(pairs)
    first, second = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    observed = sum(a == b for a, b in pairs) / count
    chance = sum(first[name] * second[name] for name in first) / count**2
    return None if chance == 1 else (observed - chance) / (1 - chance)


def agreement_lines(pairs: Sequence[tuple[T, T]], label: str) -> str:
    """Return the agreement as a line of text."""
    same = sum(a == b for a, b in pairs)
    measured = kappa(pairs)
    share = f"{100 * same / len(pairs):.1f} %" if pairs else "–"
    kappa_text = "not defined" if measured is None else f"{measured:.3f}"
    return f"{label}: {same} of {len(pairs)} ({share}), Cohen's kappa {kappa_text}"


def worksheets(
    decisions: Sequence[Decision],
    prompts: Mapping[str, CuratedPrompt],
    load_page: Pages,
    num_rows: int,
    width: int,
) -> dict[str, bytes]:
    """Return worksheet.csv and worksheet.html.

    The CSV has all rows with answers or decisions, first those to drop; the page has the first of
    them.
    load_page: page id -> PNG.
    num_rows, width: most rows of the page, pixels of its images.
    """
    decided = [
        decision
        for decision in decisions
        if decision.stats["verifier_answers"] or decision.stats["by"] == "person"
    ]
    decided.sort(key=lambda decision: _ORDER.index(decision.stats["class"] or "UNCERTAIN"))
    first_decisions = decided[:num_rows]
    return {
        "worksheet.csv": csv_text(
            _HEAD, [_csv_row(decision, prompts[decision.row_id]) for decision in decided]
        ),
        "worksheet.html": _page(first_decisions, len(decided), prompts, load_page, width).encode(
            "utf-8", "replace"
        ),
    }


_HEAD = (
    *(ID, PERSON, NOTE, "class", "kept", "question", "reference", "verifier", "evidence"),
    *("verifier_answers", "generator_answers", "document", "pages"),
)


def _csv_row(decision: Decision, prompt: CuratedPrompt) -> list[str]:
    stats = decision.stats
    return [
        decision.row_id,
        stats["class"] if stats["by"] == "person" else "",
        stats["note"],
        stats["verifier_class"] or decision.reason,
        "yes" if decision.is_kept else "no",
        prompt.question.question,
        stats["reference"],
        stats["verifier"] or "",
        " | ".join(stats["evidence"]),
        " | ".join(stats["verifier_answers"]),
        " | ".join(stats["generator_answers"]),
        prompt.question.file_name,
        ", ".join(prompt.question.gold),
    ]


def _page(
    decisions: Sequence[Decision],
    count: int,
    prompts: Mapping[str, CuratedPrompt],
    load_page: Pages,
    width: int,
) -> str:
    from scorekit.report.page import render_html

    gold = dict.fromkeys(
        page for decision in decisions for page in prompts[decision.row_id].question.gold
    )
    names = {page: f"page{number}" for number, page in enumerate(gold)}
    return render_html(
        "trainer/search/steps/worksheet.html",
        count=count,
        classes=CLASSES,
        person=PERSON,
        pictures=[(names[page], *_data_url(load_page(page), width)) for page in gold],
        rows=[_row_values(decision, prompts[decision.row_id], names) for decision in decisions],
    )


def _row_values(
    decision: Decision, prompt: CuratedPrompt, names: Mapping[str, str]
) -> dict[str, Any]:
    question = prompt.question
    return {
        **decision.stats,
        "id": decision.row_id,
        "kept": decision.is_kept,
        "reason": decision.reason,
        "question": question.question,
        "pages": [(page, names[page]) for page in question.gold],
    }


def _data_url(png: bytes, width: int) -> tuple[Markup, int, int]:
    """Return a page as a data URL of at most `width`, and its size."""
    try:
        image = read_image(png)
    except ImageError:
        return Markup("data:,"), 16, 9
    if image.width > width:
        image = image.resize((width, max(1, round(image.height * width / image.width))))
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=_QUALITY)
    url = f"data:image/jpeg;base64,{b64encode(buffer.getvalue()).decode()}"
    return Markup(url), image.width, image.height
