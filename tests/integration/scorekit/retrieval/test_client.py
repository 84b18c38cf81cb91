"""Test the client of a page retriever against a stand-in with the API's format."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi import Response

from scorekit.errors import (
    IndexChanged,
    RequestError,
    SampleError,
    ServiceUnreachable,
    UserError,
)
from scorekit.retrieval.client import Retriever
from testing.servers import PATIENCE_S, free_port, running_app
from tests.kits.retrieval.stand_in import StandInRetriever, picture_of, refusal

PAGES = {
    "deck_1": "apples and pears",
    "deck_2": "apples",
    "deck_3": "plums",
    "odd name%2F..?#_4": "quinces",
    "한글_5": "사과 apples",
}


@pytest.fixture
def server():
    return StandInRetriever(dict(PAGES))


@pytest.fixture
def client(server):
    with running_app(server.app) as url, Retriever(url, deadline_s=PATIENCE_S) as client:
        yield client


def ids(outcome):
    return outcome.type if isinstance(outcome, SampleError) else [hit.page_id for hit in outcome]


def brief(url):
    """Return a client with a short deadline."""
    return Retriever(url, deadline_s=0.5)


def test_pages_come_by_the_place_of_their_query(client):
    outcomes = client.search(["plums", "nothing", "apples pears", "사과"], top_k=2)
    assert [ids(outcome) for outcome in outcomes] == [
        ["deck_3"],
        [],
        ["deck_1", "deck_2"],
        ["한글_5"],
    ]
    first = outcomes[2][0]
    assert (first.document, first.page, first.rank) == ("deck.pdf", 1, 1)
    assert client.search([]) == []


def test_the_index_says_who_it_is(client, server):
    info = client.info()
    assert (info.id, info.revision, info.pages, info.backend) == ("demo", "r1", 5, "bm25")


def test_pages_that_were_seen_are_not_found_again(client):
    outcomes = client.search(["apples", "apples"], exclude=[["deck_2", "deck_2"], []])
    assert [ids(outcome) for outcome in outcomes] == [
        ["deck_1", "한글_5"],
        ["deck_1", "deck_2", "한글_5"],
    ]
    with pytest.raises(UserError, match="lists for"):
        client.search(["apples", "pears"], exclude=[[]])


def test_equal_searches_are_asked_once_and_many_go_in_parts(client, server):
    queries = [f"apples {k % 40}" for k in range(120)]
    outcomes = client.search(queries)
    assert all(ids(outcome) == ["deck_1", "deck_2", "한글_5"] for outcome in outcomes)
    sizes = [len(body["queries"]) for body in server.requests]
    assert sum(sizes) == 40 and max(sizes) == server.max_samples and len(sizes) == 3
    outcomes[0].clear()  # the caller's own copy
    assert ids(outcomes[40]) == ["deck_1", "deck_2", "한글_5"]


def test_a_request_stays_below_the_most_bytes(client, server):
    queries = [f"apples {k} {'x' * 20_000}" for k in range(6)]
    assert all(ids(outcome) for outcome in client.search(queries))
    assert [len(body["queries"]) for body in server.requests] == [3, 3]


def test_a_smaller_limit_on_the_way_cuts_requests_in_halves(client, server):
    client.info()
    server.max_samples = 3
    outcomes = client.search([f"apples {k}" for k in range(8)])
    assert [ids(outcome) for outcome in outcomes] == [["deck_1", "deck_2", "한글_5"]] * 8
    too_long = "x" * 70_000
    assert [ids(outcome) for outcome in client.search(["plums", too_long])] == [
        ["deck_3"],
        "invalid_input",
    ]


def test_what_cannot_be_asked_fails_alone(client, server):
    queries = ["apples", "", " \n", "a\0b", "\ud800", "plums"]
    result_ids = [ids(outcome) for outcome in client.search(queries, top_k=1)]
    bad = "invalid_input"
    assert result_ids == [["deck_1"], bad, bad, bad, bad, ["deck_3"]]
    assert len(server.requests[0]["queries"]) == 2
    assert ids(client.search(["apples"], exclude=[["\udfff"]])[0]) == bad


def test_a_search_that_fails_for_the_moment_is_asked_again_alone(client, server):
    server.failing = {"plums": ("upstream", 2), "pears": ("non_finite", 9)}
    outcomes = client.search(["apples", "plums", "pears"], top_k=1)
    assert [ids(outcome) for outcome in outcomes] == [["deck_1"], ["deck_3"], "non_finite"]
    sent_queries = [[q["query"] for q in body["queries"]] for body in server.requests]
    assert sent_queries == [["apples", "plums", "pears"], ["plums"], ["plums"]]


def test_at_the_deadline_a_search_has_failed_beside_its_siblings(server):
    server.failing = {"plums": ("upstream", 10**6)}
    with running_app(server.app) as url, brief(url) as client:
        outcomes = client.search(["apples", "plums"], top_k=1)
    assert ids(outcomes[0]) == ["deck_1"]
    assert outcomes[1].type == "upstream" and outcomes[1].retryable


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_service_is_asked_again(client, server, status):
    server.script = [Response(status_code=status, headers={"Retry-After": "0"})] * 2
    assert ids(client.search(["plums"])[0]) == ["deck_3"]
    assert len(server.requests) == 3


def test_a_bug_of_the_service_ends_the_call(client, server):
    server.script = [refusal(500, "internal", "a bug")]
    with pytest.raises(RequestError) as error_info:
        client.search(["plums"])
    assert error_info.value.type == "internal" and len(server.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"[]",
        b'{"index": {"revision": "r1"}, "results": []}',
        b'{"index": {"revision": "r1"}, "results": [{"ok": true}]}',
        b'{"index": {"revision": "r1"}, "results": [{"ok": false}]}',
        b'{"results": [{"ok": true, "hits": []}]}',
        b'{"index": {"revision": "r1"}, "results": [{"ok": true, "hits": [{"page_id": 7}]}]}',
    ],
)
def test_an_answer_of_another_shape_is_no_answer(client, server, body):
    server.script = [Response(body, media_type="application/json")]
    with pytest.raises(ServiceUnreachable, match="not a page retriever") as error_info:
        client.search(["plums"])
    assert not error_info.value.retryable


def test_an_index_that_changes_is_never_mixed(client, server):
    client.search(["plums"])
    server.revision = "r2"
    for call in (
        lambda: client.search(["apples"]),
        lambda: client.image("deck_1"),
        client.info,
    ):
        with pytest.raises(IndexChanged, match="from revision r1 to r2") as error_info:
            call()
        assert not error_info.value.retryable
    server.revision = "r1"
    assert ids(client.search(["plums"])[0]) == ["deck_3"]


def test_another_service_is_named(server):
    server.service = "embedder"
    with running_app(server.app) as url, Retriever(url) as client:
        with pytest.raises(UserError, match="is the service 'embedder', not a page retriever"):
            client.info()
        with pytest.raises(UserError):
            client.search(["plums"])


def test_nobody_there_is_told_at_the_deadline():
    with brief(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(ServiceUnreachable):
            client.search(["plums"])
        with pytest.raises(ServiceUnreachable):
            client.image("deck_1")


def test_what_is_no_url_is_refused_at_once():
    with pytest.raises(UserError, match="not the URL of a service"):
        Retriever("127.0.0.1:8005")


def test_a_page_tells_its_text(client):
    page = client.page("deck_2")
    assert (page.page, page.width, page.boxes[0].text) == (2, 64, "apples")


def test_every_id_is_one_segment_of_the_path(client):
    for page_id in PAGES:
        assert client.page(page_id).page_id == page_id
        assert client.image(page_id) == picture_of(page_id)
    for page_id in ("../info", "..", ".", "", "a/../deck_1", "\ud800", "deck_9"):
        for ask in (client.page, client.image):
            with pytest.raises(RequestError) as error_info:
                ask(page_id)
            assert error_info.value.type == "not_found"


def test_a_picture_is_fetched_once_also_by_threads(client, server):
    with ThreadPoolExecutor(6) as threads:
        images = list(threads.map(client.image, ["deck_1", "deck_2"] * 12))
    assert images == [picture_of("deck_1"), picture_of("deck_2")] * 12
    assert sorted(server.fetched) == ["deck_1", "deck_2"]


def test_a_picture_that_is_none_is_refused_and_not_kept(client, server):
    server.script = [Response(b"<html>", media_type="text/html")]
    with pytest.raises(ServiceUnreachable, match="not a PNG"):
        client.image("deck_1")
    assert client.image("deck_1") == picture_of("deck_1")


def test_a_forked_child_asks_the_same_index(client, server):
    client.search(["plums"])
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()

    def ask() -> None:
        answers.put(ids(client.search(["plums"])[0]))
        answers.put(type(failure(client)).__name__)

    def failure(client):
        while True:  # until the parent's server has its other index
            try:
                client.search(["apples"])
            except IndexChanged as error:
                return error

    child = fork.Process(target=ask, daemon=True)
    child.start()
    assert answers.get(timeout=PATIENCE_S) == ["deck_3"]
    server.revision = "r2"
    assert answers.get(timeout=PATIENCE_S) == "IndexChanged"
    child.join(PATIENCE_S)


def test_a_closed_client_says_so(client):
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="the retriever's client is closed"):
        client.search(["plums"])
