"""Test the client of embedding servers with our service."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest

from scorekit.client.embeddings import Embeddings
from scorekit.errors import RequestError
from testing.servers import PATIENCE_S, running_service
from tests.kits.embedder import LENGTH, MAX_TOKENS, ToyEmbedder, kinds, vector_of

LONG = "w " * (MAX_TOKENS + 1)


@pytest.fixture
def toy():
    return ToyEmbedder()


@pytest.fixture
def embeddings(toy):
    with running_service(toy, max_samples=8) as url, Embeddings(url) as client:
        toy.batches.clear()
        yield client


def test_our_service_says_who_it_is_without_a_vector(embeddings, toy):
    model = embeddings.info()
    assert (model.model, model.revision, model.pooling) == ("fake", "0", "mean")
    assert (model.dimension, model.max_input_length) == (LENGTH, MAX_TOKENS)
    assert toy.batches == []


def test_vectors_come_in_order_and_equal_texts_are_asked_for_once(embeddings, toy):
    texts = [f"text {k % 20}" for k in range(60)]  # more than a request may have
    assert embeddings.embed(texts) == [vector_of(text) for text in texts]
    sent_texts = [text for batch in toy.batches for text in batch]
    assert sorted(sent_texts) == sorted(set(texts))
    assert embeddings.embed([]) == []


def test_a_text_that_cannot_be_embedded_fails_alone(embeddings):
    texts = ["a", "", "b\0", "\ud800", LONG, "c", LONG + "x", "a"]
    outcomes = embeddings.embed(texts)
    bad = "invalid_input"
    assert kinds(outcomes) == ["vector", bad, bad, bad, "overlong", "vector", "overlong", "vector"]
    assert outcomes[0] == outcomes[7] == vector_of("a") and outcomes[5] == vector_of("c")
    assert kinds(embeddings.embed([LONG])) == ["overlong"]
    many = [f"{LONG} {k}" for k in range(30)]  # more than one error message lists
    assert kinds(embeddings.embed([*many, "d"])) == ["overlong"] * 30 + ["vector"]


def test_another_model_than_is_named_is_no_fault_of_the_texts(toy):
    with running_service(toy) as url, Embeddings(url, model="other") as client:
        with pytest.raises(RequestError, match="model: another one is asked for"):
            client.embed(["a", "b"])


def test_a_model_that_fails_ends_the_call(embeddings):
    for text in ("nan", "poison"):
        with pytest.raises(RequestError) as error_info:
            embeddings.embed(["fine", text])
        assert error_info.value.type == "internal" and not error_info.value.retryable


def test_threads_share_a_client(embeddings):
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(embeddings.embed, [f"{k}", "same"]) for k in range(12)]
        for k, call in enumerate(calls):
            assert call.result() == [vector_of(f"{k}"), vector_of("same")]


def test_a_forked_child_has_connections_of_its_own(embeddings):
    assert embeddings.embed(["a"]) == [vector_of("a")]
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=lambda: answers.put(embeddings.embed(["b"])), daemon=True)
    child.start()
    assert answers.get(timeout=PATIENCE_S) == [vector_of("b")]
    child.join(PATIENCE_S)
    assert embeddings.embed(["c"]) == [vector_of("c")]


def test_a_closed_client_says_so(embeddings):
    embeddings.close()
    embeddings.close()
    with pytest.raises(RuntimeError, match="the embeddings client is closed"):
        embeddings.embed(["a"])
