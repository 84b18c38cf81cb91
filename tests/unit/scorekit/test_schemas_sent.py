"""Check that JSON schemas sent to LLMs are valid for every provider."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from scorekit.llm.dialects import DIALECTS
from scorekit.llm.wire import ChatPrompt, Sampling, typed
from services.judge.mqm import SCHEMA as MQM
from services.judge.rubrics import load_rubrics
from trainer.search.steps.rewrite import SCHEMA as REWRITER
from trainer.search.steps.verify import SCHEMA as VERIFIER

ALL = {name: rubric.schema_ for name, rubric in load_rubrics().items()} | {
    "mqm": MQM,
    "rewriter": REWRITER,
    "verifier": VERIFIER,
    "of an operator": {"type": "object", "properties": {"enum": {"enum": ["a", "b"]}}},
}


def enums(part: Any) -> Iterator[dict[str, Any]]:
    """Yield every nested schema that lists its values."""
    if isinstance(part, dict):
        if isinstance(part.get("enum"), list):
            yield part
        for inner in part.values():
            yield from enums(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from enums(inner)


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@pytest.mark.parametrize("name", sorted(ALL))
def test_every_enum_that_is_sent_has_a_type(name: str, dialect: Any) -> None:
    from pydantic_core import from_json

    prompt = ChatPrompt(
        [{"role": "user", "content": "x"}], Sampling(max_tokens=8), 1, "r", ALL[name]
    )
    body = from_json(DIALECTS[dialect].body(prompt, "m", range(1)))
    enum_schemas = list(enums(body))
    assert all(part.get("type") == "string" for part in enum_schemas)
    assert len(enum_schemas) == len(list(enums(ALL[name])))


def test_a_schema_keeps_what_it_says() -> None:
    mixed = {"anyOf": [{"enum": ["a", None]}, {"enum": ["a"], "type": ["string", "null"]}]}
    assert typed(mixed) == mixed
    before = {"properties": {"word": {"enum": ["a"], "description": "which"}}, "required": ["word"]}
    word = before["properties"]["word"]  # type: ignore[index]
    assert typed(before) == {**before, "properties": {"word": {"type": "string", **word}}}
    assert "type" not in word
