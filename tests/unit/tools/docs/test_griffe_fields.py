"""Fields of a docstring become a list; griffe itself is in the environment of the site."""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def as_list(monkeypatch: pytest.MonkeyPatch):
    """Return the function, with names in place of griffe's classes, which it does not use."""
    names = ("Class", "Extension", "Function", "GriffeLoader", "Object")
    griffe = SimpleNamespace(**{name: type(name, (), {}) for name in names})
    monkeypatch.setitem(sys.modules, "griffe", griffe)
    return runpy.run_path("tools/docs/griffe_fields.py")["as_list"]


def test_fields_that_the_object_has_become_a_list(as_list) -> None:
    text = "Do it.\n\na: the first one. Then\nmore. b, c: in s. Note: no field.\n\nRaises: it."
    assert as_list(text, {"a", "b", "c"}) == (
        "Do it.\n\n- `a`: the first one. Then more.\n- `b, c`: in s. Note: no field.\n\nRaises: it."
    )
