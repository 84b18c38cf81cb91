"""Test the client of embedding servers with others that serve OpenAI's route differently."""

from __future__ import annotations

import base64
import logging
import math
import struct

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from scorekit.client.embeddings import Canary, Embeddings
from scorekit.errors import RequestError, ServiceUnreachable, UserError
from testing.servers import free_port, running_app
from tests.kits.embedder import LENGTH, kinds, vector_of


class OtherServer:
    """A server that has OpenAI's route and little else.

    max_texts: texts of a request.
    refuses: whether it refuses a text.
    status: of its refusals.
    spoil: changes the answer.
    script: statuses of the next answers, before any good one."""

    def __init__(self, *, max_texts=2048, refuses=lambda text: False, status=400, models=("m",)):
        self.max_texts, self.refuses, self.status, self.models = max_texts, refuses, status, models
        self.tei = None
        self.spoil = lambda answer: answer
        self.script = []
        self.packed = True
        self.requests = []
        self.app = FastAPI()
        self.app.post("/v1/embeddings")(self.embed)
        self.app.get("/v1/models")(self.list_models)
        self.app.get("/info")(self.info)

    async def list_models(self):
        return {
            "object": "list",
            "data": [{"id": name, "max_model_len": 99} for name in self.models],
        }

    async def info(self):
        return self.tei or Response(status_code=404)

    async def embed(self, request: Request):
        body = await request.json()
        texts = body["input"]
        self.requests.append(texts)
        if self.script:
            return Response(status_code=self.script.pop(0), headers={"Retry-After": "0"})
        if len(texts) > self.max_texts or any(map(self.refuses, texts)):
            error = {
                "error": f"it must have less than 512 tokens: {texts}",
                "error_type": "Validation",
            }
            return JSONResponse(error, self.status)
        rows = [
            {"object": "embedding", "index": k, "embedding": self.written(vector_of(text))}
            for k, text in enumerate(texts)
        ]
        return self.spoil({"object": "list", "data": rows, "model": body["model"], "usage": {}})

    def written(self, vector):
        if not self.packed:
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


@pytest.fixture
def served():
    """Return a function that serves a server and opens a client for it."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def serve(other, **options):
            url = stack.enter_context(running_app(other.app))
            return stack.enter_context(Embeddings(f"{url}/v1", **options))

        yield serve


def test_what_a_server_does_not_tell_is_not_known(served):
    model = served(OtherServer()).info()
    assert (model.model, model.dimension, model.max_input_length) == ("m", LENGTH, 99)
    assert model.revision is None and model.pooling is None
    assert served(OtherServer(models=("m", "n")), model="n").info().model == "n"
    with pytest.raises(UserError, match="names 2 models: say which"):
        served(OtherServer(models=("m", "n"))).info()
    with pytest.raises(UserError, match=r"tells of no model .*: no embedding server"):
        served(OtherServer(models=())).info()


def test_teis_info_is_read(served):
    other = OtherServer(max_texts=3)
    other.tei = {
        "model_id": "BAAI/bge-m3",
        "model_sha": "5617a9f6",
        "model_type": {"embedding": {"pooling": "cls"}},
        "max_input_length": 8192,
        "max_client_batch_size": 3,
    }
    client = served(other)
    model = client.info()
    assert (model.model, model.revision, model.pooling) == ("BAAI/bge-m3", "5617a9f6", "cls")
    assert model.max_input_length == 8192
    client.embed([f"{k}" for k in range(7)])
    assert max(map(len, other.requests)) == 3


def canary(*valid_vectors):
    """Return a canary that accepts the vectors of `valid_vectors`."""
    return Canary("canary", lambda vector: "" if vector in valid_vectors else "another vector")


@pytest.mark.parametrize("max_texts", [1, 2, 32])
def test_a_canary_travels_with_every_request(served, max_texts):
    """Check a server that takes one text a request and does not report it: the canary is sent
    alone."""
    other = OtherServer(max_texts=max_texts, refuses=lambda text: text == "bad")
    texts = [f"text {k}" for k in range(5)]
    client = served(other, batch_size=3)
    outcomes = client.embed([*texts, "bad"], canary(vector_of("canary")))
    assert outcomes[:5] == [vector_of(text) for text in texts]
    assert kinds(outcomes[5:]) == ["overlong"]
    good = [r for r in other.requests if len(r) <= max_texts and not {"bad", "text"} & {*r}]
    assert all(len(request) <= 3 for request in other.requests)
    if max_texts > 1:
        assert all("canary" in request for request in good)
    else:
        assert good.count(["canary"]) >= len(texts)


def test_one_of_two_models_behind_an_address_is_found_in_its_first_answer(served):
    other = OtherServer()

    def another_now_and_then(answer):
        rows = answer["data"]
        if "text 3" not in other.requests[-1]:
            return answer
        return answer | {"data": [rows[-1 - k] | {"index": k} for k in range(len(rows))]}

    client = served(other, batch_size=3, max_in_flight=1)
    texts = [f"text {k}" for k in range(6)]
    assert client.embed(texts, canary(vector_of("canary"))) == [vector_of(text) for text in texts]
    other.spoil = another_now_and_then
    with pytest.raises(ServiceUnreachable, match="another vector") as error_info:
        client.embed(texts, canary(vector_of("canary")))
    assert not error_info.value.retryable


@pytest.mark.parametrize("packed", [True, False])
def test_rows_out_of_order_and_plain_numbers_are_read(served, packed):
    other = OtherServer()
    other.packed = packed
    other.spoil = lambda answer: answer | {"data": answer["data"][::-1]}
    texts = [f"text {k}" for k in range(9)]
    assert served(other).embed(texts) == [vector_of(text) for text in texts]


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_limit_of_texts_that_nobody_told_is_found_and_kept_to(served, status):
    other = OtherServer(max_texts=32, status=status)
    client = served(other, max_in_flight=1)
    texts = [f"text {k}" for k in range(200)]
    assert client.embed(texts) == [vector_of(text) for text in texts]
    other.requests.clear()
    assert client.embed(texts) == [vector_of(text) for text in texts]
    assert max(map(len, other.requests)) <= 32


@pytest.mark.parametrize("status", [400, 413, 422])
def test_texts_that_a_server_refuses_without_naming_them_are_found(served, status, caplog):
    caplog.set_level(logging.DEBUG)
    other = OtherServer(refuses=lambda text: "secret" in text, status=status)
    client = served(other)
    texts = [f"text {k}" + " secret" * (k in (3, 40)) for k in range(64)]
    outcomes = client.embed(texts)
    for k, (text, outcome) in enumerate(zip(texts, outcomes, strict=True)):
        if k in (3, 40):
            assert outcome.type == "overlong" and "secret" not in str(outcome)
        else:
            assert outcome == vector_of(text)
    assert len(other.requests) < 40
    assert "secret" not in caplog.text


def test_a_server_that_refuses_every_text_is_at_fault_itself(served):
    other = OtherServer(models=("m",))
    client = served(other)
    client.info()
    other.refuses = lambda text: True
    with pytest.raises(RequestError, match="HTTP 400"):
        client.embed(["a", "b", "c"])


@pytest.mark.parametrize("status", [424, 429, 500, 502, 503, 504])
def test_what_may_pass_is_asked_again(served, status):
    other = OtherServer()
    client = served(other)
    client.info()
    other.script = [status] * 2
    assert client.embed(["a"]) == [vector_of("a")]


@pytest.mark.parametrize("status", [424, 429, 500, 503])
def test_what_does_not_pass_is_a_typed_error(served, status, no_second_try):
    other = OtherServer()
    client = served(other)
    client.info()
    other.script = [status] * 9
    with pytest.raises(RequestError) as error_info:
        client.embed(["a"])
    assert error_info.value.type == ("overloaded" if status == 429 else "unavailable")


@pytest.mark.parametrize("status", [301, 404, 405])
def test_what_is_no_such_server_is_not_asked_again(served, status):
    other = OtherServer()
    client = served(other)
    client.info()
    other.script = [status] * 9
    with pytest.raises(ServiceUnreachable) as error_info:
        client.embed(["a"])
    assert error_info.value.exit_code == 2 and len(other.script) == 8


def test_a_key_that_is_refused_is_told(served):
    other = OtherServer()
    for key, message in (("k", "the key was refused"), (None, "no key was sent")):
        other.script = [401]
        with pytest.raises(RequestError, match=message) as error_info:
            served(other, api_key=key).info()
        assert error_info.value.exit_code == 2


def test_nobody_there_is_a_typed_error(no_second_try):
    with Embeddings(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(ServiceUnreachable, match="cannot be reached"):
            client.embed(["a"])
    with pytest.raises(UserError, match="is not the URL"):
        Embeddings("127.0.0.1:8004")


def shorter(answer):
    answer["data"][-1]["embedding"] = [1.0, 0.0]


def nan(answer):
    packed = struct.pack(f"<{LENGTH}f", *[math.nan] * LENGTH)
    answer["data"][-1]["embedding"] = base64.b64encode(packed).decode()


def zeros(answer):
    answer["data"][-1]["embedding"] = [0.0] * LENGTH


def other_model(answer):
    answer["model"] = "another"


def with_repeated_row(answer):
    answer["data"][-1]["index"] = 0


def fewer(answer):
    answer["data"].pop()


def no_numbers(answer):
    answer["data"][-1]["embedding"] = "not base64!"


def null(answer):
    answer["data"][-1]["embedding"] = [1.0, None]


def empty(answer):
    answer["data"][-1]["embedding"] = []


def no_list(answer):
    answer["data"] = None


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shorter, "a vector of 2 numbers, others have 8"),
        (nan, "not finite"),
        (zeros, "a vector of zeros"),
        (other_model, "another model answers than before"),
        (with_repeated_row, "another shape"),
        (fewer, "another shape"),
        (no_numbers, "another shape"),
        (null, "another shape"),
        (empty, "another shape"),
        (no_list, "another shape"),
    ],
)
def test_what_is_no_vector_of_this_model_ends_the_call(served, spoil, message):
    other = OtherServer()
    client = served(other)
    client.info()

    def spoiled(answer):
        spoil(answer)
        return answer

    other.spoil = spoiled
    with pytest.raises(ServiceUnreachable, match=message) as error_info:
        client.embed(["a", "b"])
    assert error_info.value.exit_code == 2


def test_infinite_numbers_in_json_end_the_call(served):
    other = OtherServer()
    client = served(other)
    client.info()
    other.packed = False
    body = '{"data": [{"index": 0, "embedding": [%s]}], "model": "m"}'
    for number in ("NaN", "Infinity", "1e999"):
        written = ", ".join([number, *["0.1"] * (LENGTH - 1)])
        other.spoil = lambda answer, written=written: Response(body % written)
        with pytest.raises(ServiceUnreachable):
            client.embed(["a"])
