"""The config of a search run, with a sentence for each key. Unknown keys are errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from scorekit.config import Config
from scorekit.llm.dialects import DialectName
from trainer.chat.config import ChatConfig
from trainer.config_base import may_change
from trainer.rl.config import PolicyConfig
from trainer.runs.config import EvalConfig, MiscConfig, RunConfig, StopConfig
from trainer.search.answer.config import AnsweringConfig
from trainer.search.config_data import SearchData
from trainer.search.reward.config import SearchRewardConfig
from trainer.search.rollout.config import EpisodeConfig, TurnSamplingConfig
from trainer.search.training.config import OnlineBudgetConfig, SearchRLConfig


class RetrieverConfig(Config):
    """The retriever service (services/retriever)."""

    url: str = may_change("http://localhost:8005", description="Its address; it may move in a run.")
    timeout_s: float = may_change(60.0, gt=0, description="Seconds for one request.")
    deadline_s: float = may_change(300.0, gt=0, description="The same with all attempts.")
    max_in_flight: int = may_change(
        32, ge=1, description="Requests at once, of each process of the run."
    )


class PolicyServerConfig(Config):
    """A policy behind an OpenAI-compatible server, used instead of `policy`."""

    url: str | None = may_change(None, description="Its address, with /v1; null: `policy.path`.")
    model: str = Field("", description="Its model's name there.")
    api_key_env: str = may_change(
        "POLICY_API_KEY", description="Environment variable with the key."
    )
    api: DialectName = Field(
        "vllm",
        description="vllm: chat completions with every sampling field; openai: with OpenAI's own; "
        "gemini: as openai, without a seed; responses: the Responses API.",
    )
    max_in_flight: int = may_change(32, ge=1, description="Requests at once.")
    request_timeout_s: float = may_change(
        120.0,
        gt=0,
        description="Seconds for one attempt at a turn; with api vllm the least.",
    )
    max_attempts: int = may_change(6, ge=1, description="Attempts at one turn.")


class RolloutConfig(Config):
    """The number of episodes for each question."""

    n_agent: int = Field(
        1, ge=1, description="Episodes of a question: its group, where a row does not say."
    )
    online_budget: OnlineBudgetConfig = Field(
        default_factory=OnlineBudgetConfig,
        description="Episodes by the results so far. Of training alone.",
    )
    dynamic_sampling: int = Field(
        0,
        ge=0,
        description="How often, at most, further questions are sampled for an update in place of "
        "those whose episodes all earned the same.",
    )
    deterministic: bool = may_change(
        False,
        description="Sample the turns of all episodes in fixed batches, so that a run that was "
        "interrupted repeats them bit by bit; slower, since every turn waits for the slowest "
        "episode. Only if this process samples (generation.engine generate).",
    )
    deadline_s: float = may_change(
        600.0,
        gt=0,
        description="Seconds from a step's last turn on in which its rewards have to come; what "
        "comes later is dropped, and counted.",
    )

    @model_validator(mode="after")
    def _budget_has_room(self) -> RolloutConfig:
        online = self.online_budget
        if online.n_max is not None and not online.n_min <= self.n_agent <= online.n_max:
            raise ValueError(
                f"online_budget: n_agent {self.n_agent} is the mean of a question's episodes: it "
                f"has to be from n_min {online.n_min} to n_max {online.n_max}"
            )
        return self


class SearchConfig(RunConfig):
    """The config of a search run."""

    task: Literal["search"] = Field("search", description="What is learned.")
    data: SearchData = may_change(default_factory=SearchData, description="Questions.")
    retriever: RetrieverConfig = may_change(
        default_factory=RetrieverConfig, description="The pages."
    )
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="The model.")
    server: PolicyServerConfig = Field(
        default_factory=PolicyServerConfig, description="Or its server."
    )
    chat: ChatConfig = Field(default_factory=ChatConfig, description="Messages to text.")
    generation: TurnSamplingConfig = Field(
        default_factory=TurnSamplingConfig, description="How turns are sampled."
    )
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Episodes.")
    episode: EpisodeConfig = Field(default_factory=EpisodeConfig, description="What one may do.")
    answering: AnsweringConfig = Field(
        default_factory=AnsweringConfig, description="From evidence to a judged answer."
    )
    reward: SearchRewardConfig = Field(
        default_factory=SearchRewardConfig, description="What an episode earns."
    )
    rl: SearchRLConfig = Field(default_factory=SearchRLConfig, description="Update.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Evaluation.")
    stop: StopConfig = may_change(default_factory=StopConfig, description="Early ends.")
    misc: MiscConfig = Field(
        default_factory=lambda: MiscConfig(run_dir="runs/search"), description="The rest."
    )

    @model_validator(mode="after")
    def _deterministic_sampling_is_here(self) -> SearchConfig:
        if self.rollout.deterministic and self.generation.engine != "generate":
            raise ValueError(
                "rollout.deterministic: a vLLM server forms its batches itself. Set it to false, "
                "or generation.engine to generate"
            )
        return self

    @classmethod
    def of_run(cls, recorded: Mapping[str, Any]) -> SearchConfig:
        """Return the recorded config; earlier versions always sent the images as shown."""
        answering = dict(recorded.get("answering") or {})
        answering["generator"] = {"images": "shown"} | (answering.get("generator") or {})
        return cls.model_validate({**recorded, "answering": answering})

    @property
    def original_pixels(self) -> int | None:
        """Return the max area of the originals that are stored; None if nobody needs them."""
        generator = self.answering.generator
        needs_originals = self.reward.weights["judge"] and generator.images == "original"
        return generator.max_pixels if needs_originals else None

    @property
    def sources(self) -> dict[str, str | None]:
        """Return the paths that a run reads by config key."""
        return super().sources | {"chat.template": self.chat.template}

    def eval_generation(self) -> TurnSamplingConfig:
        """Return the sampling settings for evaluation."""
        return self.eval.sampling(self.generation)
