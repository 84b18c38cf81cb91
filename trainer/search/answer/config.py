"""Config of the answer: the generator, the judge, and what they may cost."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from scorekit.config import Config
from scorekit.llm.dialects import DialectName
from scorekit.paid.answers import Space, check_location
from trainer.config_base import may_change

#: The store of paid answers.
SEARCH = Space(
    name="search",
    setting="answers",
    password="SEARCH_REDIS_PASSWORD",
    extra="search",
    repair="`scorekit search salvage FILE`",
)

#: The generator's instructions. They are part of the key of cached answers.
SYSTEM = (
    "You answer questions about documents. You are shown pictures of pages, and of parts of pages "
    "that were enlarged. Take the answer from the pictures alone. Answer as briefly as the "
    "question allows, with the answer and nothing else. If the pictures do not show it, say so."
)
#: Its instructions without images: with `system` it would say that no image shows the answer.
WITHOUT_IMAGES = (
    "You answer questions about documents that you cannot see. Answer from what you know, as "
    "briefly as the question allows, with the answer and nothing else. If you do not know, say so."
)
#: Default budget of an original: 1,536 patches of 32 x 32 pixels. Qwen3-VL makes as many tokens of
#: it, Qwen2.5-VL (28 x 28) about 2,050, and it is the most that OpenAI's small models take before
#: they scale an image down.
MAX_PIXELS = 1536 * 32 * 32


class ChatModelConfig(Config):
    """A model behind an OpenAI-compatible server."""

    base_url: str = may_change(
        "http://localhost:8000/v1", description="Its address, with /v1; it may move in a run."
    )
    model: str = Field("", description="Its model's name there.")
    api_key_env: str = may_change("LLM_API_KEY", description="Environment variable with the key.")
    api: DialectName = Field(
        "openai",
        description="openai: chat completions with OpenAI's own fields; gemini: the same without a "
        "seed; responses: the Responses API; vllm: chat completions with every sampling field.",
    )
    system: str = Field("", description="Instructions.")
    effort: str | None = Field(
        None, description="Reasoning effort (minimal, low, medium, ...); null: not said."
    )
    temperature: float = Field(1.0, ge=0, le=2, description="1 is left out for OpenAI.")
    max_output_tokens: int = Field(
        1024, ge=1, description="Most tokens of an answer, its thinking included."
    )
    max_requests: int = may_change(
        32,
        ge=1,
        description="Calls in flight, in the whole run: each of its "
        "processes has an equal part, but at least one call.",
    )
    max_tokens: int = may_change(
        1_000_000,
        ge=1,
        description="Tokens of calls in flight, reckoned, in the whole run: each of its processes "
        "has an equal part, and a call above it is sent alone.",
    )
    requests_per_minute: float | None = may_change(
        None,
        gt=0,
        description="Most calls a minute, evenly spaced, of all processes together; null: no such "
        "limit.",
    )
    tokens_per_image: int = may_change(
        2500, ge=1, description="Tokens reckoned for a picture, until the server has counted some."
    )
    request_timeout_s: float = may_change(
        120.0,
        gt=0,
        description="Seconds for one attempt; with api vllm the least: an answer of many tokens "
        "gets longer, up to half of deadline_s, so that a call that hangs is sent again in time.",
    )
    max_attempts: int = may_change(
        8,
        ge=1,
        description="Attempts at one call, with pauses of 1, 2, 4, ... 32, 32 s: eight outlast a "
        "server that is away for a minute.",
    )
    deadline_s: float = may_change(
        300.0, gt=0, description="Seconds for an answer from its turn on, all attempts together."
    )


class GeneratorConfig(ChatModelConfig):
    """The frozen model that answers from the evidence."""

    api_key_env: str = may_change(
        "GENERATOR_API_KEY", description="Environment variable with the key."
    )
    system: str = Field(SYSTEM, description="Instructions.")
    images: Literal["original", "shown"] = Field(
        "original",
        description="original: pages and crops at the page's own resolution, within max_pixels; "
        "shown: exactly the pictures that the policy was shown.",
    )
    max_pixels: int = Field(
        MAX_PIXELS,
        ge=1,
        description="With images original: largest area of a picture; one that the policy was "
        "shown larger stays as shown.",
    )
    max_images: int = Field(8, ge=1, description="Most pictures that it is shown.")
    crop_slots: int = Field(
        3, ge=0, description="Of them, places that pages leave to crops, where there are crops."
    )


class AnswerJudgeConfig(Config):
    """The judge that compares answers: a judge service (services/judge)."""

    url: str = may_change("http://localhost:8003", description="Its address; it may move in a run.")
    model: str | None = Field(
        None, description="The model that it must have; null: whichever is there at the start."
    )
    grounded: bool = Field(
        False, description="Ask as well whether the evidence supports the answer (answer_grounded)."
    )
    no_evidence: Literal["zero", "ask"] = Field(
        "zero",
        description="An episode that has seen no page: zero: nobody is asked, it is judged 0; ask: "
        "the generator answers without pictures, which shows what it knows by itself.",
    )
    max_tokens: int | None = may_change(
        None,
        ge=1,
        le=32768,
        description="Most tokens of a verdict, its thinking included; null: the rubric's, which "
        "a model that thinks uses up before it has said anything.",
    )
    max_in_flight: int = may_change(
        32,
        ge=1,
        description="Requests at once, in the whole run: each of its processes has an equal part, "
        "but at least one.",
    )
    timeout_s: float = may_change(120.0, gt=0, description="Seconds for one verdict.")
    deadline_s: float = may_change(300.0, gt=0, description="The same with all attempts.")


class PriceConfig(Config):
    """Price of a million tokens."""

    prompt: float = Field(ge=0, description="Of what is sent.")
    completion: float = Field(ge=0, description="Of what comes back, thinking included.")


class MoneyConfig(Config):
    """Prices, and the most that a run may spend."""

    generator: PriceConfig | None = may_change(None, description="null: free, or not known.")
    judge: PriceConfig | None = may_change(
        None, description="Of the model behind the judge; null: free, or not known."
    )
    cap: float | None = may_change(
        None, gt=0, description="Most that the run may spend, in the prices' currency."
    )

    @model_validator(mode="after")
    def _cap_needs_prices(self) -> MoneyConfig:
        if self.cap is not None and self.generator is None and self.judge is None:
            raise ValueError("cap: without a price (generator, judge) nothing is ever spent")
        return self


class AnsweringConfig(Config):
    """The generator, the judge and the budget of answers."""

    generator: GeneratorConfig = Field(default_factory=GeneratorConfig, description="Generator.")
    judge: AnswerJudgeConfig = Field(default_factory=AnswerJudgeConfig, description="Judge.")
    money: MoneyConfig = Field(default_factory=MoneyConfig, description="Money.")
    answers: str | None = may_change(
        None,
        description="Answers that were paid for, which several runs may share: a SQLite file, or "
        "redis:// where several machines run. null: answers.sqlite in the run's folder.",
    )

    @field_validator("answers")
    @classmethod
    def _check_answers(cls, location: str | None) -> str | None:
        return check_location(location, SEARCH.password)
