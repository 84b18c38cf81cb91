"""Descriptions and defaults are plain text: what looks like Markdown or HTML is shown as it is."""

from __future__ import annotations

import pytest
from pydantic import Field
from pydantic.fields import FieldInfo

from tools.docs.entries import default_text, escape


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a <b> & SCOREKIT_<NAME>", r"a &lt;b\> & SCOREKIT\_&lt;NAME\>"),
        ("run `a_b <c>` now", "run `a_b <c>` now"),
        ('names ("b", "```"), and `code`', r'names ("b", "\`\`\`"), and `code`'),
        ("{{ x }} | **y** [z](w)", r"\{\{ x \}\} \| \*\*y\*\* \[z\](w)"),
        ("one ` alone", r"one \` alone"),
    ],
    ids=["html", "code", "fence", "markup", "tick"],
)
def test_only_code_spans_are_markdown(text: str, expected: str) -> None:
    assert escape(text) == expected


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (Field("one\n\ntwo"), "default `one two`"),
        (Field("a `b`"), "default `` a `b` ``"),
        (Field("\n"), r'default `"\n"`'),
        (Field(None), "default `null`"),
    ],
    ids=["lines", "ticks", "space", "null"],
)
def test_a_default_is_one_code_span(field: FieldInfo, expected: str) -> None:
    assert default_text(field) == expected
