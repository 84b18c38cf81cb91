"""Check which stored answers are valid for this index."""

from __future__ import annotations

import pytest
from pydantic_core import from_json, to_json

from services.retriever.endpoint import Query, SearchOptions
from testing.fake_retriever import FakeRetriever


@pytest.fixture(scope="module")
def service():
    backend = FakeRetriever()
    return backend, backend.load()


def stored(service, query, top_k=10):
    backend, _ = service
    encoded = backend.encode([Query(query=query)], SearchOptions(top_k))
    return backend.endpoint.serialize_outcome(backend.forward(encoded)[0])


def fits(service, value, top_k=10, exclude=()):
    backend, description = service
    query = Query(query="of", exclude=list(exclude))
    return backend.endpoint.is_valid_cached(value, query, SearchOptions(top_k), description)


def test_what_the_service_has_written_fits(service):
    value = stored(service, "of")
    assert [hit["page_id"] for hit in from_json(value)["hits"]] == ["trade_1", "trade_2"]
    assert fits(service, value) and fits(service, stored(service, "zebra"))
    assert fits(service, stored(service, "of", top_k=1), top_k=1)


@pytest.mark.parametrize(
    "change",
    [
        lambda hits: hits[0].update(page_id="another_1"),
        lambda hits: hits[0].update(image="http://elsewhere/image"),
        lambda hits: hits[0].update(rank=2),
        lambda hits: hits[1].update(score=99.0),
        lambda hits: hits[0].update(score="NaN"),
        lambda hits: hits.reverse(),
        lambda hits: hits[0].pop("width"),
    ],
)
def test_what_somebody_else_has_written_does_not(service, change):
    hits = from_json(stored(service, "of"))["hits"]
    change(hits)
    assert not fits(service, to_json({"hits": hits}))


def test_answers_to_other_questions_do_not(service):
    value = stored(service, "of")
    assert not fits(service, value, top_k=1)
    assert not fits(service, value, exclude=["trade_2"])
    for other in (b"", b"[]", b"{}", b'{"score": 1}', b'{"hits": 3}'):
        assert not fits(service, other)
