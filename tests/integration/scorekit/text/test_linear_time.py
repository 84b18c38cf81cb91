"""Check that every regular expression and text loop takes linear time on any text."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kits.hostile_texts import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("group", ["patterns", "functions"])
def test_hostile_texts_cost_no_more_than_their_length(group):
    command = [sys.executable, "-m", "tests.integration.scorekit.text.test_linear", group]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-300:]}{done.stderr[-3000:]}"
    assert len(done.stdout.splitlines()) > 10


@pytest.mark.slow
def test_a_quadratic_pattern_is_found_out():
    for bad in (r"\b[\w.+-]+@\w+", r":[a-z][\w:]*:(?=`)", r"\{\s*\w*\s*\}", r"[.!]+(?=\s)"):
        command = f"""
from tests.kits import hostile_texts as h
import re
h.LIMIT_S = 1
found = h.Found("bad", re.compile({bad!r}), True)
h.run("bad", h.searching(found), h.pumps(found.pattern), h.LONG // 2)
"""
        done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True)
        assert done.returncode < 0, bad
