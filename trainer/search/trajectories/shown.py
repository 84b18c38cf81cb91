"""What of an episode stands on the page to look at: its kinds, its turns, boxes on its pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainer.search.records import SUCCESS, Region, Trajectory, Turn, View
from trainer.search.sight.views import in_frame, in_pixels

#: Kind of an episode -> what it means. The first holds all.
KINDS = {
    "all": "all",
    "seen-wrong": "gold seen, answer wrong",
    "unshown-right": "answer right without evidence",
    "forced": "forced end",
    "invalid": "an invalid action",
    "unscored": "without a reward",
}


class BoxMark(NamedTuple):
    """A box on a picture, its sides as 0-1 of the picture's. kind: `written` by the policy, or
    `cut` out of the page. turn: number of the turn that it is of."""

    kind: str
    region: Region
    turn: int


@dataclass
class ShownPicture:
    """A picture of a turn. marks: the boxes of later turns on it."""

    view: View
    marks: list[BoxMark] = field(default_factory=list)


class ShownTurn(NamedTuple):
    """A turn and its pictures."""

    turn: Turn
    pictures: list[ShownPicture]


class ShownEpisode(NamedTuple):
    """An episode as it is laid out."""

    trajectory: Trajectory
    turns: list[ShownTurn]
    kinds: list[str]


def lay_out(trajectory: Trajectory) -> ShownEpisode:
    """Put each box on the picture that the policy had before it when it wrote it; and what was cut
    out, on the page too."""
    turns: list[ShownTurn] = []
    last: ShownPicture | None = None
    pages: dict[str, ShownPicture] = {}
    for turn in trajectory.turns:
        if last is not None and turn.box is not None:
            last.marks.append(_written(turn, last.view))
        pictures = [ShownPicture(view) for view in turn.views]
        for picture in pictures:
            if picture.view.kind == "page":
                pages[picture.view.page_id] = picture
            elif (page := pages.get(picture.view.page_id)) is not None:
                region = in_frame(picture.view.region, page.view, "unit")
                page.marks.append(BoxMark("cut", region, turn.number))
            last = picture
        turns.append(ShownTurn(turn, pictures))
    return ShownEpisode(trajectory, turns, list(_kinds(trajectory)))


def _written(turn: Turn, view: View) -> BoxMark:
    assert turn.box is not None
    x1, y1, x2, y2 = in_pixels(turn.box, view, turn.convention or "pixel")
    sides = x1 / view.width, y1 / view.height, x2 / view.width, y2 / view.height
    within = [min(max(side, 0.0), 1.0) for side in sides]  # a refused one may reach out
    return BoxMark("written", (within[0], within[1], within[2], within[3]), turn.number)


def _kinds(trajectory: Trajectory) -> Iterator[str]:
    """The kinds that an episode is of, by the keys of KINDS.

    Without evidence: no page with the fact was shown (no page at all, where no gold is known), or
    the judge finds no support for the answer in what was.
    """
    yield "all"
    support = trajectory.grounded.score if trajectory.grounded else None
    if trajectory.success is False and set(trajectory.question.gold) & {*trajectory.shown_pages}:
        yield "seen-wrong"
    unshown = not trajectory.saw_evidence or (support is not None and support < SUCCESS)
    if trajectory.success and unshown:
        yield "unshown-right"
    if trajectory.forced:
        yield "forced"
    if any(turn.action == "invalid" for turn in trajectory.turns):
        yield "invalid"
    if trajectory.reward is None or trajectory.reward.value is None:
        yield "unscored"


class MeanFigure(NamedTuple):
    """A mean, and of how many of all it is: no mean stands without its coverage."""

    name: str
    mean: float | None
    known: int
    of: int


def figures(episodes: Sequence[Trajectory]) -> list[MeanFigure]:
    """Means over the episodes."""
    values: dict[str, list[float | None]] = {
        "reward": [t.reward.value if t.reward else None for t in episodes],
        "judge": [t.judged.score if t.judged else None for t in episodes],
        "grounded": [t.grounded.score if t.grounded else None for t in episodes],
        "NDCG": [t.ndcg for t in episodes],
        "turns": [float(len(t.turns)) for t in episodes],
    }
    found = []
    for name, of in values.items():
        known = [value for value in of if value is not None]
        mean = sum(known) / len(known) if known else None
        found.append(MeanFigure(name, mean, len(known), len(of)))
    return found
