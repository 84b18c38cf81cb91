"""Write the worksheet of `search verify`, on which people see and decide rows."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from markupsafe import Markup

from scorekit.report.page import render_html
from trainer.search.curation.config_sections import CLASSES, VerifyConfig
from trainer.search.curation.dataset import CurationResult, Decision
from trainer.search.curation.samples import CuratedPrompt
from trainer.search.images.image_data import ImageError, read_image
from trainer.search.verification.compare import Pages
from trainer.search.verification.human_labels import ID, NOTE, PERSON, csv_text

_QUALITY = 80  # of JPEG
#: The classes in the order in which people should check them.
_ORDER = ("GT_ERROR", "BOTH_WRONG", "UNCERTAIN", "FORMAT_DIFF", "GEN_ERROR", "OK")


def worksheets(
    result: CurationResult, prompts: Mapping[str, CuratedPrompt], load_page: Pages
) -> dict[str, bytes]:
    """Return worksheet.csv and worksheet.html.

    The CSV has all rows with answers or decisions, first those to drop; the page has the first of
    them. load_page: page id -> PNG.
    """
    cfg = result.settings
    assert isinstance(cfg, VerifyConfig)
    decided = [
        decision
        for decision in result.decisions
        if decision.stats["verifier_answers"] or decision.stats["by"] == "person"
    ]
    decided.sort(key=lambda decision: _ORDER.index(decision.stats["class"] or "UNCERTAIN"))
    first_decisions = decided[: cfg.worksheet_rows]
    return {
        "worksheet.csv": csv_text(
            _HEAD, [_csv_row(decision, prompts[decision.row_id]) for decision in decided]
        ),
        "worksheet.html": _page(first_decisions, len(decided), prompts, load_page, cfg).encode(
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
    cfg: VerifyConfig,
) -> str:
    gold = dict.fromkeys(
        page for decision in decisions for page in prompts[decision.row_id].question.gold
    )
    names = {page: f"page{number}" for number, page in enumerate(gold)}
    return render_html(
        "trainer/search/verification/worksheet.html",
        count=count,
        classes=CLASSES,
        person=PERSON,
        pictures=[(names[page], *_data_url(load_page(page), cfg.worksheet_width)) for page in gold],
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
