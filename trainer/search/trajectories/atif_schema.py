"""ATIF v1.8, the Agent Trajectory Interchange Format of Harbor (RFC 0001): what we write of it.

Models of our own, since Harbor wants a later Python than ours. A field that we never write is left
out; what a writer may not do is refused here as a reader would refuse it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

VERSION: Literal["ATIF-v1.8"] = "ATIF-v1.8"


class AtifModel(BaseModel):
    """Base of all: an unknown key is an error, no number is NaN or infinite."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class AtifImage(AtifModel):
    """Where a picture lies, from the file's own folder."""

    media_type: Literal["image/png"] = "image/png"
    path: str


class AtifPart(AtifModel):
    """A text or a picture."""

    type: Literal["text", "image"]
    text: str | None = None
    source: AtifImage | None = None

    @model_validator(mode="after")
    def _is_one_of_them(self) -> AtifPart:
        if (self.type == "text", self.type == "image") != (
            self.text is not None,
            self.source is not None,
        ):
            raise ValueError("a text has text alone, an image has source alone")
        return self


class AtifToolCall(AtifModel):
    """An action."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class AtifResult(AtifModel):
    """What came of it. source_call_id: None where the turn was no action."""

    source_call_id: str | None = None
    content: list[AtifPart]
    extra: dict[str, Any] | None = None


class AtifObservation(AtifModel):
    """What a turn was told."""

    results: list[AtifResult]


class AtifMetrics(AtifModel):
    """Tokens of a turn. Its ids are the sampled ones, and those that stood before them."""

    completion_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    extra: dict[str, Any] | None = None


class AtifStep(AtifModel):
    """A turn. llm_call_count: 0 of one that no model wrote."""

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
    """Who acted."""

    name: str
    version: str
    model_name: str | None = None


class AtifFinalMetrics(AtifModel):
    """Of the whole. extra: reward, judge and NDCG, for which the format has no place."""

    total_completion_tokens: int | None = None
    total_steps: int = Field(ge=0)
    extra: dict[str, Any]


class AtifTrajectory(AtifModel):
    """A file."""

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
