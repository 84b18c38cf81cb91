"""Fields of a docstring become a list; griffe itself is in the environment of the site."""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the functions, with names in place of griffe's classes, which they do not use."""
    names = ("Class", "Extension", "Function", "GriffeLoader", "Object")
    griffe = SimpleNamespace(**{name: type(name, (), {}) for name in names})
    monkeypatch.setitem(sys.modules, "griffe", griffe)
    return runpy.run_path("tools/docs/griffe_fields.py")


def test_fields_that_the_object_has_become_a_list(functions: dict[str, Any]) -> None:
    as_list = functions["as_list"]
    text = "Do it.\n\na: the first one. Then\nmore. b, c: in s. Note: no field.\n\nRaises: it."
    assert as_list(text, {"a", "b", "c"}) == (
        "Do it.\n\n- `a`: the first one. Then more.\n- `b, c`: in s. Note: no field.\n\nRaises: it."
    )


def test_what_looks_like_html_is_shown_and_code_is_left_alone(functions: dict[str, Any]) -> None:
    text = "From X_<NAME>, `<b>`, ```<i>```.\n\n    if a <b:\n        c\n\nOr <script>."
    expected = "From X_&lt;NAME>, `<b>`, ```<i>```.\n\n    if a <b:\n        c\n\nOr &lt;script>."
    assert functions["without_html"](text) == expected
