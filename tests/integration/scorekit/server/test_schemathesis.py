"""What the OpenAPI document says is what a service does: schemathesis asks it in many ways."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import pytest
from pydantic import SecretStr

from bench.kit.servers import running_service
from scorekit.server.fake import FakeBackend
from scorekit.server.http.settings import Secrets

CONFIG = """
seed = 1
[generation]
database = "none"
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "504"]  # 504: the caller's own `timeout_s` was short
[checks.negative_data_rejection]
expected-statuses = ["400", "401", "404", "405", "413", "422"]  # 413: too many samples
"""


@pytest.mark.parametrize(
    ("service", "phases"), [("metricx", "coverage,fuzzing"), ("xcomet", "fuzzing")]
)
def test_no_request_makes_a_service_break_its_word(service, phases, tmp_path):
    with running_service(FakeBackend(service), Secrets(api_keys=SecretStr("key"))) as url:
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer key"}) as client:
            document = client.get("/openapi.json").json()
            limit = client.get("/v1/info").json()["max_input_length"]
        _tell_what_only_the_running_service_knows(document, limit)
        (tmp_path / "openapi.json").write_text(json.dumps(document))
        (tmp_path / "schemathesis.toml").write_text(CONFIG)
        done = subprocess.run(
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
                "30",
                "--no-color",
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=120,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 selected / 6 total" in done.stdout


def _tell_what_only_the_running_service_knows(document, max_input_length):
    """The limit of its model, and that it wants a key."""
    schemas = document["components"]["schemas"]
    for name in ("MetricXOptions", "XCometOptions"):
        if name in schemas:
            either = schemas[name]["properties"]["max_input_length"]["anyOf"]
            either[0]["maximum"] = max_input_length
    for operations in document["paths"].values():
        for operation in operations.values():
            if "security" in operation:
                operation["security"] = [{"key": []}]
