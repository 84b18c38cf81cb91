"""Routes that clients of other servers ask for: `GET /v1/models`, and the form of `POST
/v1/rerank`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, BeforeValidator, FailFast, Field
from pydantic_core import to_json

from scorekit.errors import TEXT_ERROR_TYPES, RequestError, SampleError, UserError
from scorekit.schemas import ErrorResponse, Wire, WireAnswer, as_integer
from scorekit.server.endpoint import Answer, ModelDescription

#: Most errors that the message of a refused request names.
_MAX_LISTED_ERRORS = 10


class ServedModel(WireAnswer):
    """The model of this service, as OpenAI's API lists it."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "scorekit"
    max_model_len: int = Field(description="Longest input in tokens, as vLLM tells it.")


class ModelList(WireAnswer):
    """The answer to `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ServedModel]


def add_models_route(app: FastAPI) -> None:
    """Add `GET /v1/models`, with the one model of the service."""

    @app.get("/v1/models", response_model=ModelList, responses={503: {"model": ErrorResponse}})
    async def models() -> ModelList:
        """The model that is served, as OpenAI's API lists it."""
        service = app.state.service
        if not service.loaded:
            raise RequestError("unavailable", "the model is loading", retry_after=5.0)
        description = service.description
        model = ServedModel(id=description.model, max_model_len=description.max_input_length)
        return ModelList(data=[model])


def check_model(name: str | None, description: ModelDescription) -> None:
    """Raise UserError if a request names another model; the last part of a name is enough."""
    if name and _last_part(name) != _last_part(description.model):
        raise UserError(f"model: another one is asked for; here is {description.model}")


def _last_part(name: str) -> str:
    """Return the last part of a model's name: `name` of `owner/name` or of a path."""
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


class RankedDocument(WireAnswer):
    """A document, where its text is asked for."""

    text: str


class Ranked(WireAnswer):
    """A document's place: `index` is that in the request."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankUsage(WireAnswer):
    """Tokens that the model read."""

    total_tokens: int


class RerankResponse(WireAnswer):
    """The answer to `POST /v1/rerank`: the best document is the first."""

    model: str
    results: list[Ranked]
    usage: RerankUsage


class DocumentToRank(Wire):
    """A document as some clients of Jina and Cohere send it."""

    text: str = Field(min_length=1)


def _text_of(document: Any) -> Any:
    """Return the text of a document with nothing but a text; anything else as it is."""
    is_object = isinstance(document, dict) and document.keys() == {"text"}
    return document["text"] if is_object else document


_Document = Annotated[
    str,
    Field(min_length=1),
    BeforeValidator(
        _text_of, json_schema_input_type=Annotated[str, Field(min_length=1)] | DocumentToRank
    ),
]


def rerank_request(max_items: int) -> type[BaseModel]:
    """Return the type of a request of Jina, Cohere and vLLM with at most so many documents."""

    class RerankRequest(Wire):
        query: str = Field(min_length=1)
        documents: Annotated[list[_Document], FailFast()] = Field(
            min_length=1, max_length=max_items
        )
        model: str | None = Field(None, description="Name of the model; another one is refused.")
        top_n: Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(as_integer)] = Field(
            None, description="Most documents; null: all."
        )
        return_documents: bool = False
        truncate: bool = Field(
            False, description="Cut a text that is too long; else it fails the request."
        )

    return RerankRequest


def rerank_body(
    request: Any, scores: Sequence[float], tokens: int, model: str, *, descending: bool = True
) -> Iterator[bytes]:
    """Yield the answer.

    scores: of the documents. Equal ones keep their order.
    """
    sign = -1 if descending else 1
    order = sorted(range(len(scores)), key=lambda index: sign * scores[index])
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": request.documents[index]}} if request.return_documents else {})
        for index in order[: request.top_n]
    ]
    yield to_json({"model": model, "results": results, "usage": {"total_tokens": tokens}})


def good_answers(
    field: str, answers: Sequence[Answer | None], late: SampleError, first_field: str | None = None
) -> list[bytes]:
    """Return the answers if all are good. Raises the RequestError of a request that has no place
    for the error of an item.

    field: the list in the request whose items they are of.
    first_field: what the first one is of, if that stands outside the list.
    """
    errors = {k: a or late for k, a in enumerate(answers) if not isinstance(a, bytes)}
    if errors:
        fields = [f"{field}.{index}" for index in range(len(answers))]
        if first_field is not None:
            fields = [first_field, *fields]
        raise _request_error({fields[index]: error for index, error in errors.items()})
    return [answer for answer in answers if isinstance(answer, bytes)]


def _request_error(errors: Mapping[str, SampleError]) -> RequestError:
    """Return the error of a failed request. Invalid texts come first: a retry cannot help them.

    errors: by the name of the field.
    """
    types = {error.type for error in errors.values()}
    error_type = "internal" if types - {"timeout"} else "timeout"
    if types & TEXT_ERROR_TYPES:
        error_type = "invalid_request"
        errors = {k: error for k, error in errors.items() if error.type in TEXT_ERROR_TYPES}
    listed = [f"{name}: {error}" for name, error in list(errors.items())[:_MAX_LISTED_ERRORS]]
    more = "; and more" if len(errors) > _MAX_LISTED_ERRORS else ""
    return RequestError(error_type, "; ".join(listed) + more)
