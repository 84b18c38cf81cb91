"""The worksheet of `search verify`: what people see, and where they write their decisions."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from scorekit.report.page import STYLE
from scorekit.report.render import visible
from trainer.search.curation.dataset import Curated, Decision
from trainer.search.curation.samples import CuratedPrompt
from trainer.search.curation.verification.classes import CLASSES
from trainer.search.curation.verification.compare import Pages
from trainer.search.curation.verification.config import VerifyConfig
from trainer.search.curation.verification.people import ID, NOTE, PERSON, csv_text
from trainer.search.sight.pictures import PictureError, read_picture

_QUALITY = 80  # of JPEG
#: Those that a person should look at first.
_ORDER = ("GT_ERROR", "BOTH_WRONG", "UNCERTAIN", "FORMAT_DIFF", "GEN_ERROR", "OK")


def worksheets(
    made: Curated, prompts: Mapping[str, CuratedPrompt], pages: Pages
) -> dict[str, bytes]:
    """worksheet.csv with all rows that were asked or decided about, those to be dropped first, and
    worksheet.html with the first of them. pages: pictures of pages."""
    cfg = made.settings
    assert isinstance(cfg, VerifyConfig)
    asked = [
        one
        for one in made.decisions
        if one.figures["verifier_answers"] or one.figures["by"] == "person"
    ]
    asked.sort(key=lambda one: _ORDER.index(one.figures["class"] or "UNCERTAIN"))
    shown = asked[: cfg.worksheet_rows]
    return {
        "worksheet.csv": csv_text(_HEAD, [_csv_row(one, prompts[one.row_id]) for one in asked]),
        "worksheet.html": _page(shown, len(asked), prompts, pages, cfg).encode("utf-8", "replace"),
    }


_HEAD = (
    *(ID, PERSON, NOTE, "class", "kept", "question", "reference", "verifier", "evidence"),
    *("verifier_answers", "generator_answers", "document", "pages"),
)


def _csv_row(one: Decision, prompt: CuratedPrompt) -> list[str]:
    figures = one.figures
    return [
        one.row_id,
        figures["class"] if figures["by"] == "person" else "",
        figures["note"],
        figures["verifier_class"] or one.reason,
        "yes" if one.kept else "no",
        prompt.question.question,
        figures["reference"],
        figures["verifier"] or "",
        " | ".join(figures["evidence"]),
        " | ".join(figures["verifier_answers"]),
        " | ".join(figures["generator_answers"]),
        prompt.question.file_name,
        ", ".join(prompt.question.gold),
    ]


def _page(
    shown: Sequence[Decision],
    count: int,
    prompts: Mapping[str, CuratedPrompt],
    pages: Pages,
    cfg: VerifyConfig,
) -> str:
    env = Environment(
        loader=PackageLoader("trainer.search.curation", "verification"),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
    )
    env.filters["visible"] = visible
    gold = dict.fromkeys(page for one in shown for page in prompts[one.row_id].question.gold)
    names = {page: f"page{number}" for number, page in enumerate(gold)}
    pictures = [(names[page], *_picture(pages(page), cfg.worksheet_width)) for page in gold]
    return env.get_template("worksheet.html").render(
        style=Markup(STYLE),
        count=count,
        classes=CLASSES,
        person=PERSON,
        pictures=[(name, Markup(data), width, height) for name, data, width, height in pictures],
        rows=[_shown(one, prompts[one.row_id], names) for one in shown],
    )


def _shown(one: Decision, prompt: CuratedPrompt, names: Mapping[str, str]) -> dict[str, Any]:
    question = prompt.question
    return {
        **one.figures,
        "id": one.row_id,
        "kept": one.kept,
        "reason": one.reason,
        "question": question.question,
        "pages": [(page, names[page]) for page in question.gold],
    }


def _picture(png: bytes, width: int) -> tuple[str, int, int]:
    """A data URL of the page, no wider than that, and its size."""
    try:
        picture = read_picture(png)
    except PictureError:
        return "data:,", 16, 9
    if picture.width > width:
        picture = picture.resize((width, max(1, round(picture.height * width / picture.width))))
    written = BytesIO()
    picture.save(written, "JPEG", quality=_QUALITY)
    url = f"data:image/jpeg;base64,{b64encode(written.getvalue()).decode()}"
    return url, picture.width, picture.height
