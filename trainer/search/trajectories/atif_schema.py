"""Models of ATIF v1.8, the Agent Trajectory Interchange Format of Harbor (RFC 0001).

Harbor's models require a later Python version. Fields that we never write are left out. The models
refuse what a reader would refuse.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

VERSION: Literal["ATIF-v1.8"] = "ATIF-v1.8"


class AtifModel(BaseModel):
    """The base of all models. An unknown key, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class AtifImage(AtifModel):
    """The path of an image relative to the folder of the file."""

    media_type: Literal["image/png"] = "image/png"
    path: str


class AtifPart(AtifModel):
    """A text or an image."""

    type: Literal["text", "image"]
    text: str | None = None
    source: AtifImage | None = None

    @model_validator(mode="after")
    def _is_one_of_them(self) -> AtifPart:
        if (self.type == "text", self.type == "image") != (
            self.text is not None,
            self.source is not None,
        ):
            raise ValueError("a text part requires only text, an image part only source")
        return self


class AtifToolCall(AtifModel):
    """A tool call: the action of a turn."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class AtifResult(AtifModel):
    """The result of a tool call. source_call_id: None for an invalid action."""

    source_call_id: str | None = None
    content: list[AtifPart]
    extra: dict[str, Any] | None = None


class AtifObservation(AtifModel):
    """The observation of a turn."""

    results: list[AtifResult]


class AtifMetrics(AtifModel):
    """The tokens of a turn: its sampled ids and the ids before them."""

    completion_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    extra: dict[str, Any] | None = None


class AtifStep(AtifModel):
    """A turn. llm_call_count: 0 for a forced turn."""

    step_id: int = Field(ge=1)
    source: Literal["user", "agent"]
    message: str
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    llm_call_count: int | None = Field(None, ge=0)
    extra: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_what_its_source_may_have(self) -> AtifStep:
        if self.source == "user" and (self.reasoning_content or self.tool_calls or self.metrics):
            raise ValueError("only an agent thinks, calls tools and has metrics")
        if self.llm_call_count == 0 and (self.metrics or self.reasoning_content):
            raise ValueError("without a call of a model there are no metrics and no reasoning")
        calls = {call.tool_call_id for call in self.tool_calls or []}
        results = self.observation.results if self.observation else []
        if any(result.source_call_id not in {None, *calls} for result in results):
            raise ValueError("a result of a call that the step does not make")
        return self


class AtifAgent(AtifModel):
    """The policy of the episode."""

    name: str
    version: str
    model_name: str | None = None


class AtifFinalMetrics(AtifModel):
    """The metrics of the episode. extra: reward, judge and NDCG, which have no field."""

    total_completion_tokens: int | None = None
    total_steps: int = Field(ge=0)
    extra: dict[str, Any]


class AtifTrajectory(AtifModel):
    """The content of a file."""

    schema_version: Literal["ATIF-v1.8"] = VERSION
    session_id: str
    trajectory_id: str
    agent: AtifAgent
    steps: list[AtifStep] = Field(min_length=1)
    notes: str
    final_metrics: AtifFinalMetrics
    extra: dict[str, Any]

    @model_validator(mode="after")
    def _steps_are_counted(self) -> AtifTrajectory:
        if [step.step_id for step in self.steps] != list(range(1, len(self.steps) + 1)):
            raise ValueError("step_id: 1, 2, 3, ...")
        return self
