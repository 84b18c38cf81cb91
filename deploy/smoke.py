"""Score a few pairs on each running service and check the answers. Needs nothing but Python 3.

    python3 deploy/smoke.py [--key KEY] [--metricx URL] [--xcomet URL] [--judge URL]

Exit code 0: every answer is as the contract says. 1: the first that is not, in one line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

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


def check(condition: bool, what: str) -> None:
    """Exit with 1 and one line where the condition does not hold."""
    if not condition:
        sys.exit(f"smoke: {what}")


def ask(url: str, path: str, key: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of a request; a refusal is an answer, too."""
    request = urllib.request.Request(f"{url}{path}", headers={"Content-Type": "application/json"})
    if body is not None:
        request.data = json.dumps(body).encode()
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except OSError as error:
        sys.exit(f"smoke: {url}{path}: {getattr(error, 'reason', error)}")


def score(url: str, key: str, samples: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Results of a request, checked for their shape; the second time they come from the cache."""
    for again in (False, True):
        status, body = ask(url, "/v1/score", key, {"samples": samples})
        check(status == 200, f"{name}: HTTP {status}: {json.dumps(body)[:300]}")
        results: list[dict[str, Any]] = body["results"]
        ids = [sample["id"] for sample in samples]
        check([result["id"] for result in results] == ids, f"{name}: other ids than were sent")
        for result in results:
            check(result["ok"], f"{name}: {result.get('error')}")
            check(result["cached"] or not again, f"{name}: asked again, it is not cached")
    return results


def check_translations(name: str, url: str, key: str) -> None:
    """MetricX: the better translation has the lower score; xCOMET: the higher, and true spans."""
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
    """A translation passes, an untranslated source does not."""
    good, copied = score(url, key, CASES, "judge")
    check(good["verdict"]["pass"], f"judge: refuses a good translation: {good['verdict']}")
    check(not copied["verdict"]["pass"], "judge: passes an untranslated source")
    print(
        f"judge    {url}  passes a translation, refuses a copy ({copied['verdict']['reason_code']})"
    )


def main() -> None:
    """Ask all three; with a key, see that none answers without it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    keys = os.environ.get("API_KEYS", "").split(",")
    parser.add_argument("--key", default=keys[0].strip(), help="API key (default: of API_KEYS)")
    for name, port in (("metricx", 8001), ("xcomet", 8002), ("judge", 8003)):
        default = f"http://127.0.0.1:{os.environ.get(f'{name.upper()}_PORT', port)}"
        parser.add_argument(f"--{name}", default=default, help=f"URL (default: {default})")
    given = parser.parse_args()
    urls = {name: getattr(given, name) for name in ("metricx", "xcomet", "judge")}
    for name, url in urls.items():
        status, _ = ask(url, "/health/ready", "")
        check(status == 200, f"{name}: not ready (HTTP {status})")
        if given.key:
            status, _ = ask(url, "/v1/info", "")
            check(status == 401, f"{name}: answers without a key (HTTP {status})")
    for name in ("metricx", "xcomet"):
        check_translations(name, urls[name], given.key)
    check_judge(urls["judge"], given.key)


if __name__ == "__main__":
    main()
