"""Check that the curves on a run's page match the logged values."""

from __future__ import annotations

import re

import pytest

from trainer.runs.evaluation.pages import draw_curves
from trainer.runs.stats import Curve


@pytest.mark.parametrize("sums", [False, True])
def test_a_sum_is_drawn_as_it_is_and_all_else_by_its_mean(sums: bool) -> None:
    lines = [{"update": update, "cost/calls": 10.0 * update} for update in range(1, 6)]
    (svg,) = draw_curves([Curve(title="paid calls", keys=("cost/calls",), sums=sums)], lines, {})
    (line,) = re.findall(r'<path d="([^"]*)"[^>]*stroke-width: 1\.6', svg)
    dots = re.findall(r'<use [^>]*y="([\d.]+)"[^>]*opacity: 0\.5', svg)
    assert len(dots) == len(lines)
    assert (line.split()[-1] == dots[-1]) is sums
