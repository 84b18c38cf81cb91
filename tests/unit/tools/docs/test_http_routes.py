"""The pages of the routes have every route and every field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.docs.http_routes import http_page
from tools.docs.settings import SERVICES

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("service", SERVICES)
def test_a_page_has_every_route_and_field(service: str) -> None:
    document = json.loads((ROOT / f"services/{service}/openapi.json").read_text(encoding="utf-8"))
    page = http_page(service)
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"### `{method.upper()} {path}`" in page
    for name, schema in document["components"]["schemas"].items():
        for field in schema.get("properties", {}):
            assert f"### `{field}` {{ #{name}-{field} .key }}" in page
