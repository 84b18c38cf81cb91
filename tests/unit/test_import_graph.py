"""The table in docs/reference/code-map.md matches the imports of the files."""

from __future__ import annotations

from graphlib import CycleError

import pytest

from tools.import_graph import (
    DOCUMENT,
    SYSTEMS,
    box_of,
    find_modules,
    imports_by_box,
    with_current_table,
    without_indirect,
)


def test_table_is_current_and_has_no_cycle():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_current_table(text), "update it: python -m tools.import_graph"


def test_every_name_in_a_box_is_a_module_and_every_box_has_files():
    modules = find_modules()
    names = [name for boxes in SYSTEMS.values() for box in boxes.values() for name in box.split()]
    assert not [name for name in names if name not in modules]
    assert {box_of(module) for module in modules} == imports_by_box().keys()


def test_a_cycle_raises_and_indirect_imports_are_removed():
    with pytest.raises(CycleError):
        without_indirect({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert without_indirect({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {
        "a": {"b"},
        "b": {"c"},
        "c": set(),
    }
