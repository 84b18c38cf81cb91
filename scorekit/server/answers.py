"""What a request is answered with: JSON put together from answers that were written once."""

from __future__ import annotations

from pydantic_core import to_json

from scorekit.errors import SampleError
from scorekit.server.job import Job

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


def body_json(job: Job, model: bytes) -> bytes:
    """The answer to `POST /v1/score`; `model` is the JSON of its ModelRef."""
    results = b",".join([result_json(job, index) for index in range(len(job.ids))])
    return b'{"model":' + model + b',"results":[' + results + b"]}"


def line_json(job: Job, index: int) -> bytes:
    """One line of a stream."""
    return b'{"index":' + str(index).encode() + b"," + result_json(job, index)[1:] + b"\n"
