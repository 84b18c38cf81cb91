"""The verb of the embedder: texts in, a vector for each out, in OpenAI's shape."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, BeforeValidator, FailFast, Field
from pydantic_core import to_json

from scorekit.errors import TEXT_ERROR_TYPES, RequestError, SampleError, UserError
from scorekit.schemas import ModelRef, Wire, WireAnswer
from scorekit.server.description import Description
from scorekit.server.http.answers import PART
from scorekit.server.http.checks import fault_in
from scorekit.server.verb import Answer, Asked, Verb

#: Texts of one request, as OpenAI has it.
MAX_INPUTS = 2048
#: Bytes of a stored vector before its numbers: how many tokens its text has.
_TOKENS = struct.Struct("<I")
#: Faults of texts that one refusal names.
_MOST_FAULTS = 10
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


@dataclass(slots=True, kw_only=True)
class EmbedderDescription(Description):
    """What a backend that embeds says of itself. prompts: what stands before a text, by name."""

    pooling: str
    dimension: int
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


class EmbedOptions(NamedTuple):
    """How the texts of a request are read. prompt: stands before each."""

    truncate: bool
    prompt: str


class Embedding(Verb):
    """`POST /v1/embeddings`. The backend's description is an `EmbedderDescription`; its outcomes
    hold `embedding`, float32 [D], and `tokens`."""

    path = "/v1/embeddings"
    about = "Embed texts; row k is the vector of text k. A text that fails fails the request."
    name, done = "embed", "embedded"
    field, items = "input", "texts"
    page = "embedder"
    response_type = EmbeddingsResponse
    info_type = EmbedderInfo

    def request_type(self, max_items: int) -> type[BaseModel]:
        """OpenAI's fields, and two of ours: `truncate`, `prompt_name`."""
        text = Annotated[str, Field(min_length=1)]
        most = min(max_items, MAX_INPUTS)
        texts = Annotated[list[text], Field(min_length=1, max_length=most)]

        class EmbeddingsRequest(Wire):
            input: Annotated[
                texts,
                FailFast(),
                BeforeValidator(_texts_in, json_schema_input_type=text | texts),
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

    def read(self, request: Any, told: Description) -> Asked:
        """Raises UserError for another model, another dimension and a prompt that is not there."""
        assert isinstance(told, EmbedderDescription)
        if request.model and _last_part(request.model) != _last_part(told.model):
            raise UserError(f"model: another one is asked for; here is {told.model}")
        if request.dimensions not in (None, told.dimension):
            raise UserError(
                f"dimensions: {request.dimensions}; vectors of this model have {told.dimension}, "
                "and are not cut"
            )
        options = EmbedOptions(request.truncate, _prompt(request.prompt_name, told))
        return Asked(request.input, options, list(options))

    def plain_options(self, told: Description) -> EmbedOptions:
        """The default prompt; what is too long is cut."""
        assert isinstance(told, EmbedderDescription)
        return EmbedOptions(True, _prompt(None, told))

    def item_fault(self, item: str, max_chars: int) -> SampleError | None:
        """A text that is too long, or that no model should see."""
        fault = fault_in(item, max_chars)
        return SampleError("invalid_input", fault) if fault else None

    def content(self, item: str) -> str:
        """The text."""
        return item

    def outcome_fault(self, fields: dict[str, Any]) -> SampleError | None:
        """A number that is not finite, or zeros: what overflows in the model ends as either."""
        vector = np.asarray(fields["embedding"])
        if not np.isfinite(vector).all():
            return SampleError("non_finite", "a number of the vector is not finite")
        if not _is_of_length_one(vector):
            return SampleError("non_finite", "the vector cannot be brought to the length 1: zeros")
        return None

    def write(self, fields: dict[str, Any]) -> bytes:
        """Tokens, then the numbers."""
        numbers = np.asarray(fields["embedding"], dtype="<f4")
        return _TOKENS.pack(fields["tokens"]) + numbers.tobytes()

    def fits(self, value: bytes, item: Any, options: Any, told: Description) -> bool:
        """As many numbers as the model gives, all finite, of a vector of length 1."""
        assert isinstance(told, EmbedderDescription)
        if len(value) != _TOKENS.size + 4 * told.dimension:
            return False
        return _is_of_length_one(_numbers(value))

    def answer(
        self, request: Any, answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
    ) -> Iterator[bytes]:
        """Raises RequestError where a text has no vector."""
        vectors: list[bytes] = []
        faults: dict[int, SampleError] = {}
        for index, answer in enumerate(answers):
            if isinstance(answer, bytes):
                vectors.append(answer)
            else:
                faults[index] = answer or _LATE
        if faults:
            raise _refusal(faults)
        return _body(vectors, model.id, request.encoding_format == "base64")

    def info(self, common: dict[str, Any], told: Description) -> EmbedderInfo:
        """The shape of the vectors and the names of the prompts, too."""
        assert isinstance(told, EmbedderDescription)
        return EmbedderInfo(
            **common,
            pooling=told.pooling,
            dimension=told.dimension,
            prompts=sorted(told.prompts),
            default_prompt=told.default_prompt,
        )


def _texts_in(given: Any) -> Any:
    """A text alone is a list of one. Raises ValueError for token ids, which OpenAI's API takes: of
    whose vocabulary they are, nothing says."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        first = given[0][0] if isinstance(given[0], list) and given[0] else given[0]
        if isinstance(first, int):
            raise ValueError("token ids are not taken: send the texts themselves")
    return given


def _last_part(name: str) -> str:
    """Of a model's name: whoever serves a copy of `owner/name` has it in a folder of its name."""
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


def _prompt(name: str | None, told: EmbedderDescription) -> str:
    name = told.default_prompt if name is None else name
    if name is None:
        return ""
    if name not in told.prompts:
        known = ", ".join(sorted(told.prompts)) or "none"
        raise UserError(f"prompt_name: the model has no prompt of that name; it has {known}")
    return told.prompts[name]


def _refusal(faults: dict[int, SampleError]) -> RequestError:
    """Why a request as a whole has failed: faults of texts first, for they stay."""
    types = {fault.type for fault in faults.values()}
    kind = "internal" if types - {"timeout"} else "timeout"
    if types & TEXT_ERROR_TYPES:
        kind = "invalid_request"
        faults = {k: fault for k, fault in faults.items() if fault.type in TEXT_ERROR_TYPES}
    named = [f"input.{k}: {fault}" for k, fault in list(faults.items())[:_MOST_FAULTS]]
    more = "; and more" if len(faults) > _MOST_FAULTS else ""
    return RequestError(kind, "; ".join(named) + more)


def _numbers(value: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(value, dtype="<f4", offset=_TOKENS.size)


def _is_of_length_one(vector: np.ndarray[Any, Any]) -> bool:
    return bool(abs(np.linalg.norm(vector.astype(np.float64)) - 1.0) < 1e-3)


def _body(vectors: list[bytes], model: str, packed: bool) -> Iterator[bytes]:
    """The answer in parts of some size: written out, a vector of 1,024 numbers has 20 kB."""
    parts, size, tokens = [b'{"object":"list","data":['], 0, 0
    for index, value in enumerate(vectors):
        tokens += _TOKENS.unpack_from(value)[0]
        numbers = (
            b'"' + base64.b64encode(value[_TOKENS.size :]) + b'"'
            if packed
            else to_json(_numbers(value).tolist())
        )
        comma = b"," if index else b""
        parts.append(
            b'%b{"object":"embedding","index":%d,"embedding":%b}' % (comma, index, numbers)
        )
        size += len(parts[-1])
        if size > PART:
            yield b"".join(parts)
            parts, size = [], 0
    usage = b'"usage":{"prompt_tokens":%d,"total_tokens":%d}' % (tokens, tokens)
    yield b"".join([*parts, b'],"model":', to_json(model), b",", usage, b"}"])
