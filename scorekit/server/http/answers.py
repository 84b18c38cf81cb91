"""What a request for scores is answered with: JSON put together from answers that were written
once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from pydantic_core import to_json

from scorekit.errors import SampleError
from scorekit.schemas import ModelRef
from scorekit.server.endpoint import Answer

#: Bytes of an answer that are written at once.
PART = 256 * 1024

_LATE = SampleError("timeout", "not scored in time")


def result_json(name: str | None, answer: Answer | None, cached: bool) -> bytes:
    """The result of a sample of that id. What is not done by now has failed with `timeout`."""
    start = b'{"id":' + (b"null" if name is None else to_json(name))
    answer = answer or _LATE
    if isinstance(answer, SampleError):
        return start + b"," + to_json({"ok": False, "error": answer.wire(), **answer.paid})[1:]
    return start + b',"ok":true,"cached":' + (b"true," if cached else b"false,") + answer[1:]


def body_parts(
    ids: Sequence[str | None], answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
) -> Iterator[bytes]:
    """The answer to `POST /v1/score`, in parts of some size. cached: indexes.

    Equal samples share their answer: written out, it may be a hundred times what the job holds.
    """
    parts = [b'{"model":' + to_json(model) + b',"results":[']
    size = 0
    for index, (name, answer) in enumerate(zip(ids, answers, strict=True)):
        result = result_json(name, answer, index in cached)
        parts += [b",", result] if index else [result]
        size += len(parts[-1])
        if size > PART:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join([*parts, b"]}"])


def line_json(index: int, name: str | None, answer: Answer | None, cached: bool) -> bytes:
    """One line of a stream."""
    result = result_json(name, answer, cached)
    return b'{"index":' + str(index).encode() + b"," + result[1:] + b"\n"
