"""What an episode leaves: the records that are stored, and that all of the task reads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from scorekit.retrieval.wire import PageHit

#: A judge's score from which on an answer counts as right.
SUCCESS = 0.5
#: x1, y1, x2, y2; origin top left.
Region = tuple[float, float, float, float]
#: How a policy writes a box: pixels of the picture last shown, or its sides as 0-1000, or as 0-1.
BoxConvention = Literal["pixel", "thousand", "unit"]
ActionName = Literal["search", "crop", "complete", "invalid"]
#: complete: the policy said so. forced: its turns were used up. declined: it wrote another body
#: than true. context: the next turn would not have fitted. failed: a neighbour gave no answer.
EndName = Literal["complete", "forced", "declined", "context", "failed"]
#: ok: there is a value. skipped: on purpose none was asked for. failed: none was got, though asked
#: for. late: it came after the step's deadline and was dropped.
Status = Literal["ok", "skipped", "failed", "late"]


class Record(BaseModel):
    """Base of all records: an unknown key is an error, no number is NaN or infinite (nor becomes
    a null on its way to a file, where it would pass for a value that was not had)."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")


class Question(Record):
    """A row of the data.

    id: its own, alone in its file. reference_pages: numbers in the file `file_name`; the first is
    1. gold: their page ids. alternatives: gold page id -> pages that carry the same fact.
    question_type: by which figures are told apart. max_turns, temperature, n_agent (episodes of its
    group): of this row; None: the run's.
    """

    id: str
    question: str
    reference_answer: str
    file_name: str = ""
    reference_pages: tuple[int, ...] = ()
    gold: tuple[str, ...] = ()
    alternatives: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    question_type: str = ""
    max_turns: int | None = None
    temperature: float | None = None
    n_agent: int | None = None

    def samples(self, of_run: int | None) -> int:
        """Episodes of it, where the run plays `of_run` of a question that does not say; None: one
        of each, whatever it says."""
        return 1 if of_run is None else self.n_agent or of_run


class View(Record):
    """A picture that the policy was shown: the frame of coordinates for the box that follows.

    width, height: as shown, in pixels. region: what of the page it shows, in pixels of the page's
    own picture of page_width x page_height; so a crop of a crop has one frame. image: SHA-256 of
    the PNG, which is stored under it.
    """

    kind: Literal["page", "crop"]
    page_id: str
    width: int
    height: int
    region: Region
    page_width: int
    page_height: int
    image: str


class Turn(Record):
    """A turn of the policy and what came of it.

    number: the first is 1. text: as written; of a forced end, what was put in its place. tokens: of
    the policy's own; None where its server did not say. reason: of an invalid action, by its key.
    detail: the same in words, as the policy was told. query, box, convention: of the action.
    rank: in hits, of the page that was shown. golden: whether that page is one of the gold ones;
    None where none was shown, or none is known. observation: its text. policy_s, tool_s: seconds.
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
    views: list[View] = Field(default_factory=list)
    rank: int | None = None
    golden: bool | None = None
    observation: str = ""
    policy_s: float = 0.0
    tool_s: float = 0.0


class TokenRecord(Record):
    """The ids of an episode, for training and for looking back.

    completion_ids: from the first sampled id to the last, observations between them. mask_digest:
    SHA-256 over the action mask as bytes 0 and 1. images: SHA-256 of the pictures in their order.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    action_mask: list[bool]
    mask_digest: str
    images: list[str] = Field(default_factory=list)


def mask_digest(action_mask: Sequence[bool]) -> str:
    """What `TokenRecord.mask_digest` says of an action mask."""
    return hashlib.sha256(bytes(map(bool, action_mask))).hexdigest()


class Charge(Record):
    """What was asked of a paid server. money: in the currency of the prices; None without prices.
    cached: the answer was known, so nothing was paid."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float | None = None
    cached: bool = False


class GeneratedAnswer(Record):
    """What the frozen generator said. text: None unless ok. error: why not, typed as `LLMError`s
    or `SampleError`s are. evidence: SHA-256 of the pictures that it was sent, in order."""

    status: Status
    text: str | None = None
    error: str | None = None
    model: str = ""
    evidence: list[str] = Field(default_factory=list)
    charge: Charge = Charge()
    latency_s: float = 0.0


class JudgedAnswer(Record):
    """What the judge said of it. score: 0 to 1; None unless ok (or skipped with a defined score:
    no evidence is judged 0 without a call). reason: its own words, or why there is no score."""

    status: Status
    score: float | None = None
    reason: str = ""
    model: str = ""
    charge: Charge = Charge()
    latency_s: float = 0.0


class EpisodeReward(Record):
    """The number that the policy is trained on. value: None unless ok. parts: judge, ndcg, format,
    each before its weight; what is not there was not had."""

    status: Status
    value: float | None = None
    parts: dict[str, float] = Field(default_factory=dict)
    gated: bool = False
    error: str | None = None


class Trajectory(Record):
    """An episode from its question to its reward.

    trajectory_id: alone in its run. group: of the episodes of one question in one step. attempt:
    counts from 0 where a step is done again after a crash. end: None while it goes on. policy: its
    name or URL.
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
        """Ids of the pages that were shown, each once, in the order in which it first was."""
        pages = [v.page_id for t in self.turns for v in t.views if v.kind == "page"]
        return list(dict.fromkeys(pages))

    @property
    def forced(self) -> bool:
        """Whether the end was put in the policy's place."""
        return self.end == "forced"

    @property
    def success(self) -> bool | None:
        """Whether the judge takes the answer for right; None without a score."""
        if self.judged is None or self.judged.score is None:
            return None
        return self.judged.score >= SUCCESS

    @property
    def saw_evidence(self) -> bool:
        """Whether a page that carries the fact was shown: a gold one, or an alternative to one;
        where no gold is known, whether any page was."""
        asked, shown = self.question, self.shown_pages
        if not asked.gold:
            return bool(shown)
        carry = {*asked.gold, *(page for of in asked.alternatives.values() for page in of)}
        return not carry.isdisjoint(shown)

    @property
    def pictures(self) -> list[str]:
        """SHA-256 of all that it refers to, each once: shown, in its ids, and sent as evidence."""
        shown = [view.image for turn in self.turns for view in turn.views]
        in_ids = self.tokens.images if self.tokens else []
        sent = self.answer.evidence if self.answer else []
        return list(dict.fromkeys([*shown, *in_ids, *sent]))
