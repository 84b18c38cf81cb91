"""Build the JSON body of a scoring response from serialized answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set

from pydantic_core import to_json

from scorekit.errors import SampleError
from scorekit.schemas import ModelRef
from scorekit.server.endpoint import Answer

#: Approximate bytes of a part of the body.
PART = 256 * 1024

_LATE = SampleError("timeout", "not scored in time")


def result_json(name: str | None, answer: Answer | None, cached: bool) -> bytes:
    """Return the result of a sample. name: its id. answer: None if it is late, a `timeout`."""
    start = b'{"id":' + (b"null" if name is None else to_json(name))
    answer = answer or _LATE
    if isinstance(answer, SampleError):
        return start + b"," + to_json({"ok": False, "error": answer.wire(), **answer.paid})[1:]
    return start + b',"ok":true,"cached":' + (b"true," if cached else b"false,") + answer[1:]


def body_parts(
    ids: Sequence[str | None], answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
) -> Iterator[bytes]:
    """Yield the body of `POST /v1/score` in parts. cached: indexes of cached answers.

    Equal samples share one answer in memory, so the full body may be a hundred times larger.
    """
    head = b'{"model":' + to_json(model) + b',"results":['
    return list_in_parts(head, results_json(ids, answers, cached), b"]}")


def results_json(
    ids: Sequence[str | None], answers: Sequence[Answer | None], cached: Set[int]
) -> Iterator[bytes]:
    """Yield the result of each sample. cached: indexes of cached answers."""
    for index, (name, answer) in enumerate(zip(ids, answers, strict=True)):
        yield result_json(name, answer, index in cached)


def list_in_parts(head: bytes, items: Iterable[bytes], end: bytes) -> Iterator[bytes]:
    """Yield a JSON document around a list, in parts of about `PART` bytes.

    head: what is before the first item. end: what is after the last one."""
    parts, size = [head], 0
    for index, item in enumerate(items):
        parts += [b",", item] if index else [item]
        size += len(item)
        if size > PART:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join([*parts, end])


def line_json(index: int, name: str | None, answer: Answer | None, cached: bool) -> bytes:
    """Return one line of a stream."""
    result = result_json(name, answer, cached)
    return b'{"index":' + str(index).encode() + b"," + result[1:] + b"\n"
