"""The wire types of every service: what a caller sends and what it gets back.

docs/reference/protocol.md describes them in words. An unknown field of a request is refused, so
that a misspelled option is never ignored in silence. An unknown field of an answer is ignored, so
that a service may add fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    model_validator,
)

#: Part of every cache key: raise it when the meaning of a stored answer changes.
SCHEMA_VERSION = 2

#: Largest number of images of a judge's sample.
MAX_JUDGED_IMAGES = 32

#: Largest number of answers of the judge's LLM about one sample.
MAX_VOTES = 9

#: The severities of scorekit's services. Another service may use other words.
Severity = Literal["MINOR", "MAJOR", "CRITICAL"]
Priority = Literal["interactive", "bulk"]
Overlong = Literal["truncate", "error", "windows"]
#: How a scorer uses a text of a sample.
Wanted = Literal["required", "optional", "ignored"]


class Wire(BaseModel):
    """Base of what a caller sends: unknown fields, NaN and infinities are refused; no coercion."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class WireAnswer(Wire):
    """Base of what a service answers: a client ignores fields that a newer service adds."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)


def _capitals(value: Any) -> Any:
    return value.strip().upper() if isinstance(value, str) else value


def as_integer(value: Any) -> Any:
    """Return an integral float as int: JSON has no integers, and some callers write 512.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: A code, a tag or an English name.
Language = Annotated[str | None, BeforeValidator(lambda value: None if value == "" else value)]


class TranslationSample(Wire):
    """One translation to score. Without `ref` (absent, null or "") it is quality estimation."""

    id: str | None = Field(None, description="The caller's name for the sample; echoed.")
    src: str = Field(description="Source text.")
    mt: str = Field(description="Translation to be scored; may be empty.")
    ref: str | None = Field(
        None, description="Reference translation; absent, null or empty: quality estimation."
    )
    src_lang: Language = Field(None, description="Language of `src`, for scorers that ask for it.")
    tgt_lang: Language = Field(None, description="Language of `mt`, for scorers that ask for it.")


class JudgeSample(Wire):
    """One thing to judge: the task, the texts that its rubric names (`candidate`, ...), and
    pictures where the rubric wants some."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, str] = Field(init=False)

    id: str | None = Field(None, description="The caller's name for the sample; echoed.")
    task: str = Field(description="Name of the rubric: translation_filter, answer_correctness, ...")
    images: list[str] = Field(
        default_factory=list,
        max_length=MAX_JUDGED_IMAGES,
        description="Pictures in base64 (PNG, JPEG or WebP), of tasks whose rubric wants some.",
    )


class ChatMessage(Wire):
    """A turn of a conversation, for the chat template of a reward model."""

    role: str = Field(description="system, user, assistant or tool.")
    content: str


class RewardSample(Wire):
    """A sample of a reward model: a conversation, or one text or two, or a translation.

    Of a translation `src` and `mt` are put into the service's prompt: a user's turn and the
    assistant's, if it has no other."""

    id: str | None = Field(None, description="The caller's name for the sample; echoed.")
    messages: list[ChatMessage] | None = Field(
        None, description="A conversation; the model's own chat template makes it one text."
    )
    text: str | None = Field(None, description="One text, or the first of two.")
    pair: str | None = Field(None, description="The second of two texts.")
    src: str | None = Field(None, description="The source, or the prompt that `mt` answers.")
    mt: str | None = Field(None, description="The translation, or the answer to `src`.")
    ref: str | None = Field(None, description="The reference, for prompts that have it.")
    src_lang: Language = Field(None, description="Language of `src`, for prompts that have it.")
    tgt_lang: Language = Field(None, description="Language of `mt`, for prompts that have it.")


class Options(Wire):
    """Options that every service knows."""

    cache: bool = Field(True, description="Read and write the service's score cache.")


class ScoreOptions(Options):
    """Options of the services that score translations."""

    overlong: Overlong = Field(
        "truncate",
        description="What to do with an input longer than `max_input_length` tokens: cut it and "
        "flag the result as truncated, fail that sample with type `overlong`, or score it in "
        "windows of sentences (the answer tells them; upstream has no such number).",
    )
    max_input_length: Annotated[
        Annotated[int, Field(ge=16)] | None, BeforeValidator(as_integer)
    ] = Field(None, description="Limit in tokens, up to the model's own; null: the model's own.")


class MetricXOptions(ScoreOptions):
    """Options of the MetricX service."""


class XCometOptions(ScoreOptions):
    """Options of the xCOMET service."""

    span_offsets: Literal["exact", "upstream"] = Field(
        "exact",
        description="`exact`: repaired spans, mt[start:end] == text. `upstream`: the raw spans of "
        "unbabel-comet, with its leading spaces and lost spans.",
    )
    empty_ref: Literal["none", "text"] = Field(
        "none", description='What `ref: ""` is: none, or a text, as unbabel-comet reads it.'
    )

    @model_validator(mode="after")
    def _upstream_knows_no_windows(self) -> Self:
        if self.overlong == "windows" and self.span_offsets == "upstream":
            raise ValueError("overlong windows: upstream has none, span_offsets must be exact")
        return self


class RewardOptions(Options):
    """Options of the reward model."""

    overlong: Literal["error", "truncate"] = Field(
        "error",
        description="What to do with an input longer than the model's limit: fail that sample with "
        "type `overlong`, or cut its end as the model's tokenizer does, and say so in the result.",
    )


class JudgeOptions(Options):
    """Options of the judge; the back end `rules` reads none of the sampling's."""

    model: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="Name of the model at the upstream server; null: the service's own.",
    )
    temperature: float | None = Field(None, ge=0, le=2, description="null: the rubric's.")
    max_tokens: Annotated[
        Annotated[int, Field(ge=1, le=32768)] | None, BeforeValidator(as_integer)
    ] = Field(None, description="Most tokens of an answer; null: the rubric's.")
    votes: Annotated[
        Annotated[int, Field(ge=1, le=MAX_VOTES)] | None, BeforeValidator(as_integer)
    ] = Field(None, description="mqm: answers, of which more than half decide; null: the service's")


class ErrorSpan(WireAnswer):
    """A stretch of `mt` that the model marks as an error, or of `src` that `mt` leaves out."""

    start: int = Field(description="First character, in Unicode code points.")
    end: int = Field(description="One past the last character.")
    severity: Annotated[str, BeforeValidator(_capitals)] = Field(
        min_length=1,
        max_length=40,
        description="MINOR, MAJOR or CRITICAL, or another word of another service, in capitals.",
    )
    confidence: float | None = Field(
        None, description="Mean probability of the predicted labels, 0..1; null: not known."
    )
    text: str | None = Field(
        None, description="With exact offsets, `mt[start:end]`; null: not given."
    )
    category: str | None = Field(
        None, max_length=80, description="Kind of error (accuracy/mistranslation); null: not given."
    )


class UnplacedError(WireAnswer):
    """An error whose quote stands nowhere, or in several places: it has no offsets."""

    quote: str = Field(max_length=2000, description="As the model wrote it.")
    of: Literal["src", "mt"] = Field(description="The text that it was to be quoted from.")
    reason: Literal["absent", "ambiguous"] = Field(
        description="The quote is not in the text, or is there more than once."
    )
    severity: Annotated[str, BeforeValidator(_capitals)] = Field(min_length=1, max_length=40)
    category: str | None = Field(None, max_length=80)


class Window(WireAnswer):
    """A part of a long sample: `src[src_start:src_end]` beside `mt[mt_start:mt_end]`, in code
    points, ends exclusive. It was scored with the sentences around it that fitted besides."""

    src_start: int
    src_end: int
    mt_start: int
    mt_end: int
    score: float


class WireError(WireAnswer):
    """Why a sample or a request failed."""

    type: str
    message: str
    retryable: bool = Field(description="Whether the same request may succeed later.")


class Truncated(WireAnswer):
    """Which fields the model could not read to the end."""

    src: bool
    mt: bool
    ref: bool = False


class JudgeUsage(WireAnswer):
    """What the judge's model read and wrote for a sample, all its answers together."""

    prompt_tokens: int = Field(ge=0, le=2**50)
    completion_tokens: int = Field(ge=0, le=2**50)


UpstreamCalls = Annotated[
    int | None,
    Field(
        ge=0,
        le=2**50,
        description="Of a judge: answers of the upstream server for this sample, paid for whatever "
        "became of them; null: nobody was asked.",
    ),
]


class Scored(WireAnswer):
    """A sample that was scored."""

    id: str | None
    ok: Literal[True]
    score: float = Field(description="The model's own score, unchanged.")
    tokens: int = Field(description="Number of ids that the model read.")
    truncated: Truncated
    mt_covered: int = Field(description="Number of characters of `mt` that the model read.")
    cached: bool = Field(description="Whether the answer came from the cache.")
    error_spans: list[ErrorSpan] | None = Field(
        None, description="Errors in `mt`; null: the model marks none (MetricX)."
    )
    omissions: list[ErrorSpan] | None = Field(
        None, description="Stretches of `src` that `mt` leaves out; null: the model tells none."
    )
    unplaced: list[UnplacedError] | None = Field(
        None, description="Errors without offsets, counted in the score; null: the model has none."
    )
    windows: list[Window] | None = Field(
        None, description="The parts that were scored apart; null: the whole was scored at once."
    )
    usage: JudgeUsage | None = Field(
        None,
        description="Tokens at the upstream server when this was scored; null: none, or not "
        "counted there (see `upstream_calls`).",
    )
    upstream_calls: UpstreamCalls = None


class RewardScored(Scored):
    """A sample that a reward model scored. `truncated.mt`, `mt_covered` are about its last text."""

    labels: dict[str, float] = Field(
        description="The model's own output for each of its labels; `score` is their weighted sum."
    )


class Verdict(WireAnswer):
    """What a judge says of a sample."""

    model_config = ConfigDict(serialize_by_alias=True)

    passed: bool = Field(alias="pass")
    reason_code: str = Field(description="One word for why; the rubric's, or the rule's.")
    notes: str = Field(description="A few words for people.")


class JudgeScored(WireAnswer):
    """A sample that was judged."""

    id: str | None
    ok: Literal[True]
    score: float = Field(
        ge=0, le=1, description="0 to 1, as the rubric's score rule says; 1 is best."
    )
    verdict: Verdict
    cached: bool = Field(description="Whether the answer came from the cache.")
    usage: JudgeUsage | None = Field(
        None,
        description="Tokens at the upstream server when the verdict was made; null: none, or not "
        "counted there (see `upstream_calls`).",
    )
    upstream_calls: UpstreamCalls = None


class Failed(WireAnswer):
    """A sample that has no score."""

    id: str | None
    ok: Literal[False]
    error: WireError


class JudgeFailed(Failed):
    """A sample that a judge has no score of."""

    usage: JudgeUsage | None = Field(
        None,
        description="Tokens at the upstream server that were paid for all the same; null: none, or "
        "not counted there (see `upstream_calls`).",
    )
    upstream_calls: UpstreamCalls = None


ScoreResult = Annotated[Scored | Failed, Field(discriminator="ok")]
#: What any service can answer for one sample.
Result = Scored | JudgeScored | Failed


def _kind(result: Any) -> str:
    if isinstance(result, dict):
        return "judged" if "verdict" in result else "scored" if result.get("ok") else "failed"
    return "judged" if isinstance(result, JudgeScored) else "scored" if result.ok else "failed"


JudgeResult = Annotated[
    Annotated[Scored, Tag("scored")]
    | Annotated[JudgeScored, Tag("judged")]
    | Annotated[JudgeFailed, Tag("failed")],
    Discriminator(_kind),
]
RewardResult = Annotated[RewardScored | Failed, Field(discriminator="ok")]


def _any_kind(result: Any) -> str:
    is_reward = "labels" in result if isinstance(result, dict) else hasattr(result, "labels")
    return "reward" if is_reward else "other"


score_result = TypeAdapter[Result](
    Annotated[
        Annotated[RewardScored, Tag("reward")] | Annotated[JudgeResult, Tag("other")],
        Discriminator(_any_kind),
    ]
)


class ModelRef(WireAnswer):
    """Which model answered."""

    service: str
    id: str
    revision: str


class ScoreResponse(WireAnswer):
    """The answer to `POST /v1/score`: result k answers sample k."""

    model: ModelRef
    results: list[ScoreResult]


class JudgeResponse(WireAnswer):
    """The judge's answer to `POST /v1/score`: result k answers sample k. A task that finds errors
    in a translation (`mqm`) has spans in place of a verdict."""

    model: ModelRef
    results: list[JudgeResult]


class RewardResponse(WireAnswer):
    """A reward model's answer to `POST /v1/score`: result k answers sample k."""

    model: ModelRef
    results: list[RewardResult]


class ErrorResponse(WireAnswer):
    """The body of every refused request."""

    error: WireError


class ScoreRange(WireAnswer):
    """The values that a score can take; null where the model has no bound."""

    min: float | None
    max: float | None


class TaskInfo(WireAnswer):
    """What a judge's score means for one of its tasks."""

    score_range: ScoreRange
    higher_is_better: bool


class Info(WireAnswer):
    """The answer to `GET /v1/info`."""

    service: str
    model: str = Field(description="Hub id or folder name of the model.")
    revision: str = Field(description="Hub revision, or a digest of a local folder's files.")
    tokenizer: str
    dtype: str
    device: str
    max_input_length: int = Field(description="Longest input in tokens.")
    max_samples: int = Field(description="Most samples in one request.")
    max_body_bytes: int = Field(description="Largest request body in bytes.")
    score_range: ScoreRange
    higher_is_better: bool
    inputs: dict[str, Wanted] | None = Field(
        None, description="Of translation metrics: what is done with `src`, `mt` and `ref`."
    )
    tasks: dict[str, TaskInfo] | None = Field(
        None, description="Of the judge: what the score of each task means."
    )
    versions: dict[str, str | None] = Field(
        description="scorekit, torch, transformers, comet; null where not used."
    )
    commit: str | None = Field(description="Git commit of the running code, where it is known.")
    device_memory_bytes: int | None = Field(
        description="Memory that the model holds on its device now; null on a CPU."
    )
    matmul: str | None = Field(
        None,
        description="Who multiplies float32 matrices on a CPU: torch or onednn; null: no network.",
    )

    def higher_is_better_in(self, task: str | None) -> bool:
        """Return whether a higher score is better.

        task: of a judge.
        """
        return (self.tasks or {}).get(task or "", self).higher_is_better


class RewardInfo(Info):
    """The answer of a reward model to `GET /v1/info`."""

    labels: dict[str, float] = Field(
        description="The model's labels, in its order, and the weight of each in the score."
    )
    has_chat_template: bool = Field(description="Whether samples may have `messages`.")
    takes_pairs: bool = Field(description="Whether samples may have a `pair`.")
    prompt: str = Field(description="What `src` and `mt` are put into: messages, pair, or a file.")
