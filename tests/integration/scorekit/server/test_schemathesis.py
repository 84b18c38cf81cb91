"""Check that services follow their OpenAPI document, with many requests from schemathesis."""

from __future__ import annotations

import json
import sys

import httpx
import pytest
from pydantic import SecretStr

from scorekit.server.fake import FakeBackend
from scorekit.server.settings import Secrets
from testing.fake_embedder import FakeEmbedder
from testing.fake_retriever import FakeRetriever
from testing.fake_reward import FakeReward
from testing.servers import running_service
from tests.kits import forked
from tests.kits.examples import examples

CONFIG = """
seed = 1
[generation]
database = "none"
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "504"]  # 504: the caller's `timeout_s` was short
[checks.negative_data_rejection]
expected-statuses = ["400", "401", "404", "405", "413", "422", "431"]  # 413: too many samples
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "3xx", "404", "431", "5xx"]  # 431: a query string of 70,000 bytes
"""
#: No NUL, and at least one character that Python does not strip.
_NOT_BLANK = (
    "^[^\\u0000]*[^\\u0000\\u0009-\\u000d\\u001c-\\u0020\\u0085\\u00a0\\u1680\\u2000-\\u200a"
    "\\u2028\\u2029\\u202f\\u205f\\u3000][^\\u0000]*$"
)


@pytest.mark.parametrize(
    ("backend", "phases", "routes"),
    [
        (FakeBackend("metricx"), "coverage,fuzzing", 6),
        (FakeBackend("xcomet"), "fuzzing", 6),
        (FakeEmbedder(), "coverage,fuzzing", 7),
        (FakeReward(), "coverage,fuzzing", 8),
        pytest.param(FakeRetriever(), "coverage,fuzzing", 9, marks=pytest.mark.slow),
    ],
    ids=lambda name: getattr(name, "service", None),
)
def test_no_request_makes_a_service_break_its_word(backend, phases, routes, tmp_path):
    with running_service(backend, Secrets(api_keys=SecretStr("key"))) as url:
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer key"}) as client:
            document = client.get("/openapi.json").json()
            limit = client.get("/v1/info").json().get("max_input_length")
        _add_service_facts(document, limit)
        (tmp_path / "openapi.json").write_text(json.dumps(document))
        (tmp_path / "schemathesis.toml").write_text(CONFIG)
        result = forked.run(
            [
                sys.executable,
                "-c",
                "from schemathesis.cli import schemathesis; schemathesis()",
                "run",
                "openapi.json",
                "--url",
                url,
                "--header",
                "Authorization: Bearer key",
                "--phases",
                phases,
                "--max-examples",
                str(examples(15)),
                "--no-color",
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=1200,
        )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{routes} selected / {routes} total" in result.stdout


def _add_service_facts(document, max_input_length):
    """Add what only the running service knows.

    This is the limit of its model, its names and numbers, which texts it takes, and that it
    requires a key."""
    schemas = document["components"]["schemas"]
    if "EmbeddingsRequest" in schemas:
        properties = schemas["EmbeddingsRequest"]["properties"]
        text, several = properties["input"]["anyOf"]
        for schema in (text, several["items"]):
            schema |= {"pattern": "^[^\\u0000]+$"}
        valid_values = {"model": "fake", "dimensions": 8, "prompt_name": "query"}
        for name, value in valid_values.items():
            properties[name] = {"enum": [value, None]}
    if "RerankRequest" in schemas:
        properties = schemas["RerankRequest"]["properties"]
        for schema in (properties["query"], properties["documents"]["items"]):
            schema |= {"pattern": "^[^\\u0000]+$"}
        properties["model"] = {"enum": ["fake", None]}
    if "SearchRequest" in schemas:
        _add_page_facts(document)
    for name in ("MetricXOptions", "XCometOptions"):
        if name in schemas:
            either = schemas[name]["properties"]["max_input_length"]["anyOf"]
            either[0]["maximum"] = max_input_length
    if "XCometOptions" in schemas:  # windows have exact offsets alone
        windows = {"properties": {"overlong": {"const": "windows"}}, "required": ["overlong"]}
        exact = {"properties": {"span_offsets": {"const": "exact"}}}
        schemas["XCometOptions"] |= {"if": windows, "then": exact}
    for operations in document["paths"].values():
        for operation in operations.values():
            if "security" in operation:
                operation["security"] = [{"key": []}]


def _add_page_facts(document):
    """Add the pages, their sizes, and the rules of a query that JSON Schema cannot express."""
    schemas = document["components"]["schemas"]
    text = {"type": "string", "minLength": 1, "pattern": _NOT_BLANK}
    properties = schemas["RetrieveRequest"]["properties"]
    properties.pop("query")
    properties["queries"] |= {"minItems": 1, "items": text}
    schemas["RetrieveRequest"]["required"] = ["queries"]
    (queries,) = document["paths"]["/search"]["get"]["parameters"]
    queries["schema"] |= {"items": text}
    for operations in document["paths"].values():
        for parameter in operations.get("get", {}).get("parameters", []):
            valid_values = {
                "page_id": {"enum": ["trade_1"]},
                "crop": {"pattern": "^0,0,[1-9],[1-9]$"},
            }
            parameter["schema"] |= valid_values.get(parameter["name"], {})
