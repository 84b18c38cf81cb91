"""The page of errors has every class, every type on the wire and every exit code."""

from __future__ import annotations

from functools import cache

from scorekit.errors import REQUEST_ERRORS, SAMPLE_ERROR_TYPES
from synth.pairs import PairsUnfinished
from tools.docs.errors import error_classes, errors_page
from trainer.translation.prompting import OverlongPrompt


@cache
def page() -> str:
    """Return the page, which is made when a test first asks for it."""
    return errors_page()


def test_a_class_stands_below_its_base_with_its_exit_code() -> None:
    names = [error.name for error in error_classes()]
    assert names[0] == "ScorekitError" and len(names) == len({*names})
    for kind in (PairsUnfinished, OverlongPrompt):
        assert names.index(kind.__base__.__name__) < names.index(kind.__name__)
    user_error = page()[page().index("### UserError {") :]
    assert "exit code: `2`" in user_error.partition("\n### ")[0]


def test_every_type_on_the_wire_has_a_row() -> None:
    for name in (*REQUEST_ERRORS, *SAMPLE_ERROR_TYPES):
        assert f"\n| `{name}` |" in page(), name


def test_a_command_says_what_its_own_exit_codes_mean() -> None:
    assert "- `scorekit search collect`: Exit code 3: no episode has a reward." in page()
    assert "- `scorekit score`: After transient errors the exit code is 3" in page()
