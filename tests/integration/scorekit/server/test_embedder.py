"""Check that the server works the same for another endpoint: embeddings in OpenAI's format."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from pydantic import SecretStr

from scorekit.server.app import create_app
from scorekit.server.settings import Secrets, ServiceSettings
from testing.servers import (
    JSON,
    PATIENCE_S,
    free_port,
    running_app,
    running_service,
    wait_ready,
    wait_until,
)
from tests.kits import forked
from tests.kits.embedder import LENGTH, MAX_TOKENS, ToyEmbedder, vector_of
from tests.kits.service_process import ROOT


@pytest.fixture
def toy():
    return ToyEmbedder()


@pytest.fixture
def url(toy):
    with running_service(toy, max_samples=100, max_body_bytes=2**20, max_field_chars=1000) as url:
        toy.batches.clear()  # those of the warm-up
        yield url


def ask(url, inputs, **more):
    body = {"input": inputs, "model": "fake"} | more
    return httpx.post(f"{url}/v1/embeddings", json=body, timeout=PATIENCE_S)


def vectors(url, inputs, **more):
    answer = ask(url, inputs, **more)
    assert answer.status_code == 200, answer.text
    return [row["embedding"] for row in answer.json()["data"]]


def metric_value(url, name):
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"scorekit_{name} "))


def test_the_answer_is_openais(url):
    answer = ask(url, ["a b", "c"]).json()
    assert answer == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": vector_of("a b")},
            {"object": "embedding", "index": 1, "embedding": vector_of("c")},
        ],
        "model": "fake",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
        "truncated": [],
    }
    assert vectors(url, "c") == [vector_of("c")]


def test_openais_own_client_reads_it(url):
    import openai  # takes most of a second

    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        texts = ["a", "b c"]
        answer = client.embeddings.create(model="fake", input=texts)  # the client requests base64
        assert [row.embedding for row in answer.data] == [vector_of(text) for text in texts]
        plain = client.embeddings.create(model="fake", input="a", encoding_format="float")
        assert plain.data[0].embedding == vector_of("a") and plain.usage.total_tokens == 1
        with pytest.raises(openai.UnprocessableEntityError, match="overlong"):
            client.embeddings.create(model="fake", input="w " * 99)


def test_callers_share_batches_and_equal_texts_their_flight(url, toy):
    with ThreadPoolExecutor(8) as callers:
        first = callers.submit(vectors, url, "slow")
        assert toy.entered.wait(PATIENCE_S)
        futures = [callers.submit(vectors, url, [f"caller {k}", "all ask it"]) for k in range(5)]
        wait_until(lambda: metric_value(url, "queue_items") == 7)
        wait_until(lambda: metric_value(url, "tokenise_seconds_count") == 6)
        toy.go.set()
        assert first.result() == [vector_of("slow")]
        for k, other in enumerate(futures):
            assert other.result() == [vector_of(f"caller {k}"), vector_of("all ask it")]
    assert toy.batches[0] == ["slow"]
    assert sorted(toy.batches[1]) == ["all ask it", *(f"caller {k}" for k in range(5))]
    assert metric_value(url, "joined_total") == 4


def test_a_known_text_is_not_embedded_again_in_either_form(url, toy):
    assert vectors(url, "known") == vectors(url, ["known"])
    assert isinstance(vectors(url, "known", encoding_format="base64")[0], str)
    assert toy.batches == [["known"]]
    vectors(url, "known", truncate=True)  # another request
    assert toy.batches == [["known"]] * 2


def test_vectors_outlive_the_process_and_damaged_ones_are_misses(tmp_path):
    cache = f"sqlite:///{tmp_path}/vectors.sqlite"
    seen = []
    for _ in range(2):
        toy = ToyEmbedder()
        with running_service(toy, cache=cache) as url:
            assert vectors(url, ["kept", "kept too"]) == [vector_of("kept"), vector_of("kept too")]
            seen.append([text for batch in toy.batches for text in batch if "kept" in text])
    assert sorted(seen[0]) == ["kept", "kept too"] and seen[1] == []
    endpoint, description = ToyEmbedder.endpoint, ToyEmbedder().load()
    good = endpoint.serialize_outcome({"tokens": 1, "embedding": vector_of("kept")})
    assert endpoint.is_valid_cached(good, "kept", None, description)
    nan, long = good[:-4] + b"\0\0\xc0\x7f", good[:-4] + b"\0\0\0\x41"  # 8.0: a length other than 1
    zeros = good[:4] + bytes(4 * LENGTH)
    for damaged in (b"", good[:-4], good + b"1234", nan, long, zeros):
        assert not endpoint.is_valid_cached(damaged, "kept", None, description)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nan", "input.1: non_finite: a number of the vector is not finite"),
        ("zeros", "input.1: non_finite: the vector has only zeros and cannot be normalized"),
        ("poison", "input.1: model_failure: the model failed: RuntimeError"),
    ],
)
def test_what_is_no_vector_is_an_error_and_never_kept(url, toy, text, message):
    for _ in range(2):
        toy.batches.clear()
        answer = ask(url, ["fine", text])
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert (error["type"], error["message"]) == ("internal", message)
    assert {seen for batch in toy.batches for seen in batch} - {"w w w w"} == {text}
    assert vectors(url, "fine") == [vector_of("fine")]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"input": []}, 422, "input: List should have at least 1 item"),
        ({"input": ""}, 422, "input.0: String should have at least 1 character"),
        ({"input": ["a", ""]}, 422, "input.1: String should have at least 1 character"),
        ({"input": ["a", 5]}, 422, "input.1: Input should be a valid string"),
        ({"input": ["a", None]}, 422, "input.1: Input should be a valid string"),
        ({"input": {"a": 1}}, 422, "input: Input should be a valid array"),
        ({"input": 5}, 422, "input: Input should be a valid array"),
        ({"input": [5, 6]}, 422, "input: token ids are not taken: send the texts themselves"),
        ({"input": [[5, 6]]}, 422, "input: token ids are not taken: send the texts themselves"),
        ({"input": "a", "dimensions": 3}, 422, "dimensions: 3; vectors of this model have 8"),
        ({"input": "a", "dimensions": "8"}, 422, "dimensions: Input should be a valid integer"),
        ({"input": "a", "model": "toy"}, 422, "model: another one is asked for; here is fake"),
        ({"input": "a", "encoding_format": "int8"}, 422, "encoding_format: Input should be"),
        (
            {"input": "a", "truncat": True},
            422,
            "body: 'truncat' is not a known field; there are input,",
        ),
        ({"input": "a", "prompt_name": "x"}, 422, "the model has no prompt of that name; it has q"),
        ({"input": ["a", "b\0"]}, 422, "input.1: invalid_input: NUL character at position 1"),
        ({"model": "fake"}, 422, "input: Field required"),
        ({"input": ["a"] * 101}, 413, "input: more than 100 texts in a request"),
        ({"input": "a" * 2**20}, 413, f"body: more than {2**20} bytes"),
        ({"input": "a" * 1001}, 422, "input.0: invalid_input: 1,001 characters, at most"),
        ({"input": "w " * 17}, 422, f"input.0: overlong: more than {MAX_TOKENS} tokens"),
    ],
)
def test_limits_and_shapes_are_told(url, body, status, message):
    answer = httpx.post(f"{url}/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert answer.status_code == status and message in error["message"]
    assert error["type"] == ("too_large" if status == 413 else "invalid_request")


def test_a_lone_surrogate_is_no_json(url):
    body = b'{"input": ["\\ud800"]}'
    answer = httpx.post(f"{url}/v1/embeddings", content=body, headers=JSON)
    assert answer.status_code == 422 and "Invalid JSON" in answer.json()["error"]["message"]


def test_every_bad_text_is_named_and_the_others_are_kept(url, toy):
    long = "w " * 17
    error = ask(url, ["a", long, "b\0", "c"]).json()["error"]["message"]
    assert error.startswith("input.1: overlong: ") and "; input.2: invalid_input: NUL" in error
    toy.batches.clear()
    assert vectors(url, ["a", "c"]) == [vector_of("a"), vector_of("c")] and toy.batches == []
    assert ask(url, [long] * 12).json()["error"]["message"].endswith("; and more")


def test_a_copy_of_a_hub_model_goes_by_the_hubs_name_too(url):
    assert ask(url, "a", model="owner/Fake").status_code == 200
    assert ask(url, "a", model=None).status_code == 200


def test_what_is_cut_on_request_is_the_vector_of_the_start(url):
    start = " ".join("w" * MAX_TOKENS)
    assert vectors(url, f"{start} and more", truncate=True) == [vector_of(start)]


def test_without_an_answer_in_time_it_is_504():
    toy = ToyEmbedder()
    with running_service(toy, timeout_s=0.2) as url:
        answer = ask(url, "slow")
        toy.go.set()
    assert answer.status_code == 504
    assert answer.json()["error"]["message"] == "nothing was embedded within 0.2 s"


def test_keys_info_figures_and_routes_are_the_houses():
    with running_service(ToyEmbedder(), Secrets(api_keys=SecretStr("k3y"))) as url:
        assert ask(url, "a").status_code == 401
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer k3y"}) as client:
            assert client.post("/v1/embeddings", json={"input": ["a", "b c"]}).status_code == 200
            info = client.get("/v1/info").json()
            expected_info = {
                "model": "fake",
                "revision": "0",
                "pooling": "mean",
                "dimension": LENGTH,
            }
            expected_info |= {
                "service": "embedder",
                "max_input_length": MAX_TOKENS,
                "max_samples": 10_000,
            }
            assert info | expected_info == info
            assert client.post("/v1/score", json={}).status_code == 404
            assert client.post("/v1/embeddings/stream", json={}).status_code == 404
            metrics_text = client.get("/metrics").text
            document = client.get("/openapi.json").json()
    for line in (
        'scorekit_samples_total{outcome="ok"} 2.0',
        'scorekit_requests_total{route="/v1/embeddings",status="200"} 1.0',
        'scorekit_requests_total{route="/v1/embeddings",status="504"} 0.0',
        "scorekit_batch_samples_count",
    ):
        assert line in metrics_text
    operation = document["paths"]["/v1/embeddings"]["post"]
    assert operation["operationId"] == "embed_v1_embeddings_post"
    assert operation["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/EmbeddingsRequest"
    }


@pytest.mark.parametrize("number", [np.nan, 0.0])
def test_a_model_that_embeds_no_plain_text_takes_no_work(number):
    class Broken(ToyEmbedder):
        def forward(self, batch):
            return [{"embedding": np.full(LENGTH, number)} for _ in batch]

    app = create_app(Broken(), ServiceSettings(cache="memory"))
    with running_app(app) as url:
        wait_until(lambda: hasattr(app.state, "loading") and app.state.loading.done())
        assert "does not embed a plain text" in str(app.state.loading.exception())
        assert ask(url, "a").status_code == 503


def test_told_to_end_it_answers_what_it_owes(tmp_path):
    (tmp_path / "slow").touch()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = forked.Popen(
        [sys.executable, "-m", "tests.kits.embedder", "--port", str(port), "--cache", "memory"],
        cwd=ROOT,
        env=os.environ | {"SLOW_WHILE": str(tmp_path / "slow")},
    )
    try:
        wait_ready(url)
        with ThreadPoolExecutor(1) as callers:
            owed = callers.submit(vectors, url, "slow")
            wait_until(lambda: metric_value(url, "queue_items") == 1)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{url}/health/ready").status_code == 503)
            refused = ask(url, "new")
            assert refused.status_code == 503 and refused.json()["error"]["type"] == "unavailable"
            (tmp_path / "slow").unlink()
            assert owed.result() == [vector_of("slow")]
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def test_an_answer_says_which_texts_were_cut_also_from_the_cache(url):
    texts = ["cut one", "cut " + "w " * MAX_TOKENS, "cut " + "v " * MAX_TOKENS]
    for _ in range(2):
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": texts, "truncate": True}).json()
        assert answer["truncated"] == [1, 2]


def test_documents_are_ranked_by_their_cosine_to_the_query(url):
    body = {"query": "a red house", "documents": ["steel", "red house", "a house"]}
    answer = httpx.post(f"{url}/v1/rerank", json=body | {"return_documents": True}).json()
    cosine = {
        text: sum(x * y for x, y in zip(vector_of(text), vector_of(body["query"]), strict=True))
        for text in body["documents"]
    }
    ranked = sorted(body["documents"], key=cosine.__getitem__, reverse=True)
    assert [row["document"]["text"] for row in answer["results"]] == ranked
    for row in answer["results"]:
        assert row["relevance_score"] == pytest.approx(cosine[row["document"]["text"]], abs=1e-6)
    assert answer["usage"] == {"total_tokens": 8}
    objects = {"documents": [{"text": text} for text in body["documents"]]}
    full = body | objects | {"return_documents": True}
    assert httpx.post(f"{url}/v1/rerank", json=full).json() == answer
    best = httpx.post(f"{url}/v1/rerank", json=body | {"top_n": 1}).json()["results"]
    assert [row["index"] for row in best] == [body["documents"].index(ranked[0])]
    assert "document" not in best[0]
    refused = httpx.post(f"{url}/v1/rerank", json={"query": "a", "documents": ["b", "nan"]})
    assert refused.status_code == 500 and "nan" not in refused.json()["error"]["message"][:9]
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "fake"
