"""Pages of the HTTP routes and of the fields of requests and answers, from the OpenAPI documents.

The documents are frozen: a test compares them with the running apps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.docs.entries import entry, escape, paragraphs
from tools.docs.settings import SERVICES

ROOT = Path(__file__).parents[2]
_NAMES = {"string": "text", "boolean": "true or false", "object": "object", "null": "null"}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_BOUNDS |= {"minLength": "length ≥", "maxLength": "length ≤"}
_BOUNDS |= {"minItems": "length ≥", "maxItems": "length ≤"}


def http_page(service: str) -> str:
    """Return the page of a service: its routes, then each schema with its fields."""
    document = json.loads((ROOT / f"services/{service}/openapi.json").read_text(encoding="utf-8"))
    parts = [
        f"# HTTP: {service}\n",
        f"The routes of `scorekit serve {service.replace('_', '-')}`, from its OpenAPI document. "
        "How requests, "
        "failures and retries work is the same for every service: [the wire contract]"
        "(../protocol.md).\n",
        "## Routes\n",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(_route(method.upper(), path, operation))
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts.append(f"## {name} {{ #{name} }}\n\n{paragraphs(schema.get('description', ''))}\n")
        required = schema.get("required", [])
        for key, field in schema.get("properties", {}).items():
            facts = [
                _type(field),
                "required" if key in required else _default(field),
                *(f"{sign} {field[bound]:,}" for bound, sign in _BOUNDS.items() if bound in field),
            ]
            parts.append(
                entry(key, facts, escape(field.get("description", "")), id=f"{name}-{key}")
            )
    return "\n".join(parts)


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    lines = [f"### `{method} {path}`\n", escape(operation.get("description", "")), ""]
    if body:
        lines.append(f"- Request: {_type(body['schema'])}")
    for status, answer in operation["responses"].items():
        content: dict[str, Any] = next(iter(answer.get("content", {}).values()), {})
        if status.startswith("2"):
            lines.append(f"- {status}: {_type(content.get('schema', {}))}")
    refused = [status for status in operation["responses"] if not status.startswith("2")]
    if refused:
        lines.append(
            f"- {', '.join(refused)}: the request is refused; "
            "[what each type means](../errors.md#request-errors)"
        )
    return "\n".join(lines) + "\n"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(map(_type, schema[key])))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        return f"mapping of text to {_type(extra)}"
    kind = schema.get("type", "any value")
    return _NAMES.get(kind, kind)


def _default(field: dict[str, Any]) -> str:
    if "default" not in field:
        return "optional"
    return f"default `{json.dumps(field['default'], ensure_ascii=False)}`"


def http_pages() -> dict[str, str]:
    """Return the page of every service, by file name."""
    return {f"{service}.md": http_page(service) for service in SERVICES}
