"""Write the demo's pages with small print as images, for an OCR model of another environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demo.search.answer_keys import FINAL_KEYS, KEYS, Spot, read_keys
from demo.search.reading import CORPUS, FINAL_CORPUS, WIDTH, Page, Reader
from trainer.search.config import SightConfig
from trainer.search.images.views import ShownImage, crop_view, page_view
from trainer.search.records import Question, Region
from trainer.search.rollout.tools import PageSource


def write_small_print(
    folder: Path, small_questions: Sequence[Question], pages: PageSource, budgets: Mapping[str, int]
) -> None:
    """Write the pages of questions in all sizes, and images.json, which says what stands where.

    small_questions: questions about small print.
    budgets: name -> pixels of an original.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reader, sight = Reader(CORPUS, FINAL_CORPUS), SightConfig()
    spots = _spots({question.question for question in small_questions})
    rows = []
    for page_id, of_page in sorted(spots.items()):
        image = pages.image(page_id)
        page = page_view(page_id, image, sight)
        pixels = _small_box(of_page, page.view.width / WIDTH)
        views = {"shown": page, "shown, crop": crop_view(page.view, pixels, image, sight)}
        for name, budget in budgets.items():
            views[name] = page_view(page_id, image, sight, budget)
        for name, view in views.items():
            assert isinstance(view, ShownImage)
            path = folder / f"{page_id} {name}.png".replace(", ", "-").replace(" ", "-")
            path.write_bytes(view.original or view.png)
            region = [side * WIDTH / page.view.page_width for side in view.view.region]
            texts = _texts(reader.pages[page_id], of_page)
            rows.append({"side": name, "image": path.name, "region": region, "texts": texts})
    (folder / "images.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")


def _spots(questions: set[str]) -> dict[str, list[Spot]]:
    """Return the spots that the questions ask for, by page and each once."""
    spots: dict[str, dict[Region, Spot]] = {}
    for key in (*read_keys(KEYS), *read_keys(FINAL_KEYS)):
        for spot in (spots_of[0] for spots_of in key.reads if key.question in questions):
            spots.setdefault(spot.page_id, {})[spot.box] = spot
    return {page_id: list(of_page.values()) for page_id, of_page in spots.items()}


def _small_box(spots: Sequence[Spot], scale: float) -> Region:
    """Return the box around spots, in pixels of a view of `scale` pixels a point."""
    boxes = [spot.box for spot in spots]
    left, top = min(box[0] for box in boxes), min(box[1] for box in boxes)
    right, bottom = max(box[2] for box in boxes), max(box[3] for box in boxes)
    return left * scale, top * scale, right * scale, bottom * scale


def _texts(page: Page, spots: Sequence[Spot]) -> list[dict[str, Any]]:
    return [{"box": spot.box, "text": page.text_at(spot.box)} for spot in spots]
