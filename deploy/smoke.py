"""Send a few requests to each running service and check the answers. Needs only Python 3.

    python3 deploy/smoke.py [--key KEY] [--metricx URL] [--xcomet URL] [--judge URL]
                            [--embedder URL] [--retriever URL [--query WORDS]] [--reward-model URL]

The retriever and the reward model are checked only if they are named: each has a profile.

Exit code 0: all answers follow the contract. 1: the first error, in one line.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

PORTS = {"metricx": 8001, "xcomet": 8002, "judge": 8003, "embedder": 8004}
SOURCE = "Do you want to delete this message?"
GOOD, BAD = "이 메시지를 삭제하시겠습니까?", "파일을 열고 저장하십시오. 파일을 열고 저장하십시오."
PAIRS = [{"id": "good", "src": SOURCE, "mt": GOOD}, {"id": "bad", "src": SOURCE, "mt": BAD}]
CASES = [
    {
        "id": mt,
        "task": "translation_filter",
        "source_lang": "en",
        "target_lang": "ko",
        "source_text": SOURCE,
        "candidate": mt,
    }
    for mt in (GOOD, SOURCE)
]


def check(condition: bool, message: str) -> None:
    """Exit with 1 and one line if the condition is false."""
    if not condition:
        sys.exit(f"smoke: {message}")


def ask(url: str, path: str, key: str, body: Any = None) -> tuple[int, Any]:
    """Return status and JSON of a request, also of a refused one."""
    status, answer = fetch(url, path, key, body)
    return status, json.loads(answer)


def fetch(url: str, path: str, key: str, body: Any = None) -> tuple[int, bytes]:
    """Return status and body of a request."""
    request = urllib.request.Request(f"{url}{path}", headers={"Content-Type": "application/json"})
    if body is not None:
        request.data = json.dumps(body).encode()
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError as error:
        sys.exit(f"smoke: {url}{path}: {getattr(error, 'reason', error)}")


def score(url: str, key: str, samples: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the checked results of a request. A repeated request must come from the cache."""
    for is_repeat in (False, True):
        status, body = ask(url, "/v1/score", key, {"samples": samples})
        check(status == 200, f"{name}: HTTP {status}: {json.dumps(body)[:300]}")
        results: list[dict[str, Any]] = body["results"]
        ids = [sample["id"] for sample in samples]
        check(
            [result["id"] for result in results] == ids,
            f"{name}: the ids differ from the request's",
        )
        for result in results:
            check(result["ok"], f"{name}: {result.get('error')}")
            check(result["cached"] or not is_repeat, f"{name}: a repeated request is not cached")
    return results


def check_translations(name: str, url: str, key: str) -> None:
    """Check scores of a good and a bad translation, and xCOMET's spans."""
    good, bad = score(url, key, PAIRS, name)
    scores = f"{good['score']:.3f} for the good translation, {bad['score']:.3f} for the bad one"
    if name == "metricx":
        check(0 <= good["score"] < bad["score"] <= 25, f"metricx: {scores}")
    else:
        check(good["score"] > bad["score"], f"xcomet: {scores}")
        for result, pair in ((good, PAIRS[0]), (bad, PAIRS[1])):
            for span in result["error_spans"]:
                marked = pair["mt"][span["start"] : span["end"]]
                check(
                    marked == span["text"], f"xcomet: a span says {span['text']!r}, not {marked!r}"
                )
    print(f"{name:8} {url}  {scores}")


def check_judge(url: str, key: str) -> None:
    """Check that a translation passes and an untranslated source does not."""
    good, copied = score(url, key, CASES, "judge")
    check(good["verdict"]["pass"], f"judge: refuses a good translation: {good['verdict']}")
    check(not copied["verdict"]["pass"], "judge: passes an untranslated source")
    print(
        f"judge    {url}  passes a translation, refuses a copy ({copied['verdict']['reason_code']})"
    )


def check_embedder(url: str, key: str) -> None:
    """Check that similar texts have similar vectors, and that repeated requests agree."""
    texts = [GOOD, f"{GOOD} 네.", BAD]
    answers = [ask(url, "/v1/embeddings", key, {"input": texts}) for _ in range(2)]
    for status, body in answers:
        check(status == 200, f"embedder: HTTP {status}: {json.dumps(body)[:300]}")
    rows = [body["data"] for _, body in answers]
    check(rows[0] == rows[1], "embedder: a repeated request gives other vectors")
    check([row["index"] for row in rows[0]] == [0, 1, 2], "embedder: vectors out of order")
    first, similar, other = (row["embedding"] for row in rows[0])
    near, far = (sum(a * b for a, b in zip(first, v, strict=True)) for v in (similar, other))
    message = f"cosine {near:.3f} to a text that is alike, {far:.3f} to another"
    check(abs(sum(a * a for a in first) - 1) < 1e-3 and far < near < 1.001, f"embedder: {message}")
    print(f"embedder {url}  {message}")


def check_reward_model(url: str, key: str) -> None:
    """Check that a translation gets more than its source as it is, in both forms of a sample."""
    pairs = [PAIRS[0], {"id": "copy", "src": SOURCE, "mt": SOURCE}]
    chats = [
        {
            "id": pair["id"],
            "messages": [
                {"role": "user", "content": pair["src"]},
                {"role": "assistant", "content": pair["mt"]},
            ],
        }
        for pair in pairs
    ]
    for samples in (chats, pairs):
        good, bad = score(url, key, samples, "reward_model")
        message = f"{good['score']:.3f} for a translation, {bad['score']:.3f} for a copy"
        check(good["score"] > bad["score"], f"reward_model: {message}")
        check(sorted(good["labels"]) != [], "reward_model: an answer without labels")
    print(f"reward_model {url}  {message}")


def check_retriever(url: str, key: str, query: str) -> None:
    """Check that searches repeat, that images and crops have the stated size, that excluded pages
    are left out, and that unknown pages give 404."""
    _, info = ask(url, "/v1/info", key)
    request = {"queries": [{"id": "a", "query": query}], "top_k": 3}
    answers = [ask(url, "/v1/search", key, request) for _ in range(2)]
    for status, body in answers:
        check(status == 200, f"retriever: HTTP {status}: {json.dumps(body)[:300]}")
        check(body["results"][0]["ok"], f"retriever: {body['results'][0].get('error')}")
        check(body["index"]["revision"] == info["revision"], "retriever: answers of two indexes")
    first, repeated = (body["results"][0]["hits"] for _, body in answers)
    check(first == repeated, "retriever: a repeated request finds other pages")
    check(bool(first), f"retriever: no page for {query!r}: give --query a word of your pages")
    best = first[0]
    _, body = ask(url, "/v1/search", key, request | {"exclude": [best["page_id"]]})
    remaining = [hit["page_id"] for hit in body["results"][0]["hits"]]
    check(best["page_id"] not in remaining, "retriever: finds a page that is excluded")
    width, height = best["width"], best["height"]
    for crop, size in (("", (width, height)), (f"0,0,{width // 2},{height // 2}", None)):
        expected = size or (width // 2, height // 2)
        options = urllib.parse.urlencode({"format": "png"} | ({"crop": crop} if crop else {}))
        status, image = fetch(url, f"{best['image']}?{options}", key)
        check(status == 200 and image[:4] == b"\x89PNG", f"retriever: picture: HTTP {status}")
        image_size = struct.unpack(">II", image[16:24])
        check(image_size == expected, f"retriever: a picture of {image_size}, not of {expected}")
    status, _ = ask(url, "/v1/pages/..%2F..%2Fetc%2Fpasswd/image", key)
    check(status == 404, f"retriever: a page that is not there: HTTP {status}")
    print(f"retriever {url}  {info['pages']} pages, {len(first)} found, the best with its picture")


def main() -> None:
    """Check all services; with a key, check that they refuse requests without it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    keys = os.environ.get("API_KEYS", "").split(",")
    parser.add_argument("--key", default=keys[0].strip(), help="API key (default: of API_KEYS)")
    for name, port in PORTS.items():
        default = f"http://127.0.0.1:{os.environ.get(f'{name.upper()}_PORT', port)}"
        parser.add_argument(f"--{name}", default=default, help=f"URL (default: {default})")
    parser.add_argument("--retriever", default="", help="URL; empty: it is not asked")
    parser.add_argument("--reward-model", default="", help="URL; empty: it is not asked")
    parser.add_argument("--query", default="life expectancy", help="words of its pages")
    options = parser.parse_args()
    urls = {name: getattr(options, name) for name in (*PORTS, "retriever", "reward_model")}
    urls = {name: url.rstrip("/") for name, url in urls.items() if url}
    for name, url in urls.items():
        status, _ = ask(url, "/health/ready", "")
        check(status == 200, f"{name}: not ready (HTTP {status})")
        if options.key:
            status, _ = ask(url, "/v1/info", "")
            check(status == 401, f"{name}: answers without a key (HTTP {status})")
    for name in ("metricx", "xcomet"):
        check_translations(name, urls[name], options.key)
    check_judge(urls["judge"], options.key)
    check_embedder(urls["embedder"], options.key)
    if "retriever" in urls:
        check_retriever(urls["retriever"], options.key, options.query)
    if "reward_model" in urls:
        check_reward_model(urls["reward_model"], options.key)


if __name__ == "__main__":
    main()
