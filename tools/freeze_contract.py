"""Write what freezes the contract: each service's OpenAPI document, and requests with answers.

Run it when the contract changes on purpose, and say so in CHANGELOG.md: `tests/integration/
test_frozen_contract.py` fails until the new files are committed. The answers come from the fake
backend, whose scores are a function of the texts, and from the judge's rules.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from scorekit.command import run_command
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend
from scorekit.server.http.settings import ServiceSettings
from services.judge.__main__ import make_backend
from services.judge.settings import JudgeSettings

ROOT = Path(__file__).parents[1]
REQUESTS = ROOT / "tests/golden/contract.json"
SERVICES = ("metricx", "xcomet", "judge")

_PAIR = {"src": "The house is red.", "mt": "집은 빨간색이다."}
_JUDGED = {
    "task": "translation_filter",
    "source_lang": "en",
    "target_lang": "ko",
    "source_text": "The house is red.",
    "candidate": "집은 빨간색이다.",
}
#: What is asked: (service, method, path, body).
ASKED: list[tuple[str, str, str, Any]] = [
    ("metricx", "POST", "/v1/score", {"samples": [_PAIR]}),
    ("metricx", "POST", "/v1/score", {"samples": [{"id": "a", **_PAIR, "ref": "그 집은 붉다."}]}),
    ("metricx", "POST", "/v1/score", {"samples": [_PAIR], "priority": "bulk", "timeout_s": 60}),
    (
        "metricx",
        "POST",
        "/v1/score",
        {
            "samples": [{"src": "word " * 30, "mt": "길다"}, {"src": "", "mt": ""}],
            "options": {"overlong": "error", "max_input_length": 16, "cache": False},
        },
    ),
    ("metricx", "POST", "/v1/score", {"samples": [{"id": "nul", "src": "a\0", "mt": "b"}]}),
    ("metricx", "POST", "/v1/score", {"samples": []}),
    ("metricx", "POST", "/v1/score", {"samples": [{"src": "a"}], "option": {}}),
    ("metricx", "POST", "/v1/score/stream", {"samples": [_PAIR]}),
    ("metricx", "GET", "/v1/info", None),
    ("metricx", "GET", "/health/live", None),
    ("metricx", "GET", "/health/ready", None),
    ("metricx", "GET", "/v1/nothing", None),
    ("xcomet", "POST", "/v1/score", {"samples": [{"src": "a", "mt": "😀 이건 wrong 번역 x"}]}),
    (
        "xcomet",
        "POST",
        "/v1/score",
        {"samples": [_PAIR | {"ref": ""}], "options": {"span_offsets": "upstream"}},
    ),
    ("xcomet", "GET", "/v1/info", None),
    ("judge", "POST", "/v1/score", {"samples": [{"id": "a", **_JUDGED}]}),
    ("judge", "POST", "/v1/score", {"samples": [_JUDGED | {"candidate": ""}]}),
    ("judge", "POST", "/v1/score", {"samples": [{"task": "answer_correctness"}, {"task": "none"}]}),
    ("judge", "POST", "/v1/score", {"samples": [{"id": "no task"}]}),
    ("judge", "POST", "/v1/score/stream", {"samples": [_JUDGED], "options": {"max_tokens": 64}}),
    ("judge", "GET", "/v1/info", None),
]


def open_service(service: str) -> TestClient:
    """A service in this process, on the fake backend; use it as a context."""
    if service == "judge":  # rules need no model to be faked
        judge = JudgeSettings(cache="memory")
        return TestClient(create_app(make_backend(judge), judge))
    settings = ServiceSettings(cache="memory")
    return TestClient(create_app(FakeBackend(service), settings))  # type: ignore[arg-type]


def answers() -> list[dict[str, Any]]:
    """All of ASKED with what is answered now."""
    found = []
    for service in SERVICES:
        with open_service(service) as client:
            for _ in range(1000):
                if client.get("/health/ready").status_code == 200:
                    break
                time.sleep(0.01)
            for name, method, path, body in ASKED:
                if name == service:
                    response = client.request(method, path, json=body)
                    found.append(
                        {
                            "service": service,
                            "method": method,
                            "path": path,
                            "body": body,
                            "status": response.status_code,
                            "answer": _answer(response.text),
                        }
                    )
    return found


def _answer(text: str) -> Any:
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:  # a release is no change of the contract
        if "versions" in line:
            line |= {"versions": dict.fromkeys(line["versions"], "..."), "commit": "..."}
        rules = line if line.get("model") == "rules" else line.get("model")
        if isinstance(rules, dict) and "rules" in rules.values():
            rules["revision"] = "..."
    return lines[0] if len(lines) == 1 else lines


def openapi(service: str) -> dict[str, Any]:
    """The OpenAPI document that the service serves."""
    with open_service(service) as client:
        document: dict[str, Any] = client.get("/openapi.json").json()
    return document


def openapi_path(service: str) -> Path:
    """Where the document of a service is committed."""
    return ROOT / "services" / service / "openapi.json"


def main() -> None:
    """Write all files."""
    for service in SERVICES:
        _write(openapi_path(service), openapi(service))
    _write(REQUESTS, answers())


def _write(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    run_command(main)
