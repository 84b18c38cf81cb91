"""The embeddings endpoint: takes texts and returns one vector each, in OpenAI's format."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, BeforeValidator, FailFast, Field
from pydantic_core import to_json

from scorekit.errors import SampleError, UserError
from scorekit.schemas import ModelRef, Wire, WireAnswer
from scorekit.server.endpoint import (
    Answer,
    Endpoint,
    ModelDescription,
    ParsedRequest,
    find_text_problem,
    list_in_parts,
)
from scorekit.server.openai_routes import (
    RerankResponse,
    add_models_route,
    check_model,
    good_answers,
    rerank_body,
    rerank_request,
)
from services.embedder.settings import MAX_INPUTS

if TYPE_CHECKING:
    from fastapi import FastAPI

#: Header of a cached vector: the token count of its text, and whether the text was cut.
_HEADER = struct.Struct("<I?")
_LATE = SampleError("timeout", "not embedded in time")


class EmbeddingRow(WireAnswer):
    """The vector of text `index`."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(
        description="Numbers, or with `base64` their float32 bytes, little-endian."
    )


class EmbeddingUsage(WireAnswer):
    """Tokens that the model read, those that it adds to each text included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(WireAnswer):
    """The answer to `POST /v1/embeddings`: row k is of text k."""

    object: Literal["list"] = "list"
    data: list[EmbeddingRow]
    model: str
    usage: EmbeddingUsage
    truncated: list[int] = Field(
        default_factory=list, description="Indexes of the texts that were cut (`truncate`)."
    )


class EmbedderInfo(WireAnswer):
    """The embedder's answer to `GET /v1/info`."""

    service: str
    model: str = Field(description="Hub id or folder name of the model.")
    revision: str = Field(description="Hub revision (sha), or a digest of a local folder's files.")
    tokenizer: str
    dtype: str
    device: str
    max_input_length: int = Field(description="Longest text in tokens, added ones included.")
    max_samples: int = Field(description="Most texts in one request.")
    max_body_bytes: int = Field(description="Largest request body in bytes.")
    pooling: str = Field(description="How tokens become one vector: cls, mean, ...")
    dimension: int = Field(description="Numbers of a vector, whose length is 1.")
    prompts: list[str] = Field(description="Names that `prompt_name` may have.")
    default_prompt: str | None = Field(description="The one used where a request names none.")
    versions: dict[str, str | None] = Field(
        description="scorekit, torch, transformers, sentence-transformers."
    )
    commit: str | None = Field(description="Git commit of the running code, where it is known.")
    device_memory_bytes: int | None = Field(
        description="Memory that the model holds on its device now; null on a CPU."
    )
    matmul: str | None = Field(
        None,
        description="Who multiplies float32 matrices on a CPU: torch or onednn; null: no network.",
    )


@dataclass(slots=True, kw_only=True)
class EmbedderDescription(ModelDescription):
    """Describes an embedding model.

    prompts: text put before each input, by name.
    """

    pooling: str
    dimension: int
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


class EmbedOptions(NamedTuple):
    """Options of a request.

    prompt: text put before each input.
    """

    truncate: bool
    prompt: str


class EmbeddingsEndpoint(Endpoint):
    """`POST /v1/embeddings`. The backend's description is an `EmbedderDescription`; its outcomes
    hold `embedding`, float32 [D], and `tokens`."""

    path = "/v1/embeddings"
    about = "Embed texts; row k is the vector of text k. A text that fails fails the request."
    name, done_label = "embed", "embedded"
    field, items = "input", "texts"
    page = "embedder"
    cut_texts = ("input",)
    response_type: type[BaseModel] = EmbeddingsResponse
    info_type = EmbedderInfo

    def __init__(self, *compat_endpoints: Endpoint) -> None:
        self.compat_endpoints = compat_endpoints

    def request_type(self, max_items: int) -> type[BaseModel]:
        """Return OpenAI's request fields, and two more: `truncate`, `prompt_name`."""
        text = Annotated[str, Field(min_length=1)]
        limit = min(max_items, MAX_INPUTS)
        texts = Annotated[list[text], Field(min_length=1, max_length=limit)]

        class EmbeddingsRequest(Wire):
            input: Annotated[
                texts,
                FailFast(),
                BeforeValidator(_as_texts, json_schema_input_type=text | texts),
            ] = Field(description="A text, or a list of texts.")
            model: str | None = Field(
                None, description="Name of the model; another one than is served is refused."
            )
            encoding_format: Literal["float", "base64"] = "float"
            dimensions: int | None = Field(
                None, description="Numbers of a vector; the model's own, or the request is refused."
            )
            user: str | None = Field(None, description="Not read.")
            truncate: bool = Field(
                False, description="Cut a text that is too long; else it fails the request."
            )
            prompt_name: str | None = Field(
                None,
                description="What the model reads before each text, by its name; null: the "
                "model's default, mostly nothing.",
            )

        return EmbeddingsRequest

    def parse_request(self, request: Any, description: ModelDescription) -> ParsedRequest:
        """Parse a request. Raises UserError for a wrong model, dimension or prompt name."""
        assert isinstance(description, EmbedderDescription)
        check_model(request.model, description)
        if request.dimensions not in (None, description.dimension):
            raise UserError(
                f"dimensions: {request.dimensions}; vectors of this model have "
                f"{description.dimension}, and are not cut"
            )
        options = EmbedOptions(request.truncate, _prompt(request.prompt_name, description))
        return ParsedRequest(request.input, options, list(options))

    def default_options(self, description: ModelDescription) -> EmbedOptions:
        """Return options with the default prompt, where long texts are cut."""
        assert isinstance(description, EmbedderDescription)
        return EmbedOptions(True, _prompt(None, description))

    def item_error(self, item: str, max_chars: int) -> SampleError | None:
        """Return the error of a text that is too long or invalid; None if it is valid."""
        reason = find_text_problem(item, max_chars)
        return SampleError("invalid_input", reason) if reason else None

    def cache_content(self, item: str) -> str:
        """Return the text itself."""
        return item

    def outcome_error(self, fields: dict[str, Any]) -> SampleError | None:
        """Return an error for a vector with non-finite numbers, or of zeros.

        Both are signs of an overflow in the model."""
        vector = np.asarray(fields["embedding"])
        if not np.isfinite(vector).all():
            return SampleError("non_finite", "a number of the vector is not finite")
        if not _is_of_length_one(vector):
            return SampleError("non_finite", "the vector has only zeros and cannot be normalized")
        return None

    def serialize_outcome(self, fields: dict[str, Any]) -> bytes:
        """Return the cached form: the token count, then the numbers."""
        numbers = np.asarray(fields["embedding"], dtype="<f4")
        is_cut = bool(fields.get("truncated", {}).get("input"))
        return _HEADER.pack(fields["tokens"], is_cut) + numbers.tobytes()

    def is_valid_cached(
        self, value: bytes, item: Any, options: Any, description: ModelDescription
    ) -> bool:
        """Return True if a cached value is a vector of the model's dimension and of length 1."""
        assert isinstance(description, EmbedderDescription)
        if len(value) != _HEADER.size + 4 * description.dimension or value[4] > 1:
            return False
        return _is_of_length_one(_numbers(value))

    def render_response(
        self, request: Any, answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
    ) -> Iterator[bytes]:
        """Return the response body. Raises RequestError if a text has no vector."""
        vectors = good_answers("input", answers, _LATE)
        return _body(vectors, model.id, request.encoding_format == "base64")

    def add_routes(self, app: FastAPI) -> None:
        """Add `GET /v1/models`."""
        add_models_route(app)

    def info(self, common: dict[str, Any], description: ModelDescription) -> EmbedderInfo:
        """Return the model's info, with the vectors' dimension and the names of the prompts."""
        assert isinstance(description, EmbedderDescription)
        return EmbedderInfo(
            **common,
            pooling=description.pooling,
            dimension=description.dimension,
            prompts=sorted(description.prompts),
            default_prompt=description.default_prompt,
        )


class EmbedderRerankEndpoint(EmbeddingsEndpoint):
    """`POST /v1/rerank`: documents in the order of their cosine to the query."""

    path = "/v1/rerank"
    about = "Order documents by the cosine of their vectors and the query's."
    name, field, items = "rerank", "documents", "documents"
    response_type = RerankResponse

    def request_type(self, max_items: int) -> type[BaseModel]:
        """Return the form of Jina, Cohere and vLLM."""
        return rerank_request(min(max_items, MAX_INPUTS))

    def parse_request(self, request: Any, description: ModelDescription) -> ParsedRequest:
        """Parse a request: its items are the query, then the documents."""
        assert isinstance(description, EmbedderDescription)
        check_model(request.model, description)
        options = EmbedOptions(request.truncate, _prompt(None, description))
        return ParsedRequest([request.query, *request.documents], options, list(options))

    def render_response(
        self, request: Any, answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
    ) -> Iterator[bytes]:
        """Yield the body. Raises RequestError if a text has no vector."""
        query, *documents = good_answers("documents", answers, _LATE, "query")
        vector = _numbers(query).astype(np.float64)
        scores = [float(vector @ _numbers(value)) for value in documents]
        tokens = sum(_HEADER.unpack_from(value)[0] for value in (query, *documents))
        return rerank_body(request, scores, tokens, model.id)

    def add_routes(self, app: FastAPI) -> None:
        """Add nothing: the first endpoint does."""


def _as_texts(value: Any) -> Any:
    """Return a list of texts; a single text becomes a list.

    Raises ValueError for token ids. OpenAI's API takes them, but they do not name their
    vocabulary."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        first_item = value[0][0] if isinstance(value[0], list) and value[0] else value[0]
        if isinstance(first_item, int):
            raise ValueError("token ids are not taken: send the texts themselves")
    return value


def _prompt(name: str | None, description: EmbedderDescription) -> str:
    name = description.default_prompt if name is None else name
    if name is None:
        return ""
    if name not in description.prompts:
        available = ", ".join(sorted(description.prompts)) or "none"
        raise UserError(f"prompt_name: the model has no prompt of that name; it has {available}")
    return description.prompts[name]


def _numbers(value: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(value, dtype="<f4", offset=_HEADER.size)


def _is_of_length_one(vector: np.ndarray[Any, Any]) -> bool:
    return bool(abs(np.linalg.norm(vector.astype(np.float64)) - 1.0) < 1e-3)


def _body(vectors: list[bytes], model: str, packed: bool) -> Iterator[bytes]:
    """Return the response body in parts: a vector of 1,024 numbers takes 20 kB as text."""
    headers = [_HEADER.unpack_from(value) for value in vectors]
    tokens = sum(count for count, _ in headers)
    cut = to_json([index for index, (_, is_cut) in enumerate(headers) if is_cut])
    usage = b'"usage":{"prompt_tokens":%d,"total_tokens":%d}' % (tokens, tokens)
    end = b'],"model":' + to_json(model) + b"," + usage + b',"truncated":' + cut + b"}"
    rows = (_row(index, value, packed) for index, value in enumerate(vectors))
    return list_in_parts(b'{"object":"list","data":[', rows, end)


def _row(index: int, value: bytes, packed: bool) -> bytes:
    numbers = (
        b'"' + base64.b64encode(value[_HEADER.size :]) + b'"'
        if packed
        else to_json(_numbers(value).tolist())
    )
    return b'{"object":"embedding","index":%d,"embedding":%b}' % (index, numbers)
