"""Check that the contract is frozen: its changes are changes of committed files."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tools import freeze_contract


@pytest.mark.parametrize("service", freeze_contract.SERVICES)
def test_the_openapi_document_is_the_committed_one(service):
    committed = json.loads(freeze_contract.openapi_path(service).read_text(encoding="utf-8"))
    assert freeze_contract.openapi(service) == committed


def test_golden_requests_get_their_golden_answers():
    committed = json.loads(freeze_contract.REQUESTS.read_text(encoding="utf-8"))
    assert freeze_contract.answers() == committed


class FirstSpan(BaseModel):
    """A span as the clients of 0.1.0 read it: strict, three severities, no optional field."""

    model_config = ConfigDict(strict=True)

    start: int
    end: int
    severity: Literal["MINOR", "MAJOR", "CRITICAL"]
    confidence: float
    text: str


def test_clients_of_the_first_release_read_our_spans():
    answers = [row["answer"] for row in freeze_contract.answers() if row["service"] == "xcomet"]
    results = [result for answer in answers for result in answer.get("results", [])]
    spans = [span for result in results for span in result["error_spans"]]
    assert [FirstSpan.model_validate(span).model_dump() for span in spans] == spans != []


def test_every_route_of_the_document_is_asked():
    recorded = {(s, m.lower(), p) for s, m, p, _ in freeze_contract.ASKED}
    document = freeze_contract.openapi("metricx")
    for path, methods in document["paths"].items():
        for method in methods:
            if path != "/metrics":  # its numbers change
                assert ("metricx", method, path) in recorded
