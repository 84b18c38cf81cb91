"""What a request is answered with: JSON put together from answers that were written once."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic_core import to_json

from scorekit.errors import SampleError
from scorekit.server.queue.work import Job

#: Bytes of an answer that are written at once.
PART = 256 * 1024

_LATE = SampleError("timeout", "not scored in time")


def result_json(job: Job, index: int) -> bytes:
    """The result of one sample. What is not done by now has failed with `timeout`."""
    name = job.ids[index]
    start = b'{"id":' + (b"null" if name is None else to_json(name))
    answer = job.answers[index] or _LATE
    if isinstance(answer, SampleError):
        return start + b',"ok":false,"error":' + to_json(answer.wire()) + b"}"
    cached = b"true" if index in job.cached else b"false"
    return start + b',"ok":true,"cached":' + cached + b"," + answer[1:]


def answer_bytes(job: Job) -> int:
    """About how long the answer will be."""
    return sum(len(answer) for answer in job.answers if isinstance(answer, bytes))


def body_parts(job: Job, model: bytes) -> Iterator[bytes]:
    """The answer to `POST /v1/score`, in parts of some size; `model` is the JSON of its ModelRef.

    Equal samples share their answer: written out, it may be a hundred times what the job holds.
    """
    parts = [b'{"model":' + model + b',"results":[']
    size = 0
    for index in range(len(job.ids)):
        parts += [b",", result_json(job, index)] if index else [result_json(job, index)]
        size += len(parts[-1])
        if size > PART:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join([*parts, b"]}"])


def line_json(job: Job, index: int) -> bytes:
    """One line of a stream."""
    return b'{"index":' + str(index).encode() + b"," + result_json(job, index)[1:] + b"\n"
