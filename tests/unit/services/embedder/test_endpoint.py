"""Check request options, the stored form of vectors and long responses."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from scorekit.errors import RequestError, SampleError
from scorekit.schemas import ModelRef
from scorekit.server.endpoint import PART
from services.embedder.endpoint import EmbeddingsResponse
from testing.fake_embedder import FakeEmbedder

DESCRIPTION = FakeEmbedder(dimension=1024 // 16).load()
MODEL = ModelRef(service="embedder", id="m", revision="0")
ENDPOINT = FakeEmbedder.endpoint


def parse_fields(**fields):
    return ENDPOINT.request_type(2048).model_validate_json(json.dumps(fields))


def stored(count, dimension):
    numbers = np.random.default_rng(1).standard_normal((count, dimension)).astype(np.float32)
    return numbers, [ENDPOINT.serialize_outcome({"tokens": 3, "embedding": row}) for row in numbers]


@pytest.mark.parametrize("form", ["float", "base64"])
def test_many_vectors_are_written_in_parts_as_they_are_read(form):
    numbers, answers = stored(2048, 1024)
    parts = ENDPOINT.render_response(
        parse_fields(input="a", encoding_format=form), answers, set(), MODEL
    )
    sizes, body = [], bytearray()
    for part in parts:
        sizes.append(len(part))
        body += part
    assert max(sizes) < PART + 32 * 1024 and len(sizes) > 40
    answer = json.loads(body)
    assert answer["usage"] == {"prompt_tokens": 6144, "total_tokens": 6144}
    for k, row in enumerate(answer["data"]):
        vector = row["embedding"]
        if form == "base64":
            vector = np.frombuffer(base64.b64decode(vector), dtype="<f4")
        assert row["index"] == k and np.array_equal(np.float32(vector), numbers[k])


def test_the_answer_is_as_its_type_says():
    _, answers = stored(2, 4)
    body = b"".join(ENDPOINT.render_response(parse_fields(input=["a", "b"]), answers, set(), MODEL))
    assert EmbeddingsResponse.model_validate_json(body).model_dump_json().encode() == body


@pytest.mark.parametrize(
    ("types", "kind", "named"),
    [
        (["overlong", None, "model_failure"], "invalid_request", ["input.0: overlong"]),
        (["model_failure", None, "timeout"], "internal", ["input.0: model_f", "input.2: timeout"]),
        (["timeout", None], "timeout", ["input.0: timeout"]),
    ],
)
def test_a_request_fails_by_what_will_not_pass(types, kind, named):
    good = stored(1, 4)[1][0]
    answers = [good if type is None else SampleError(type, "x") for type in types]
    with pytest.raises(RequestError) as refused:
        ENDPOINT.render_response(parse_fields(input="a"), answers, set(), MODEL)
    assert refused.value.type == kind
    parts = refused.value.message.split("; ")
    assert [part[: len(n)] for part, n in zip(parts, named, strict=True)] == named
    with pytest.raises(RequestError, match=r"input\.1: timeout: not embedded in time"):
        ENDPOINT.render_response(parse_fields(input="a"), [good, None], set(), MODEL)


def test_what_the_answer_depends_on_is_in_its_key():
    keys = {
        json.dumps(ENDPOINT.parse_request(parse_fields(input="a", **fields), DESCRIPTION).key)
        for fields in (
            {},
            {"encoding_format": "base64"},
            {"dimensions": DESCRIPTION.dimension, "user": "u", "model": "fake"},
            {"truncate": True},
            {"prompt_name": "query"},
        )
    }
    assert len(keys) == 3  # the first three have one key


def test_the_texts_of_a_request_are_2048_at_most():
    types = ENDPOINT.request_type(10_000)
    assert len(types(input=["a"] * 2048).input) == 2048
    with pytest.raises(ValueError, match="at most 2048"):
        types(input=["a"] * 2049)
