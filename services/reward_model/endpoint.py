"""The endpoint of a reward model: conversations, texts or translations in, a number each out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from scorekit.errors import SampleError
from scorekit.schemas import (
    ModelRef,
    RewardInfo,
    RewardOptions,
    RewardResponse,
    RewardSample,
    RewardScored,
)
from scorekit.server.endpoint import (
    Answer,
    Endpoint,
    ModelDescription,
    ParsedRequest,
    find_text_problem,
    text_error,
)
from scorekit.server.openai_routes import (
    RerankResponse,
    add_models_route,
    check_model,
    good_answers,
    rerank_body,
    rerank_request,
)
from scorekit.server.score_endpoint import ScoreDescription, ScoreEndpoint, read_value

if TYPE_CHECKING:
    from fastapi import FastAPI

#: Roles that a message may have. A template drops the turn of another one in silence.
ROLES = ("system", "user", "assistant", "tool")
_FORMS = "a sample has messages, or text (and pair), or src and mt"
_LATE = SampleError("timeout", "not scored in time")
_OF_PROMPT = ("ref", "src_lang", "tgt_lang")


@dataclass(slots=True, kw_only=True)
class RewardDescription(ScoreDescription):
    """Describes a reward model.

    weights: of its labels in the score, in the model's order.

    prompt: what `src` and `mt` are put into."""

    weights: Mapping[str, float]
    has_chat_template: bool
    takes_pairs: bool
    prompt: str


class RewardEndpoint(ScoreEndpoint):
    """`POST /v1/score` and its stream. The backend's description is a `RewardDescription`; its
    outcomes hold `labels`, the model's outputs by name, and `score`, their weighted sum."""

    info_type = RewardInfo

    def __init__(self, *compat_endpoints: Endpoint) -> None:
        super().__init__(RewardSample, RewardOptions)
        self.compat_endpoints = compat_endpoints
        self.response_type = RewardResponse
        self.page = "reward"
        self.cut_texts = ("src", "mt")

    def default_options(self, description: ModelDescription) -> RewardOptions:
        """Return options with which a text of any length gets a score."""
        return RewardOptions(overlong="truncate")

    def item_error(self, item: RewardSample, max_chars: int) -> SampleError | None:
        """Return the error of a sample of no form, or with a text that no model should get."""
        if problem := _form_problem(item):
            return SampleError("invalid_input", problem)
        for index, message in enumerate(item.messages or ()):
            if message.role not in ROLES:
                valid_roles = ", ".join(ROLES)
                problem = f"messages.{index}.role: unknown; there are {valid_roles}"
                return SampleError("invalid_input", problem)
            if problem := find_text_problem(message.content, max_chars):
                return SampleError("invalid_input", f"messages.{index}: {problem}")
        return text_error(item, max_chars)

    def outcome_error(self, fields: dict[str, Any]) -> SampleError | None:
        """Return the error of an output, or of their sum, that is not finite."""
        for name, value in fields["labels"].items():
            if not math.isfinite(value):
                return SampleError("non_finite", f"the model's output for {name} is {value}")
        return super().outcome_error(fields)

    def is_valid_cached(
        self, value: bytes, item: Any, options: Any, description: ModelDescription
    ) -> bool:
        """Check types and fields, and that the score is the weighted sum of the model's labels."""
        assert isinstance(description, RewardDescription)
        fields = read_value(value)
        if fields is None:
            return False
        try:
            added = {"id": None, "ok": True, "cached": False}
            answer = RewardScored.model_validate(fields | added)
        except ValidationError:
            return False
        return (
            answer.model_dump(exclude=set(added), exclude_unset=True) == fields
            and answer.labels.keys() == description.weights.keys()
            and answer.score == weighted_sum(answer.labels, description.weights)
            and answer.tokens >= 0
            and answer.mt_covered >= 0
        )

    def add_routes(self, app: FastAPI) -> None:
        """Add `GET /v1/models`."""
        add_models_route(app)

    def info(self, common: dict[str, Any], description: ModelDescription) -> RewardInfo:
        """Return the model's info, with its labels and the samples that it takes."""
        assert isinstance(description, RewardDescription)
        return RewardInfo(
            **common,
            score_range=description.score_range,
            higher_is_better=description.higher_is_better,
            inputs=description.inputs,
            labels=dict(description.weights),
            has_chat_template=description.has_chat_template,
            takes_pairs=description.takes_pairs,
            prompt=description.prompt,
        )


class RewardRerankEndpoint(RewardEndpoint):
    """`POST /v1/rerank`: documents in the order of their scores as answers to the query."""

    path = "/v1/rerank"
    about = "Order documents by the model's score of query and document, as `src` and `mt`."
    name, field, items = "rerank", "documents", "documents"
    streams = False

    def __init__(self) -> None:
        super().__init__()
        self.response_type = RerankResponse
        self._descending = True

    def request_type(self, max_items: int) -> type[BaseModel]:
        """Return the form of Jina, Cohere and vLLM."""
        return rerank_request(max_items)

    def parse_request(self, request: Any, description: ModelDescription) -> ParsedRequest:
        """Parse a request: a sample for each document."""
        check_model(request.model, description)
        options = RewardOptions(overlong="truncate" if request.truncate else "error")
        samples = [RewardSample(src=request.query, mt=text) for text in request.documents]
        assert isinstance(description, RewardDescription)
        self._descending = description.higher_is_better  # one service has one model
        return ParsedRequest(samples, options, options.model_dump(exclude={"cache"}))

    def render_response(
        self, request: Any, answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
    ) -> Iterator[bytes]:
        """Yield the body. Raises RequestError if a document has no score."""
        read = [from_json(answer) for answer in good_answers("documents", answers, _LATE)]
        scores = [answer["score"] for answer in read]
        tokens = sum(answer["tokens"] for answer in read)
        return rerank_body(request, scores, tokens, model.id, descending=self._descending)

    def add_routes(self, app: FastAPI) -> None:
        """Add nothing: the first endpoint does."""


def weighted_sum(labels: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the score; a label of weight 0 is none of it. NaN if it overflows."""
    try:
        return math.fsum(weight * labels[name] for name, weight in weights.items() if weight)
    except (OverflowError, ValueError):  # ValueError: inf - inf
        return math.nan


def _form_problem(sample: RewardSample) -> str | None:
    """Return why a sample has none of the forms, or several; None if it has one."""
    has = {name for name in RewardSample.model_fields if getattr(sample, name) is not None} - {"id"}
    forms = has & {"messages", "text", "src"}
    if len(forms) != 1:
        return f"{_FORMS}; here are {' and '.join(sorted(forms)) or 'none of them'}"
    if sample.messages is not None and not sample.messages:
        return "messages: there are none"
    (form,) = forms
    allowed = {"messages": (), "text": ("pair",), "src": ("mt", *_OF_PROMPT)}[form]
    if unused := sorted(has - {form, *allowed}):
        return f"{unused[0]}: not beside {form}; {_FORMS}"
    return "mt: missing beside src" if form == "src" and sample.mt is None else None
