"""The records of an episode, which are stored and which all of the search task reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from scorekit.paid.account import ApiUsage
from scorekit.retrieval.wire import PageHit

#: Min judge's score of an answer that counts as right.
SUCCESS = 0.5
#: x1, y1, x2, y2; origin top left.
Region = tuple[float, float, float, float]
#: Units of a policy's boxes: pixels of the last image, or 0-1000 or 0-1 of its sides.
BoxConvention = Literal["pixel", "thousand", "unit"]
ActionName = Literal["search", "crop", "complete", "invalid"]
#: complete: the policy ended the search. forced: no turn was left. declined: the policy wrote a
#: body other than true. context: the next turn would not fit. failed: a service did not answer.
EndName = Literal["complete", "forced", "declined", "context", "failed"]
#: ok: there is a value. skipped: none was requested. failed: it was requested and is missing.
#: late: it came after the step's deadline and was dropped.
Status = Literal["ok", "skipped", "failed", "late"]


class Record(BaseModel):
    """The base of all records. An unknown key, NaN and infinity are errors.

    JSON would write NaN as null, which means a missing value.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")


def answer_parts(answer: str) -> list[str] | None:
    """Return the parts of an answer that is a JSON array of texts; None for any other answer."""
    if not answer.startswith("["):
        return None
    try:
        parts = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    is_array = isinstance(parts, list) and bool(parts)
    return parts if is_array and all(isinstance(part, str) for part in parts) else None


class Question(Record):
    """A question of a data set.

    id: unique in its file.
    reference_answer: "" if there is none; an answer of several parts is a JSON array of texts
    (`answer_parts`).
    other_answers: further answers that are right, too.
    reference_pages: numbers in the file `file_name`; the first is 1.
    gold: page ids.
    alternatives: gold page id -> pages that carry the same fact.
    question_type: stats are grouped by it. max_turns, temperature, n_agent (episodes of its group):
    settings of this row; None: the run's.
    """

    id: str
    question: str
    reference_answer: str
    other_answers: tuple[str, ...] = ()
    file_name: str = ""
    reference_pages: tuple[int, ...] = ()
    gold: tuple[str, ...] = ()
    alternatives: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    question_type: str = ""
    max_turns: int | None = None
    temperature: float | None = None
    n_agent: int | None = None

    @property
    def reference_answers(self) -> tuple[str, ...]:
        """Return all right answers, first `reference_answer`; none if that is empty."""
        return (self.reference_answer, *self.other_answers) if self.reference_answer else ()

    @property
    def reference_text(self) -> str:
        """Return all right answers as one text for people: they have " | " between them."""
        return " | ".join(self.reference_answers)

    @property
    def facts(self) -> list[set[str]]:
        """Return for each gold page the pages that carry its fact: it and its alternatives."""
        return [{gold, *self.alternatives.get(gold, ())} for gold in self.gold]

    def samples(self, of_run: int | None) -> int:
        """Return the number of its episodes: its `n_agent`, else `of_run`; if that is None, 1."""
        return 1 if of_run is None else self.n_agent or of_run


class ImageView(Record):
    """An image that the policy got: the frame of coordinates for the next box.

    width, height: in pixels.
    region: the visible part of the page, in pixels of the page's full image of page_width x
    page_height, also for a crop of a crop.
    image: SHA-256 of the PNG, which is its key in the store.
    original: that of the region at the page's own resolution, for the generator; `image` if it
    shows no less; None if the run stores no originals.
    """

    kind: Literal["page", "crop"]
    page_id: str
    width: int
    height: int
    region: Region
    page_width: int
    page_height: int
    image: str
    original: str | None = None

    @classmethod
    def of_page(
        cls, page_id: str, size: tuple[int, int], page_size: tuple[int, int], image: str = ""
    ) -> ImageView:
        """Return the view of a full page.

        size: as shown, page_size: of its full image.
        """
        return cls(
            kind="page",
            page_id=page_id,
            width=size[0],
            height=size[1],
            region=(0, 0, *page_size),
            page_width=page_size[0],
            page_height=page_size[1],
            image=image,
        )

    def is_among(self, images: Collection[str]) -> bool:
        """Return whether its image, as shown or original, is one of these (SHA-256)."""
        return self.image in images or self.original in images


class Turn(Record):
    """A turn of the policy and its observation.

    number: the first is 1.
    text: as written; of a forced end, the text that replaces it.
    tokens: the number of sampled tokens; None if the server does not report it.
    reason: key of an invalid action.
    detail: the message to the policy about it.
    query, box, convention: of the action.
    rank: rank of the visible page in hits.
    golden: whether that page is a gold page; None if there is no page, or no known gold page.
    observation: its text.
    policy_s, tool_s: seconds.
    """

    number: int
    text: str
    tokens: int | None = None
    forced: bool = False
    action: ActionName
    reason: str | None = None
    detail: str = ""
    query: str | None = None
    box: Region | None = None
    convention: BoxConvention | None = None
    hits: list[PageHit] = Field(default_factory=list)
    views: list[ImageView] = Field(default_factory=list)
    rank: int | None = None
    golden: bool | None = None
    observation: str = ""
    policy_s: float = 0.0
    tool_s: float = 0.0


class TokenRecord(Record):
    """The ids of an episode, for training and inspection.

    completion_ids: from the first sampled id to the last, with observations.
    mask_digest: SHA-256 of the action mask as bytes 0 and 1.
    images: SHA-256 of the images in order.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    action_mask: list[bool]
    mask_digest: str
    images: list[str] = Field(default_factory=list)


def mask_digest(action_mask: Sequence[bool]) -> str:
    """Return `TokenRecord.mask_digest` of an action mask."""
    return hashlib.sha256(bytes(map(bool, action_mask))).hexdigest()


class GeneratedAnswer(Record):
    """The answer of the frozen generator.

    text: None unless ok.
    error: the type of an `LLMError` or a `SampleError`, and its message.
    evidence: SHA-256 of the images in the request, in order."""

    status: Status
    text: str | None = None
    error: str | None = None
    model: str = ""
    evidence: list[str] = Field(default_factory=list)
    charge: ApiUsage = ApiUsage()
    latency_s: float = 0.0


class JudgedAnswer(Record):
    """The verdict of the judge.

    score: 0 to 1; None unless ok (or skipped with a defined score: no evidence scores 0 without a
    call).
    reason: the judge's reason, or why there is no score."""

    status: Status
    score: float | None = None
    reason: str = ""
    model: str = ""
    charge: ApiUsage = ApiUsage()
    latency_s: float = 0.0


class EpisodeReward(Record):
    """The reward of an episode.

    value: None unless ok.
    parts: judge, ndcg, format, each before its weight; a missing one has no value."""

    status: Status
    value: float | None = None
    parts: dict[str, float] = Field(default_factory=dict)
    gated: bool = False
    error: str | None = None


class Trajectory(Record):
    """An episode from its question to its reward.

    trajectory_id: unique in its run.
    group: name of the group of one question in one step.
    attempt: counts from 0; a step repeated after a crash has the next number.
    end: None before the end.
    policy: its name or URL.
    """

    trajectory_id: str
    run: str
    step: int
    group: str
    sample: int = 0
    attempt: int = 0
    question: Question
    policy: str = ""
    index_revision: str = ""
    turns: list[Turn] = Field(default_factory=list)
    end: EndName | None = None
    end_detail: str = ""
    tokens: TokenRecord | None = None
    answer: GeneratedAnswer | None = None
    judged: JudgedAnswer | None = None
    grounded: JudgedAnswer | None = None
    ndcg: float | None = None
    reward: EpisodeReward | None = None

    @property
    def shown_pages(self) -> list[str]:
        """Return the ids of the visible pages without duplicates, in their order."""
        pages = [v.page_id for t in self.turns for v in t.views if v.kind == "page"]
        return list(dict.fromkeys(pages))

    @property
    def forced(self) -> bool:
        """Return whether the environment ended the search, not the policy."""
        return self.end == "forced"

    @property
    def reward_value(self) -> float | None:
        """Return the value of the reward; None without one."""
        return None if self.reward is None else self.reward.value

    @property
    def success(self) -> bool | None:
        """Return whether the answer counts as right; None without a judge's score."""
        if self.judged is None or self.judged.score is None:
            return None
        return self.judged.score >= SUCCESS

    @property
    def sent_pages(self) -> set[str]:
        """Return the pages whose images the generator got; without that data, all visible pages."""
        sent = set(self.answer.evidence) if self.answer else set()
        if not sent:
            return set(self.shown_pages)
        views = (view for turn in self.turns for view in turn.views)
        return {view.page_id for view in views if view.is_among(sent)}

    @property
    def answer_has_evidence(self) -> bool:
        """Return whether the generator got a gold page or an alternative to one.

        Without known gold pages: whether it got any page.
        """
        page_ids, facts = self.sent_pages, self.question.facts
        if not facts:
            return bool(page_ids)
        return any(not fact.isdisjoint(page_ids) for fact in facts)

    @property
    def has_unsent_gold(self) -> bool:
        """Return whether a fact was visible to the policy, and no page with it was sent.

        At most `answering.generator.max_images` images are sent, the first pages first.
        """
        visible, sent = set(self.shown_pages), self.sent_pages
        return any(fact & visible and not fact & sent for fact in self.question.facts)

    @property
    def images(self) -> list[str]:
        """Return the SHA-256 of all its images without duplicates: in views, ids and evidence."""
        views = [view for turn in self.turns for view in turn.views]
        in_views = [image for view in views for image in (view.image, view.original) if image]
        in_ids = self.tokens.images if self.tokens else []
        sent = self.answer.evidence if self.answer else []
        return list(dict.fromkeys([*in_views, *in_ids, *sent]))
