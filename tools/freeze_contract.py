"""Write what freezes the contract: each service's OpenAPI document, and requests with answers.

Run it when the contract changes on purpose, and say so in CHANGELOG.md: `tests/integration/
test_frozen_contract.py` fails until the new files are committed. The answers come from fake
back ends, whose scores and vectors are a function of the texts, and from the judge's rules.
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
from scorekit.server.settings import ServiceSettings
from services.embedder.settings import EmbedderSettings
from services.judge.__main__ import make_backend
from services.judge.settings import JudgeSettings
from services.retriever.settings import RetrieverSettings
from services.reward_model.settings import RewardModelSettings
from testing.fake_embedder import FakeEmbedder
from testing.fake_retriever import FakeRetriever
from testing.fake_reward import FakeReward

ROOT = Path(__file__).parents[1]
REQUESTS = ROOT / "tests/golden/contract.json"
SERVICES = ("metricx", "xcomet", "judge", "embedder", "retriever", "reward_model")

_PAIR = {"src": "The house is red.", "mt": "집은 빨간색이다."}
_JUDGED = {
    "task": "translation_filter",
    "source_lang": "en",
    "target_lang": "ko",
    "source_text": "The house is red.",
    "candidate": "집은 빨간색이다.",
}
_ANSWER = {
    "task": "answer_correctness",
    "query": "What share of it is that?",
    "answer": "12%",
    "reference": "12 percent",
}
_CHAT = [{"role": "user", "content": "Is it red?"}, {"role": "assistant", "content": "Yes."}]
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
    (
        "xcomet",
        "POST",
        "/v1/score",
        {"samples": [_PAIR | {"ref": ""}], "options": {"empty_ref": "text"}},
    ),
    ("xcomet", "POST", "/v1/score", {"samples": [_PAIR], "options": {"empty_ref": "no"}}),
    ("xcomet", "GET", "/v1/info", None),
    ("judge", "POST", "/v1/score", {"samples": [{"id": "a", **_JUDGED}]}),
    ("judge", "POST", "/v1/score", {"samples": [_JUDGED | {"candidate": ""}]}),
    ("judge", "POST", "/v1/score", {"samples": [{"task": "answer_correctness"}, {"task": "none"}]}),
    ("judge", "POST", "/v1/score", {"samples": [{"id": "no task"}]}),
    (
        "judge",
        "POST",
        "/v1/score",
        {"samples": [_ANSWER, _ANSWER | {"answer": "13 %"}, _JUDGED | {"images": ["AAAA"]}]},
    ),
    ("judge", "POST", "/v1/score", {"samples": [_ANSWER | {"task": "answer_grounded"}]}),
    (
        "judge",
        "POST",
        "/v1/score",
        {"samples": [{"task": "mqm", "src_lang": "en", "tgt_lang": "ko", **_PAIR}]},
    ),
    ("judge", "POST", "/v1/score/stream", {"samples": [_JUDGED], "options": {"max_tokens": 64}}),
    ("judge", "GET", "/v1/info", None),
    ("embedder", "POST", "/v1/embeddings", {"input": "the house is red", "model": "fake"}),
    (
        "embedder",
        "POST",
        "/v1/embeddings",
        {"input": ["a b", "a b", "집"], "encoding_format": "base64", "dimensions": 8, "user": "u"},
    ),
    (
        "embedder",
        "POST",
        "/v1/embeddings",
        {"input": ["word " * 70], "truncate": True, "prompt_name": "query"},
    ),
    ("embedder", "POST", "/v1/embeddings", {"input": ["a", "a\0", "word " * 70]}),
    ("embedder", "POST", "/v1/embeddings", {"input": [[15339, 1917]]}),
    ("embedder", "POST", "/v1/embeddings", {"input": ""}),
    ("embedder", "POST", "/v1/embeddings", {"input": "a", "model": "another"}),
    ("embedder", "POST", "/v1/embeddings", {"input": "a", "dimensions": 4}),
    ("embedder", "POST", "/v1/embeddings", {"input": ["a", "word " * 70], "truncate": True}),
    (
        "embedder",
        "POST",
        "/v1/rerank",
        {"query": "the house", "documents": ["a car", "the house is red"], "top_n": 1},
    ),
    ("embedder", "POST", "/v1/rerank", {"query": "a", "documents": ["b", "word " * 70]}),
    ("embedder", "GET", "/v1/models", None),
    ("embedder", "GET", "/v1/info", None),
    ("retriever", "POST", "/v1/search", {"queries": [{"id": "a", "query": "steel imports of"}]}),
    (
        "retriever",
        "POST",
        "/v1/search",
        {
            "queries": [
                {"query": "of", "exclude": ["trade_1"]},
                {"query": "서울의"},
                {"query": "zebra"},
                {"id": "blank", "query": " "},
            ],
            "top_k": 1,
            "exclude": ["nowhere_1"],
            "priority": "bulk",
            "timeout_s": 60,
            "cache": False,
        },
    ),
    ("retriever", "POST", "/v1/search", {"queries": []}),
    ("retriever", "POST", "/v1/search", {"queries": [{"query": "a", "k": 1}], "top_k": 0}),
    ("retriever", "POST", "/retrieve", {"queries": ["of", "steel"], "return_scores": True}),
    ("retriever", "POST", "/retrieve", {"query": "rice", "topk": 1}),
    ("retriever", "POST", "/retrieve", {"queries": ["rice", ""]}),
    ("retriever", "GET", "/search?queries=rice&queries=steel", None),
    ("retriever", "GET", "/v1/pages/trade_2", None),
    ("retriever", "GET", "/v1/pages/trade_3", None),
    ("retriever", "GET", "/v1/pages/trade_2/image?crop=0,0,65,5", None),
    ("retriever", "GET", "/v1/pages/..%2Findex.json/image", None),
    ("retriever", "GET", "/v1/info", None),
    (
        "reward_model",
        "POST",
        "/v1/score",
        {
            "samples": [
                {"id": "chat", "messages": _CHAT},
                {"id": "two", "text": "Is it red?", "pair": "It is."},
                {"id": "one", "text": "It is red."},
                {"id": "translation", **_PAIR},
            ]
        },
    ),
    (
        "reward_model",
        "POST",
        "/v1/score",
        {
            "samples": [
                {"id": "none"},
                {"id": "several", "text": "a", **_PAIR},
                {"id": "no turns", "messages": []},
                {"id": "role", "messages": [{"role": "human", "content": "a"}]},
                {"id": "long", "text": "word " * 65},
                {"id": "nan", "text": "nan"},
                {"id": "nul", "messages": [{"role": "user", "content": "a\0"}]},
            ]
        },
    ),
    (
        "reward_model",
        "POST",
        "/v1/score",
        {"samples": [{"text": "word " * 65}], "options": {"overlong": "truncate", "cache": False}},
    ),
    ("reward_model", "POST", "/v1/score", {"samples": [{"messages": [{"role": "user"}]}]}),
    ("reward_model", "POST", "/v1/score", {"samples": [], "options": {"overlong": "windows"}}),
    ("reward_model", "POST", "/v1/score/stream", {"samples": [{"messages": _CHAT}]}),
    (
        "reward_model",
        "POST",
        "/v1/rerank",
        {"query": "Is it red?", "documents": ["No.", "It is."], "return_documents": True},
    ),
    ("reward_model", "POST", "/v1/rerank", {"query": "a", "documents": ["b", "c\0"]}),
    ("reward_model", "GET", "/v1/models", None),
    ("reward_model", "GET", "/v1/info", None),
]


def _client(app: Any) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1")


def open_service(service: str) -> TestClient:
    """Open a service in this process, on the fake backend; use it as a context."""
    if service == "judge":  # rules need no model to be faked
        judge = JudgeSettings(cache="memory")
        return _client(create_app(make_backend(judge), judge))
    if service == "embedder":
        embedder = EmbedderSettings(cache="memory")
        return _client(create_app(FakeEmbedder(), embedder))
    if service == "retriever":
        retriever = RetrieverSettings(cache="memory", index=Path("fake"))
        return _client(create_app(FakeRetriever(), retriever))
    if service == "reward_model":
        reward = RewardModelSettings(cache="memory")
        return _client(create_app(FakeReward(), reward))
    settings = ServiceSettings(cache="memory")
    return _client(create_app(FakeBackend(service), settings))  # type: ignore[arg-type]


def answers() -> list[dict[str, Any]]:
    """Return all of ASKED with the current answers."""
    recorded = []
    for service in SERVICES:
        with open_service(service) as client:
            for _ in range(1000):
                if client.get("/health/ready").status_code == 200:
                    break
                time.sleep(0.01)
            for name, method, path, body in ASKED:
                if name == service:
                    response = client.request(method, path, json=body)
                    recorded.append(
                        {
                            "service": service,
                            "method": method,
                            "path": path,
                            "body": body,
                            "status": response.status_code,
                            "answer": _answer(response.text),
                        }
                    )
    return recorded


def _answer(text: str) -> Any:
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:  # a release is no change of the contract
        if not isinstance(line, dict):
            continue
        if "versions" in line:
            line |= {"versions": dict.fromkeys(line["versions"], "..."), "commit": "..."}
        rules = line if line.get("model") == "rules" else line.get("model")
        if isinstance(rules, dict) and "rules" in rules.values():
            rules["revision"] = "..."
    return lines[0] if len(lines) == 1 else lines


def openapi(service: str) -> dict[str, Any]:
    """Return the OpenAPI document that the service serves."""
    with open_service(service) as client:
        document: dict[str, Any] = client.get("/openapi.json").json()
    return document


def openapi_path(service: str) -> Path:
    """Return the path of a service's committed OpenAPI document."""
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
