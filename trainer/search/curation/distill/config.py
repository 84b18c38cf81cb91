"""The config sections `distill` and `rewrite`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from scorekit.config import Config
from trainer.chat.config import ChatConfig
from trainer.config_base import may_change
from trainer.search.answer.config import ChatModelConfig, PriceConfig
from trainer.search.curation.measures import Combine

#: Sort keys of a prompt's right episodes: the judge's score and NDCG in descending order; searches,
#: crops, turns and length (letters written) in ascending order.
Rank = Literal["judge", "ndcg", "searches", "crops", "turns", "length"]

REWRITE = """\
You edit what an agent thought while it searched document pages. You are given its question and \
some of its turns: of each a number, the action that it took, and what it thought before it.

Say each thought again in clear and fluent words of its own language, about as long as it was. \
This is editing: add no fact, no number and no name, and be no surer than the thought was. Never \
say that something is seen, shown or visible where the thought does not say so. Write no tag: \
neither of an action (search, bbox, search_complete), nor of an answer, nor of a think block.

Answer with JSON: for each turn its number and its thought."""


class DistillConfig(Config):
    """The rules for rare successes: right episodes of prompts that mostly fail."""

    model: str | None = Field(
        None,
        description="The model that is to learn, a folder or hub id; null: the last run's policy.",
    )
    chat: ChatConfig | None = Field(
        None, description="How its messages become text; null: as in the last run."
    )
    success: float = Field(
        1.0, gt=0, le=1, description="An episode is right with this score of the judge."
    )
    combine: Combine = Field(
        "all", description="Which episodes of a prompt count, as for `buckets`."
    )
    rate_at_most: float = Field(
        0.5, gt=0, le=1, description="Prompts of which at most this share of episodes was right."
    )
    successes_at_most: int | None = Field(
        None, ge=1, description="Prompts of which at most so many were right; null: any number."
    )
    ndcg_above: float | None = Field(
        None, ge=0, lt=1, description="Only episodes with a higher NDCG than this; null: any."
    )
    evidence: Literal["shown", "any"] = Field(
        "shown",
        description="shown: only episodes whose answer rests on every gold page or an alternative "
        "to it, or on pages of which `hallucinations` says (--record) that they carry the same; "
        "any: also lucky answers.",
    )
    duplicates: Literal["drop", "keep"] = Field(
        "drop", description="An episode that writes the same to the same question as another row."
    )
    per_prompt: int = Field(4, ge=1, description="Episodes of a prompt, the best of them.")
    order: list[Rank] = Field(
        default=["judge", "ndcg", "searches", "turns"],
        description="Which are the best: by these, one behind the other.",
    )
    ended: Literal["complete", "any"] = Field(
        "complete",
        description="complete: only episodes whose policy ended the search; any: also those that "
        "were cut short, without the forced turn.",
    )
    invalid: Literal["mask", "drop"] = Field(
        "mask",
        description="An episode with an invalid turn: mask: the turn is read and not learned; "
        "drop: it is no row.",
    )
    repeats: Literal["drop", "mask"] = Field(
        "drop",
        description="The same of one in which a search asks what the search before it has asked.",
    )

    @field_validator("order")
    @classmethod
    def _each_once(cls, value: list[Rank]) -> list[Rank]:
        if not value or len(set(value)) < len(value):
            raise ValueError("name each once, and one at least")
        return value


class RewriterConfig(ChatModelConfig):
    """The rewriting model, on any OpenAI-compatible server that supports a JSON schema."""

    api_key_env: str = may_change(
        "REWRITER_API_KEY", description="Environment variable with the server's key."
    )
    system: str = Field(REWRITE, description="Instructions.")
    max_output_tokens: int = Field(
        6000, ge=1, description="Most tokens of an answer, its thinking included."
    )


class RewriteConfig(Config):
    """The rewriting of think blocks; the actions of the policy stay unchanged."""

    rewriter: RewriterConfig = Field(default_factory=RewriterConfig, description="Who rewrites.")
    price: PriceConfig | None = may_change(None, description="Its price; null: free, or not known.")
    cap: float | None = may_change(None, gt=0, description="Most that may be spent; needs a price.")
    messages_per_call: int = Field(3, ge=1, description="Turns of an episode in one call, at most.")
    broken: Literal["original", "drop"] = Field(
        "original",
        description="A row that breaks a guarantee, or whose call failed: original: it stays as it "
        "was; drop: it goes.",
    )
    longer_at_most: float = Field(
        3.0, ge=1, description="A thought may become so many times as long, where over 200 letters."
    )

    @model_validator(mode="after")
    def _cap_needs_a_price(self) -> RewriteConfig:
        if self.cap is not None and self.price is None:
            raise ValueError("cap: needs a price: without one nothing is ever spent")
        return self
