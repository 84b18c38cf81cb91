"""Send a thousand random wrong requests with a fixed seed.

Each is refused with the API's own error, none causes a server error, and the service still
answers as before."""

from __future__ import annotations

import random
from urllib.parse import quote

import httpx
import pytest

from scorekit.errors import REQUEST_ERRORS
from testing.servers import JSON, PATIENCE_S

NUMBERS = [-1, 0.5, 1e300, 10**30, True, "3", [], {}, "٣"]
TEXTS = [None, 7, 1.5, True, [], ["a"], {"a": 1}, ""]
IDS = ["..", "../..", "..\\", "a/../b", "%00", "\0", "trade_1/..", "/etc/passwd", "trade_1 ", "ü"]
IDS += ["trade_١", "TRADE_1", "x" * 3000, "trade_-1", "trade_1.png", "~root", "file:///etc"]
BODIES = [b"", b"{", b"\xff\xfe", b"[]", b"null", b'"a"', b'{"queries":' + b"[" * 5000, b"\0" * 99]


def wrong_search(draw):
    body = {"queries": [{"query": "rice"}], "top_k": 3}
    match draw.randrange(8):
        case 0:
            return draw.choice(BODIES)
        case 1:
            body["top_k"] = draw.choice([*NUMBERS, 0, 1001, None])
        case 2:
            body["queries"][0]["query"] = draw.choice(TEXTS)
        case 3:
            body["queries"] = draw.choice([*TEXTS, [], [None], ["rice"], {"query": "rice"}])
        case 4:
            body[draw.choice(["topk", "k", "Queries", "__class__"])] = 1
        case 5:
            body["exclude"] = draw.choice(["trade_1", 5, {"a": 1}, [1], [None], ["a"] * 10_001])
        case 6:
            body["queries"][0]["exclude"] = draw.choice(["trade_1", 5, [1.5], ["a"] * 10_001])
        case 7:
            name = draw.choice(["timeout_s", "priority", "cache"])
            body[name] = draw.choice(["x", -1, [], {}, 10**9, "NORMAL"])
    return body


def wrong_image_path(draw):
    """Return path and query of an image that does not exist."""
    match draw.randrange(3):
        case 0:
            behind = draw.choice(["", "/image", "/image?crop=0,0,9,9"])
            return f"/v1/pages/{quote(draw.choice(IDS), safe='')}{behind}"
        case 1:
            sides = [draw.choice([-5, 0, 10, 700, 10**7, "x", "", 1.5, "1e2"]) for _ in range(4)]
            if sides[0] in (0, 10) and sides[1] in (0, 10):  # the box may be valid
                sides = sides[:3]
            return "/v1/pages/trade_1/image?crop=" + ",".join(map(str, sides))
        case _:
            name = draw.choice(["max_pixels", "format", "crop", "size", "%00", "a" * 2000])
            value = draw.choice(["0", "-3", "x", "", "nan", "bmp", "PNG", "../../x", "9" * 40])
            return f"/v1/pages/trade_1/image?{name}={value}"


def wrong_compat_request(draw):
    """Return requests in other servers' formats that they would refuse, too."""
    body = draw.choice(
        [
            {"topk": 3},
            {"queries": []},
            {"queries": [""], "topk": "x"},
            {"queries": ["a"], "topk": 0},
            {"queries": 5},
            {"query": ["a"], "queries": ["b"], "k": 1},
            {"queries": ["rice"], "return_scores": "yes"},
        ]
    )
    return body


@pytest.mark.parametrize("part", range(4))
def test_a_thousand_wrong_requests(url, built_index, part):
    draw = random.Random(part)
    home = str(built_index.index.parent)
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        routes = client.get("/openapi.json").json()["paths"]
        right = {"queries": [{"query": "rice"}], "cache": False}
        before = client.post("/v1/search", json=right).json()
        for _ in range(250):
            kind = draw.randrange(3)
            if kind == 0:
                body = wrong_search(draw)
                sent = (
                    {"content": body, "headers": JSON}
                    if isinstance(body, bytes)
                    else {"json": body}
                )
                answer = client.post("/v1/search", **sent)
            elif kind == 1 or "/retrieve" not in routes:
                body = wrong_image_path(draw)
                answer = client.get(body)
            else:
                body = wrong_compat_request(draw)
                answer = client.post("/retrieve", json=body)
            context = (kind, str(body)[:300], answer.status_code, answer.text[:300])
            assert 400 <= answer.status_code < 500, context
            error = answer.json()["error"]
            assert error["type"] in REQUEST_ERRORS and not error["retryable"], context
            assert home not in answer.text and "Traceback" not in answer.text, context
            assert len(answer.content) < 3000, context
        assert client.post("/v1/search", json=right).json() == before
        metrics_text = client.get("/metrics").text
        assert 'status="500"} 0.0' in metrics_text
        assert not [
            line
            for line in metrics_text.splitlines()
            if line.startswith("scorekit_requests_total") and 'status="5' in line
            if not line.endswith(" 0.0") and "/health/ready" not in line  # 503 while it loads
        ]
