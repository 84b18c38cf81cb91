"""Names and docstrings of the code are plain, as docs/reference/names.md describes."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tools.language import PACKAGES, ROOT, banned_names, find_all, python_files

#: Package -> banned names that it may bind. Each is a name that stays: a config key, a field of a
#: file or of the wire, a parameter that a library sets. A number may fall and never rise.
BANNED_LIMITS = {
    "bench": 1,
    "demo": 2,
    "scorekit": 2,
    "services": 1,
    "synth": 6,
    "tests": 6,
    "trainer": 8,
}
#: Package -> docstrings that may begin as a fragment: openapi.json has these as descriptions.
FRAGMENT_LIMITS = {"scorekit": 6, "services": 2}


@pytest.mark.parametrize("package", PACKAGES)
def test_identifiers_and_docstrings_say_what_their_value_is(package):
    check(package, BANNED_LIMITS.get(package, 0), is_docstring=False)
    check(package, FRAGMENT_LIMITS.get(package, 0), is_docstring=True)


@cache
def findings_of(package):
    return [finding for file in python_files(ROOT / package) for finding in find_all(file)]


def check(package, limit, *, is_docstring):
    findings = [
        f"{finding.path}:{finding.line}: {finding.word}"
        for finding in findings_of(package)
        if finding.is_docstring == is_docstring
    ]
    assert len(findings) <= limit, "\n".join(findings)
    assert len(findings) == limit, f"the limit of {package} can fall to {len(findings)}"


def test_the_page_of_names_lists_the_banned_names():
    names = banned_names()
    assert {"found", "told", "one", "asked", "it"} <= names and len(names) > 80
    assert not names & {"sample", "src", "mt"}


def test_a_finding_is_every_binding_of_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.language.ROOT", tmp_path)
    file = tmp_path / "example.py"
    file.write_text(
        'def _told(found, *, one=1):\n    """Of a thing."""\n    self.kept = [each for each in []]',
        encoding="utf-8",
    )
    words = Counter(finding.word for finding in find_all(file))
    assert words == Counter(["told", "found", "one", "kept", "each", "Of a thing."])
