"""The endpoint of MetricX, xCOMET and the judge: samples in, a finite score for each out.

It also checks the values in the second cache tier, before they are used in an answer. Without a
secret, other programs can write any value there. A wrong score cannot be detected, but a value that
no model of this service can produce is never returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any

from pydantic import BaseModel, FailFast, Field, ValidationError
from pydantic_core import from_json, to_json

from scorekit.errors import SampleError, UserError
from scorekit.schemas import (
    ErrorSpan,
    Info,
    JudgeResponse,
    JudgeSample,
    JudgeScored,
    ModelRef,
    Options,
    Priority,
    Scored,
    ScoreOptions,
    ScoreRange,
    ScoreResponse,
    TaskInfo,
    TranslationSample,
    Wanted,
    Window,
    Wire,
)
from scorekit.server.endpoint import (
    Answer,
    Endpoint,
    Line,
    ModelDescription,
    ParsedRequest,
    body_parts,
    line_json,
    text_error,
)
from scorekit.text.windows import REVISION


@dataclass(slots=True, kw_only=True)
class ScoreDescription(ModelDescription):
    """The description of a backend that scores.

    inputs: of a translation metric.

    tasks: of a judge whose tasks have other score ranges or directions."""

    score_range: ScoreRange
    higher_is_better: bool
    inputs: dict[str, Wanted] | None = None
    tasks: dict[str, TaskInfo] | None = None


class ScoreEndpoint(Endpoint):
    """`POST /v1/score` and its stream, for samples and options of these types.

    The backend's description is a `ScoreDescription`."""

    path = "/v1/score"
    about = "Score samples; result k answers sample k. A bad sample fails beside its siblings."
    name, done_label = "score", "scored"
    field, items = "samples", "samples"
    streams = True
    info_type: type[Info] = Info

    def __init__(self, sample_type: type[Wire], options_type: type[Options]) -> None:
        self.sample_type = sample_type
        self.options_type = options_type
        is_judge = issubclass(sample_type, JudgeSample)
        self.response_type = JudgeResponse if is_judge else ScoreResponse
        if is_judge or issubclass(sample_type, TranslationSample):
            self.page = "judge" if is_judge else "translations"
        if issubclass(sample_type, TranslationSample):
            self.cut_texts = ("src", "mt", "ref")
        self._texts_of = _texts_of(sample_type)

    def request_type(self, max_items: int) -> type[BaseModel]:
        """Return the request model: samples, options, priority and a timeout."""
        return score_request(self.sample_type, self.options_type, max_items)

    def parse_request(self, request: Any, description: ModelDescription) -> ParsedRequest:
        """Parse a request. Raises UserError if its length limit exceeds the model's.

        An empty reference becomes None, unless an option makes it a text: a backend reads "" as
        one.
        """
        options = resolve_options(request.options, description)
        is_text = getattr(options, "empty_ref", "none") == "text"
        if issubclass(self.sample_type, TranslationSample) and not is_text:
            for sample in request.samples:  # in place, as the options
                sample.ref = sample.ref or None
        key = options.model_dump(exclude={"cache"})
        if key.get("overlong") == "windows":
            key["windows"] = REVISION
        return ParsedRequest(
            request.samples, options, key, options.cache, request.priority, request.timeout_s
        )

    def default_options(self, description: ModelDescription) -> Any:
        """Return the default options."""
        return resolve_options(self.options_type(), description)

    def item_error(self, item: Any, max_chars: int) -> SampleError | None:
        """Return the error of a text that is too long, or that no model should get."""
        return text_error(item, max_chars)

    def cache_content(self, item: Any) -> Any:
        """Return the texts of the sample."""
        return self._texts_of(item)

    def outcome_error(self, fields: dict[str, Any]) -> SampleError | None:
        """Return the error of a score that is not finite."""
        score = fields["score"]
        if math.isfinite(score):
            return None
        return SampleError("non_finite", f"the model's score is {score}")

    def is_valid_cached(
        self, value: bytes, item: Any, options: Any, description: ModelDescription
    ) -> bool:
        """Check types, fields, the range of the score, and spans that lie in `mt`."""
        assert isinstance(description, ScoreDescription)
        task = (description.tasks or {}).get(getattr(item, "task", ""))
        return could_be_answer(
            value, item, options, task.score_range if task else description.score_range
        )

    def render_response(
        self, request: Any, answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
    ) -> Iterator[bytes]:
        """Yield the results; failed samples are beside good ones."""
        return body_parts([sample.id for sample in request.samples], answers, cached, model)

    def lines(self, request: Any) -> Line:
        """Return the function that serializes a result with its index."""
        # The samples are not kept: a stream may be read slowly.
        ids = [sample.id for sample in request.samples]
        return lambda index, answer, cached: line_json(index, ids[index], answer, cached)

    def info(self, common: dict[str, Any], description: ModelDescription) -> Info:
        """Return the common fields with the range of the score, its direction and its inputs."""
        assert isinstance(description, ScoreDescription)
        return Info(
            **common,
            score_range=description.score_range,
            higher_is_better=description.higher_is_better,
            inputs=description.inputs,
            tasks=description.tasks,
        )


def score_request(
    sample_type: type[Wire], options_type: type[Options], max_samples: int
) -> type[Wire]:
    """Return the request type of a service with samples and options of these types."""

    class ScoreRequest(Wire):
        # FailFast: an invalid body must not cost a list of all its errors.
        samples: Annotated[list[sample_type], FailFast()] = Field(  # type: ignore[valid-type]
            min_length=1, max_length=max_samples
        )
        options: options_type = Field(default_factory=options_type)  # type: ignore[valid-type]
        priority: Priority = Field(
            "interactive", description="`interactive` is scored before `bulk`."
        )
        timeout_s: float | None = Field(
            None, gt=0, le=86400, description="Seconds until an answer is due; null: the service's."
        )

    return ScoreRequest


def resolve_options(options: Any, description: ModelDescription) -> Any:
    """Return options with the defaults of the model. Raises UserError over its limit."""
    if not isinstance(options, ScoreOptions):  # only these have a length limit
        return options
    model_limit = description.max_input_length
    max_length = options.max_input_length
    if max_length is not None and max_length > model_limit:
        raise UserError(f"options.max_input_length: {max_length}, the model reads {model_limit}")
    if max_length is None:  # in place: the options belong to this request, and a copy takes 3 us
        options.max_input_length = model_limit
    return options


def _texts_of(sample_type: type[Wire]) -> Callable[[Any], Any]:
    """Return a function that extracts all of a sample that its score may depend on."""
    # A fixed list of fields gives unambiguous JSON. No metric of scorekit reads the languages.
    unread = {"id", "src_lang", "tgt_lang"} if sample_type is TranslationSample else {"id"}
    fields = attrgetter(*(name for name in sample_type.model_fields if name not in unread))
    if sample_type.model_config.get("extra") != "allow":
        return fields
    return lambda sample: (fields(sample), sorted(sample.model_extra.items()))


#: Far above the largest answer, which has a hundred spans that quote a long text.
MAX_VALUE_BYTES = 2**20
#: Severities of spans from our services.
_SEVERITIES = frozenset({"MINOR", "MAJOR", "CRITICAL"})
#: Fields that the service adds to each answer.
_SERVICE_FIELDS = {"id": None, "ok": True, "cached": False}


def read_value(value: bytes) -> dict[str, Any] | None:
    """Return the fields of a cached result, or None if it is invalid.

    A valid result is a JSON object with a finite score and without the fields that the service
    adds. It must be serialized exactly as we do it, because answers contain it unchanged: without
    duplicate names or line ends."""
    if len(value) > MAX_VALUE_BYTES or not value.startswith(b"{"):
        return None
    try:
        fields: dict[str, Any] = from_json(value, allow_inf_nan=False)
        score: Any = fields.get("score")
        is_finite = type(score) in (int, float) and math.isfinite(score)
        if not is_finite or _SERVICE_FIELDS.keys() & fields.keys() or to_json(fields) != value:
            return None
    except (ValueError, OverflowError):
        return None
    return fields


def could_be_answer(value: bytes, sample: Any, options: Any, scores: ScoreRange) -> bool:
    """Return True if a service could have given this value for this sample.

    Checks types, fields, the range of the score, and that all spans are inside the texts."""
    fields = read_value(value)
    if fields is None:
        return False
    judge = isinstance(sample, JudgeSample)
    # A verdict has a score of at most 1. A task with another range has spans.
    answer_type = JudgeScored if judge and scores.max == 1.0 else Scored
    try:
        answer = answer_type.model_validate(fields | _SERVICE_FIELDS)
    except ValidationError:
        return False
    min_score = -math.inf if scores.min is None else scores.min
    max_score = math.inf if scores.max is None else scores.max
    returned = answer.model_dump(exclude=set(_SERVICE_FIELDS), exclude_unset=True)
    # A name that is not ours, at any depth.
    if returned != fields or not min_score <= answer.score <= max_score:
        return False
    if isinstance(answer, JudgeScored):
        return True
    # The texts of a judge's sample depend on the rubric; `mqm` has src and mt, too.
    texts = (sample.model_extra or {}) if judge else sample.__dict__
    src, mt = texts.get("src"), texts.get("mt")
    exact = getattr(options, "span_offsets", "exact") == "exact"
    return (
        isinstance(src, str)
        and isinstance(mt, str)
        and answer.tokens >= 0
        and 0 <= answer.mt_covered <= len(mt)
        and _lie_in(mt, answer.error_spans or (), exact)
        and _lie_in(src, answer.omissions or (), exact)
        and (judge or all(span.confidence is not None for span in answer.error_spans or ()))
        and all(_is_part(window, src, mt) for window in answer.windows or ())
    )


def _is_part(window: Window, src: str, mt: str) -> bool:
    return (
        0 <= window.src_start <= window.src_end <= len(src)
        and 0 <= window.mt_start <= window.mt_end <= len(mt)
        and math.isfinite(window.score)
    )


def _lie_in(mt: str, spans: Sequence[ErrorSpan], exact: bool) -> bool:
    """Return True if all spans are complete and inside the text.

    Exact spans must also be ordered, disjoint, and quote the text."""
    end = 0
    for span in spans:
        if span.severity not in _SEVERITIES or span.text is None:
            return False
        if not (0 <= span.start <= len(mt) and 0 <= span.end <= len(mt)):
            return False
        if exact and not (end <= span.start < span.end and mt[span.start : span.end] == span.text):
            return False
        if span.confidence is not None and not 0.0 <= span.confidence <= 1.0:
            return False
        end = span.end
    return True
