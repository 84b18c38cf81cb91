"""Lay out an episode for the page: its kinds, its turns, and boxes on its images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainer.search.images.views import in_frame, in_pixels
from trainer.search.records import SUCCESS, ImageView, Region, Trajectory, Turn

#: Kind of an episode -> what it means. The first holds all.
KINDS = {
    "all": "all",
    "seen-wrong": "gold seen, answer wrong",
    "unsent": "gold shown, not sent",
    "unshown-right": "answer right without evidence",
    "forced": "forced end",
    "invalid": "an invalid action",
    "unscored": "without a reward",
}


class BoxMark(NamedTuple):
    """A box on an image, in 0-1 of its sides.

    kind: `written` by the policy, or `cut` out of the page.
    turn: number of its turn."""

    kind: str
    region: Region
    turn: int


@dataclass
class MarkedImage:
    """An image of a turn.

    marks: the boxes of later turns on it.
    """

    view: ImageView
    marks: list[BoxMark] = field(default_factory=list)


class ShownTurn(NamedTuple):
    """A turn and its images."""

    turn: Turn
    images: list[MarkedImage]


class ShownEpisode(NamedTuple):
    """An episode in the form of the page."""

    trajectory: Trajectory
    turns: list[ShownTurn]
    kinds: list[str]


def lay_out(trajectory: Trajectory) -> ShownEpisode:
    """Add each box to the image that the policy saw before it, and each crop to its page."""
    turns: list[ShownTurn] = []
    last: MarkedImage | None = None
    pages: dict[str, MarkedImage] = {}
    for turn in trajectory.turns:
        if last is not None and turn.box is not None:
            last.marks.append(_written(turn, last.view))
        marked_images = [MarkedImage(view) for view in turn.views]
        for image in marked_images:
            if image.view.kind == "page":
                pages[image.view.page_id] = image
            elif (page := pages.get(image.view.page_id)) is not None:
                region = in_frame(image.view.region, page.view, "unit")
                page.marks.append(BoxMark("cut", region, turn.number))
            last = image
        turns.append(ShownTurn(turn, marked_images))
    return ShownEpisode(trajectory, turns, list(_kinds(trajectory)))


def _written(turn: Turn, view: ImageView) -> BoxMark:
    assert turn.box is not None
    x1, y1, x2, y2 = in_pixels(turn.box, view, turn.convention or "pixel")
    sides = x1 / view.width, y1 / view.height, x2 / view.width, y2 / view.height
    within = [min(max(side, 0.0), 1.0) for side in sides]  # a refused box may exceed the image
    return BoxMark("written", (within[0], within[1], within[2], within[3]), turn.number)


def _kinds(trajectory: Trajectory) -> Iterator[str]:
    """Yield the kinds of an episode, as keys of KINDS.

    Without evidence: no page with the fact was sent to the generator (no page at all, without known
    gold pages), or the judge found no support for the answer in the evidence.
    """
    yield "all"
    support = trajectory.grounded.score if trajectory.grounded else None
    has_evidence = trajectory.answer_has_evidence
    if trajectory.success is False and trajectory.question.gold and has_evidence:
        yield "seen-wrong"
    if trajectory.has_unsent_gold:
        yield "unsent"
    lacks_evidence = not has_evidence or (support is not None and support < SUCCESS)
    if trajectory.success and lacks_evidence:
        yield "unshown-right"
    if trajectory.forced:
        yield "forced"
    if any(turn.action == "invalid" for turn in trajectory.turns):
        yield "invalid"
    if trajectory.reward is None or trajectory.reward.value is None:
        yield "unscored"


class MeanStat(NamedTuple):
    """A mean and its coverage: `num_known` of `total` episodes have a value."""

    name: str
    mean: float | None
    num_known: int
    total: int


def mean_stats(episodes: Sequence[Trajectory]) -> list[MeanStat]:
    """Return the means over the episodes."""
    values: dict[str, list[float | None]] = {
        "reward": [t.reward.value if t.reward else None for t in episodes],
        "judge": [t.judged.score if t.judged else None for t in episodes],
        "grounded": [t.grounded.score if t.grounded else None for t in episodes],
        "NDCG": [t.ndcg for t in episodes],
        "turns": [float(len(t.turns)) for t in episodes],
    }
    means = []
    for name, column in values.items():
        present = [value for value in column if value is not None]
        mean = sum(present) / len(present) if present else None
        means.append(MeanStat(name, mean, len(present), len(column)))
    return means
