"""The contract is frozen: a change of it is a change of committed files."""

from __future__ import annotations

import json

import pytest

from tools import freeze_contract


@pytest.mark.parametrize("service", freeze_contract.SERVICES)
def test_the_openapi_document_is_the_committed_one(service):
    committed = json.loads(freeze_contract.openapi_path(service).read_text(encoding="utf-8"))
    assert freeze_contract.openapi(service) == committed


def test_golden_requests_get_their_golden_answers():
    committed = json.loads(freeze_contract.REQUESTS.read_text(encoding="utf-8"))
    assert freeze_contract.answers() == committed


def test_every_route_of_the_document_is_asked():
    asked = {(s, m.lower(), p) for s, m, p, _ in freeze_contract.ASKED}
    document = freeze_contract.openapi("metricx")
    for path, methods in document["paths"].items():
        for method in methods:
            if path != "/metrics":  # its figures change
                assert ("metricx", method, path) in asked
