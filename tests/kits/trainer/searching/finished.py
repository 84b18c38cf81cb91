"""Questions and finished episodes of the search task, as small as possible."""

from __future__ import annotations

import hashlib
from typing import Any

from scorekit.retrieval.wire import PageHit
from trainer.search.records import ImageView, Question, TokenRecord, Trajectory, Turn, mask_digest


def png_of(name: str) -> bytes:
    """Return the fake bytes of the image `name`."""
    return b"\x89PNG\r\n\x1a\n" + name.encode() * 40


def sha256_of(name: str) -> str:
    """Return the hash of the image `name`."""
    return hashlib.sha256(png_of(name)).hexdigest()


def question(id: str = "q1", gold: tuple[str, ...] = ("deck_2",), **more: Any) -> Question:
    """Return a question whose gold pages are `gold`."""
    texts = {"question": f"What does {id} ask?", "reference_answer": f"the answer of {id}"}
    return Question(id=id, gold=gold, **(texts | more))


def page(page_id: str) -> ImageView:
    """Return the view of a full page, shown at its own size; its image is `png_of(page_id)`."""
    return _view("page", page_id, page_id, (0, 0, 100, 80))


def crop(page_id: str, name: str) -> ImageView:
    """Return the view of a part of a page, whose image is `png_of(name)`."""
    return _view("crop", page_id, name, (10, 10, 60, 50))


def _view(kind: Any, page_id: str, name: str, region: Any) -> ImageView:
    left, top, right, bottom = region
    return ImageView(
        kind=kind,
        page_id=page_id,
        width=right - left,
        height=bottom - top,
        region=region,
        page_width=100,
        page_height=80,
        image=sha256_of(name),
    )


def search_turn(number: int, *page_ids: str, golden: bool | None = None) -> Turn:
    """Return a turn that searched and was shown `page_ids`."""
    hits = [
        PageHit(
            page_id=page_id,
            document=page_id.rpartition("_")[0],
            page=int(page_id.rpartition("_")[2]),
            rank=rank,
            score=1 / rank,
            width=100,
            height=80,
            image=f"/v1/pages/{page_id}/image",
        )
        for rank, page_id in enumerate(page_ids, 1)
    ]
    return Turn(
        number=number,
        text=f"<think>look</think>\n<search>query {number}</search>",
        tokens=12,
        action="search",
        query=f"query {number}",
        hits=hits,
        views=[page(page_id) for page_id in page_ids],
        rank=1 if page_ids else None,
        golden=golden,
        observation="a page" if page_ids else "nothing was found",
    )


def complete_turn(number: int, *, forced: bool = False) -> Turn:
    """Return the turn that ends an episode."""
    text = "<think>done</think>\n<search_complete>true</search_complete>"
    return Turn(number=number, text=text, action="complete", forced=forced, tokens=9)


def episode(
    trajectory_id: str = "t1",
    shown: tuple[str, ...] = ("deck_1", "deck_2"),
    *,
    end: Any = "complete",
    **more: Any,
) -> Trajectory:
    """Return a finished episode: one search per page of `shown`, then its end.

    more: fields of Trajectory.
    """
    turns = [search_turn(number, page_id) for number, page_id in enumerate(shown, 1)]
    if end in ("complete", "forced"):
        turns.append(complete_turn(len(shown) + 1, forced=end == "forced"))
    mask = [True, True, False, True]
    fields: dict[str, Any] = {
        "run": "run-a",
        "step": 1,
        "group": "q1",
        "question": question(),
        "turns": turns,
        "end": end,
        "tokens": TokenRecord(
            prompt_ids=[1, 2],
            completion_ids=[3, 4, 5, 6],
            action_mask=mask,
            mask_digest=mask_digest(mask),
            images=[sha256_of(page_id) for page_id in shown],
        ),
    }
    return Trajectory(trajectory_id=trajectory_id, **(fields | more))
