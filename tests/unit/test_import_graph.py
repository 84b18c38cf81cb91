"""The picture of the rooms is that of the files."""

from __future__ import annotations

from graphlib import CycleError

import pytest

from tools.import_graph import DOCUMENT, HOUSE, arrows, drawn, modules, reduced, room_of


def test_no_rooms_import_each_other_in_a_circle():
    reduced(arrows())


def test_the_picture_is_that_of_today():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == drawn(text), "draw it anew: python -m tools.import_graph"


def test_every_name_of_a_room_is_a_module_and_every_room_has_files():
    module_names = modules()
    named = [name for rooms in HOUSE.values() for names in rooms.values() for name in names.split()]
    assert not [name for name in named if name not in module_names]
    assert {room_of(name) for name in module_names} == arrows().keys()


def test_a_circle_is_named_and_what_follows_is_not_drawn():
    with pytest.raises(CycleError):
        reduced({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {
        "a": {"b"},
        "b": {"c"},
        "c": set(),
    }
