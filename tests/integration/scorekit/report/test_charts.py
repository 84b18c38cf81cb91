"""Names in a chart may be any text, and every letter stays a letter in the SVG."""

from __future__ import annotations

import warnings
from html import escape
from xml.etree import ElementTree

import pytest

from scorekit.report.page import chart_image

NAMES = ["a$b_{$", "$x^$", "%s", "{}", "{0!r}", "a\\b", "<b>&amp;</b>", "_hidden", "한국어", "中文"]


def chart_of(name, second="other"):
    """Return a chart whose texts are all `name`."""

    def fill(axes):
        axes.plot([1, 2], [1, 2], label=name)
        axes.plot([1, 2], [2, 1])  # no series of its own
        axes.barh(0, 1, label=f"{name} of bars")
        axes.plot([1, 2], [3, 1], label=second)
        axes.set_yticks([0], [name])
        axes.annotate(name, (1, 1))
        return 3

    return str(chart_image(name, name, fill))


@pytest.mark.parametrize("name", [*NAMES, "日本語", "عربي", "ไทย", "e\u0301"])
def test_a_name_is_shown_as_it_is(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg = chart_of(name)
    texts = [node.text for node in ElementTree.fromstring(svg).iter() if node.text]
    words = " ".join(" ".join(texts).split())
    # Title, axis, tick, note, and two names in the legend.
    assert words.count(name) == 6 and "other" in words
    assert escape(name, quote=False) in svg and "_child" not in svg


def test_a_name_with_control_characters_or_without_an_end_spoils_no_chart():
    svg = str(chart_image("a\x00b\nc", "\x1b[31m" + "x" * 300, lambda axes: 1))
    ElementTree.fromstring(svg)
    assert "x" * 61 not in svg
