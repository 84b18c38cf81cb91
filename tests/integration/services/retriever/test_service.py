"""Test the retriever over HTTP: hits, pages, images, and refused requests."""

from __future__ import annotations

import hashlib
import io

import httpx
import pytest
from PIL import Image

from scorekit.retrieval.wire import IndexInfo, Page
from testing.servers import PATIENCE_S


def page_ids_of(result):
    assert result["ok"], result
    return [hit["page_id"] for hit in result["hits"]]


def get(url, path, **more):
    return httpx.get(f"{url}{path}", timeout=PATIENCE_S, **more)


def opened(answer):
    assert answer.status_code == 200, answer.text
    return Image.open(io.BytesIO(answer.content))


def test_pages_are_found_in_their_order(ask):
    rice, steel, people = ask("export rice exports", "STEEL", "서울의 인구")
    assert page_ids_of(rice) == ["trade_3", "trade_1", "trade_2"]
    assert page_ids_of(steel) == ["trade_1"] and page_ids_of(people) == ["인구_2", "인구_1"]
    first = rice["hits"][0]
    assert first.pop("score") > rice["hits"][1]["score"]
    assert first == {
        "page_id": "trade_3",
        "document": "trade",
        "page": 3,
        "rank": 1,
        "width": 640,
        "height": 360,
        "image": "/v1/pages/trade_3/image",
    }


def test_numbers_are_found_with_and_without_commas(ask):
    assert [page_ids_of(r) for r in ask("1200", "1,200", "4.5")] == [
        ["trade_2"],
        ["trade_2"],
        ["trade_1"],
    ]


def test_what_is_excluded_is_no_hit_and_unknown_ids_are_nothing(ask):
    query = {"id": "q", "query": "rice", "exclude": ["trade_2", "nowhere_1"]}
    first, second = ask(query, "rice exports", exclude=["trade_1"])
    assert first["id"] == "q" and page_ids_of(first) == ["trade_3"]
    assert page_ids_of(second) == ["trade_3", "trade_2"]


def test_top_k_cuts_and_equal_pages_stand_in_the_order_of_the_index(ask):
    (result,) = ask("exports", top_k=1)
    assert page_ids_of(result) == ["trade_1"]
    assert len(ask("exports", top_k=1000)[0]["hits"]) == 2


def test_nothing_found_is_no_failure(ask):
    assert ask("zebra") == [{"id": None, "ok": True, "cached": False, "hits": []}]


def test_a_bad_query_fails_beside_its_siblings(ask):
    good, blank, long, nul = ask("steel", "  ", "a " * 100_000, "a\0b")
    assert page_ids_of(good) == ["trade_1"]
    for bad in (blank, long, nul):
        assert not bad["ok"] and bad["error"]["type"] == "invalid_input"
        assert not bad["error"]["retryable"]


def test_a_second_time_the_cache_answers(ask):
    first, repeated = ask("percent")[0], ask("percent")[0]
    assert not first["cached"] and repeated["cached"] and repeated["hits"] == first["hits"]
    assert not ask("percent", cache=False)[0]["cached"]
    assert not ask("percent", exclude=["trade_2"])[0]["cached"]  # another query


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"queries": []},
        {"queries": "rice"},
        {"queries": [{"query": ""}]},
        {"queries": [{"query": "a", "k": 1}]},
        {"queries": [{"query": "a"}], "top_k": 0},
        {"queries": [{"query": "a"}], "top_k": 1001},
        {"queries": [{"query": "a"}], "topk": 3},
    ],
)
def test_requests_of_another_shape_are_refused(url, body):
    answer = httpx.post(f"{url}/v1/search", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 422 and answer.json()["error"]["type"] == "invalid_request"


def test_too_many_queries_are_refused(ask):
    assert ask(*["a"] * 102, status=413)["type"] == "too_large"


def test_too_many_hits_or_exclusions_together_are_refused(ask):
    ids = [f"p_{k}" for k in range(10_000)]
    assert len(ask(*["rice"] * 100, top_k=1000, exclude=ids)) == 100
    for more in ({"top_k": 1000}, {"exclude": ids}):
        assert ask(*["a"] * 101, **more, status=413)["type"] == "too_large"


def test_the_info_tells_the_index(url, built_index):
    info_fields = get(url, "/v1/info").json()
    info = IndexInfo.model_validate(info_fields)
    assert (info.id, info.pages, info.documents, info.backend) == ("index", 6, 3, "bm25")
    assert info_fields["textless"] == 1 and info_fields["skipped"] == 1
    assert str(built_index.index.parent) not in str(info_fields)


def test_a_page_tells_its_text_and_where_it_stands(url):
    page = Page.model_validate(get(url, "/v1/pages/trade_2").json())
    assert [box.text for box in page.boxes] == ["Imports of rice", "fell to 1,200 tons"]
    first = page.boxes[0]
    assert (page.width, page.height) == (640, 360) and first.letter_height == 24.0
    assert 38 < first.x1 < 44 and 290 < 360 - first.y2 < 320
    korean = get(url, "/v1/pages/%EC%9D%B8%EA%B5%AC_1").json()
    assert korean["boxes"][0]["text"] == "대한민국의 인구는 오천만 명이다"
    assert get(url, "/v1/pages/scan_2").json()["boxes"] == []


def test_the_picture_is_the_page_with_its_letters_where_the_boxes_are(url):
    path = get(url, "/v1/pages/trade_1").json()["image"]
    answer = get(url, path)
    image = opened(answer).convert("L")
    assert answer.headers["content-type"] == "image/png" and image.size == (640, 360)
    box = get(url, "/v1/pages/trade_1").json()["boxes"][0]
    sides = (round(box["x1"]), round(box["y1"]), round(box["x2"]), round(box["y2"]))
    assert min(image.crop(sides).getdata()) < 60
    assert min(image.crop((0, 0, 640, sides[1] - 2)).getdata()) > 250


def test_a_crop_has_the_pixels_of_the_picture(url):
    path = "/v1/pages/trade_1/image"
    full_image = opened(get(url, path))
    crop = opened(get(url, path, params={"crop": "40,30,240,80"}))
    assert crop.size == (200, 50)
    assert crop.tobytes() == full_image.crop((40, 30, 240, 80)).tobytes()
    small = get(url, path, params={"crop": "0,0,640,360", "max_pixels": 10_000, "format": "jpeg"})
    assert small.headers["content-type"] == "image/jpeg"
    assert opened(small).size == (133, 75)
    assert opened(get(url, path, params={"format": "webp", "max_pixels": 10**9})).size == (640, 360)


@pytest.mark.parametrize(
    "query",
    [
        "crop=0,0,641,10",
        "crop=0,0,10,361",
        "crop=10,10,10,20",
        "crop=20,10,10,20",
        "crop=-1,0,5,5",
        "crop=0,0,1e3,5",
        "crop=0,0,5",
        "crop=",
        "crop=0,0,٥,5",
        "max_pixels=0",
        "max_pixels=-5",
        "max_pixels=x",
        "format=gif",
        "format=",
        "size=3",
        "crop=0,0,5,5&crop=0,0,6,6",
    ],
)
def test_wrong_wishes_are_refused_without_an_echo(url, query):
    answer = get(url, f"/v1/pages/trade_1/image?{query}")
    assert answer.status_code == 422 and answer.json()["error"]["type"] == "invalid_request"
    assert "1e3" not in answer.text and "gif" not in answer.text


def test_an_etag_spares_the_picture(url):
    path = "/v1/pages/trade_1/image"
    answer = get(url, path)
    tag = answer.headers["etag"]
    assert tag == f'"{hashlib.sha256(answer.content).hexdigest()}"'
    for etag_header in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        repeated = get(url, path, headers={"If-None-Match": etag_header})
        assert (repeated.status_code, repeated.content) == (304, b"")
        assert repeated.headers["etag"] == tag
    assert get(url, path, headers={"If-None-Match": '"other"'}).status_code == 200
    part = get(url, path, params={"crop": "0,0,5,5"}, headers={"If-None-Match": tag})
    assert part.status_code == 200 and part.headers["etag"] != tag
    assert httpx.head(f"{url}{path}", timeout=PATIENCE_S).headers["etag"] == tag


@pytest.mark.parametrize(
    "page_id",
    [
        "..",
        "../index.json",
        "..%2F..%2Findex.json",
        "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "trade_1%00",
        "trade_0",
        "trade_01",
        "trade",
        "broken_1",
        "....//",
        "%5C..%5Cindex.json",
        "%ff",
    ],
)
@pytest.mark.parametrize("behind", ["", "/image"])
def test_other_page_ids_are_nothing_but_a_404(url, built_index, page_id, behind):
    # httpx would normalize the path, so the bytes are sent directly.
    request = httpx.Request("GET", url)
    request.url = request.url.copy_with(raw_path=f"/v1/pages/{page_id}{behind}".encode())
    with httpx.Client(timeout=PATIENCE_S) as client:
        answer = client.send(request)
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found"
    assert str(built_index.index) not in answer.text and "index.json" not in answer.text


def test_search_r1s_clients_are_answered(url):
    body = {"queries": ["rice exports", "steel"], "topk": 2, "return_scores": True}
    rice, steel = httpx.post(f"{url}/retrieve", json=body).json()["result"]
    assert [passage["document"]["id"] for passage in rice] == ["trade_3", "trade_1"]
    assert rice[0]["score"] > rice[1]["score"] and len(steel) == 1
    # Search-R1's client reads a passage like this: its title is the first line.
    title, _, text = steel[0]["document"]["contents"].partition("\n")
    assert (title, text) == ("trade_1", "Exports of steel\ngrew by 4.5 percent")
    passage = {"query": "steel", "topk": None, "return_scores": False}  # SkyRL's form
    bare = httpx.post(f"{url}/retrieve", json=passage).json()["result"]
    assert bare == [[steel[0]["document"]]]
    assert opened(get(url, bare[0][0]["image"])).size == (640, 360)


def test_vrags_clients_are_answered(url):
    answer = get(url, "/search", params={"queries": ["rice exports", "서울"]})
    rice, people = answer.json()
    assert [page["idx"] for page in rice] == [0, 1, 2]
    assert rice[0]["image_file"] == "/v1/pages/trade_3/image"
    assert opened(get(url, people[0]["image_file"])).size == (640, 360)


@pytest.mark.parametrize(
    ("method", "path", "more"),
    [
        ("POST", "/retrieve", {"json": {}}),
        ("POST", "/retrieve", {"json": {"queries": ["a"], "query": "a"}}),
        ("POST", "/retrieve", {"json": {"queries": []}}),
        ("POST", "/retrieve", {"json": {"queries": ["a", ""]}}),
        ("POST", "/retrieve", {"json": {"query": "a\0"}}),
        ("POST", "/retrieve", {"json": {"query": "a", "topk": 0}}),
        ("POST", "/retrieve", {"json": {"query": "a", "top_k": 1}}),
        ("GET", "/search", {}),
        ("GET", "/search?queries=", {}),
        ("GET", "/search?queries=a&queries=%00", {}),
        ("GET", "/search?queries=a&topk=3", {}),
        ("GET", "/search?queries=" + "a" * 50_000 + "&x", {}),
    ],
)
def test_wrong_requests_in_others_clothes_are_refused(url, method, path, more):
    answer = httpx.request(method, f"{url}{path}", timeout=PATIENCE_S, **more)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["type"] == "invalid_request"
