"""A second verb and a toy behind it: `POST /v1/embeddings`, as OpenAI has it, with made-up vectors.

`python -m tests.kits.embedder --port N` serves it; it answers `slow` when the file of that name in
the current folder is gone.
"""

from __future__ import annotations

import base64
import hashlib
import math
import struct
import threading
import time
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import to_json

from bench.kit.servers import PATIENCE_S
from scorekit.errors import RequestError, SampleError
from scorekit.schemas import ModelRef, Wire, WireAnswer
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.description import Description
from scorekit.server.http.checks import fault_in
from scorekit.server.verb import Answer, Asked, Verb

LENGTH, MAX_TOKENS, MAX_INPUTS = 8, 16, 2048
#: A failed input fails its request, with this type.
_OF_REQUEST = {
    "invalid_input": "invalid_request",
    "overlong": "invalid_request",
    "timeout": "timeout",
}


# -- the verb --------------------------------------------------------------------------------------


class Vector(WireAnswer):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(WireAnswer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(WireAnswer):
    object: Literal["list"] = "list"
    data: list[Vector]
    model: str
    usage: Usage


class EmbedderInfo(WireAnswer):
    service: str
    model: str
    max_input_length: int
    dimensions: int


class Embedding(Verb):
    """Texts in, a vector of `length` finite numbers for each out."""

    path = "/v1/embeddings"
    about = "Embed texts; vector k is of text k. A text that fails fails the request."
    name, done = "embed", "embedded"
    field, items = "input", "inputs"
    response_type = EmbeddingsResponse
    info_type = EmbedderInfo

    def __init__(self, length: int) -> None:
        self.length = length
        self._form = struct.Struct(f"<I{length}f")  # tokens, numbers

    def request_type(self, max_items: int) -> type[BaseModel]:
        text = Annotated[str, Field(min_length=1)]

        class EmbeddingsRequest(Wire):
            input: Annotated[
                list[text],
                BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
            ] = Field(min_length=1, max_length=min(max_items, MAX_INPUTS))
            model: str = ""
            encoding_format: Literal["float", "base64"] = "float"
            truncate: bool = False

        return EmbeddingsRequest

    def read(self, request: Any, told: Description) -> Asked:
        return Asked(request.input, request.truncate, request.truncate)

    def plain_options(self, told: Description) -> bool:
        return True

    def item_fault(self, item: str, max_chars: int) -> SampleError | None:
        fault = fault_in(item, max_chars)
        return SampleError("invalid_input", fault) if fault else None

    def content(self, item: str) -> str:
        return item

    def outcome_fault(self, fields: dict[str, Any]) -> SampleError | None:
        vector = fields["embedding"]
        if len(vector) != self.length:
            return SampleError("model_failure", f"a vector of {len(vector)}, not {self.length}")
        if not all(map(math.isfinite, vector)):
            return SampleError("non_finite", "a number of the vector is not finite")
        return None

    def write(self, fields: dict[str, Any]) -> bytes:
        return self._form.pack(fields["tokens"], *fields["embedding"])

    def fits(self, value: bytes, item: Any, options: Any, told: Description) -> bool:
        return len(value) == self._form.size and all(map(math.isfinite, self._form.unpack(value)))

    def answer(
        self, request: Any, answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
    ) -> Iterator[bytes]:
        vectors, tokens = [], 0
        for index, one in enumerate(answers):
            if not isinstance(one, bytes):
                fault = one or SampleError("timeout", "not embedded in time")
                kind = _OF_REQUEST.get(fault.type, "internal")
                raise RequestError(kind, f"input.{index}: {fault.type}: {fault.message}")
            count, *vector = self._form.unpack(one)
            tokens += count
            if request.encoding_format == "base64":
                vectors.append(Vector(index=index, embedding=base64.b64encode(one[4:]).decode()))
            else:
                vectors.append(Vector(index=index, embedding=vector))
        usage = Usage(prompt_tokens=tokens, total_tokens=tokens)
        return iter([to_json(EmbeddingsResponse(data=vectors, model=model.id, usage=usage))])

    def info(self, common: dict[str, Any], told: Description) -> EmbedderInfo:
        return EmbedderInfo.model_validate(common | {"dimensions": self.length})


# -- the backend -----------------------------------------------------------------------------------


def vector_of(text: str) -> list[float]:
    """What stands for a text: numbers that float32 has exactly."""
    digest = hashlib.blake2b(text.encode(), digest_size=LENGTH).digest()
    return [byte / 256 for byte in digest]


class ToyEmbedder:
    """Words are tokens. `nan` gives a NaN, `short` a vector of one number, `poison` raises, and
    `slow` waits for `go`."""

    service = "embedder"
    verb = Embedding(LENGTH)

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.entered, self.go = threading.Event(), threading.Event()

    def load(self) -> Description:
        return Description(
            model="toy",
            revision="1",
            tokenizer="words",
            dtype="float32",
            device="cpu",
            max_input_length=MAX_TOKENS,
        )

    def encode(self, samples: Sequence[str], options: bool) -> list[Encoded | SampleError]:
        encoded: list[Encoded | SampleError] = []
        for text in samples:
            words = text.split()
            if len(words) > MAX_TOKENS and not options:
                fault = f"{len(words)} tokens, at most {MAX_TOKENS}"
                encoded.append(SampleError("overlong", fault))
                continue
            kept = words[:MAX_TOKENS]
            encoded.append(Encoded(max(1, len(kept)), {"tokens": len(kept)}, " ".join(kept)))
        return encoded

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        texts = [one.payload for one in batch]
        self.batches.append(texts)
        if "slow" in texts:
            self.entered.set()
            assert self.go.wait(PATIENCE_S)
        if "poison" in texts:
            raise RuntimeError("poisoned batch")
        odd = {"nan": [math.nan] * LENGTH, "short": [1.0]}
        return [{"embedding": odd.get(text) or vector_of(text)} for text in texts]

    def probe(self, words: int) -> str:
        return ("w " * words).strip()

    def memory_bytes(self) -> tuple[int, int, int] | None:
        return None


def _let_go_when_it_is_gone(toy: ToyEmbedder, file: Path) -> None:
    while file.exists():
        time.sleep(0.01)
    toy.go.set()


if __name__ == "__main__":
    from scorekit.server.http.run import main
    from scorekit.server.http.settings import ServiceSettings

    served = ToyEmbedder()
    threading.Thread(
        target=_let_go_when_it_is_gone, args=(served, Path("slow")), daemon=True
    ).start()
    main(ServiceSettings, lambda settings: served)
