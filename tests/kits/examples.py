"""The number of examples that a property test tries."""

from __future__ import annotations

from hypothesis import settings

#: Examples of a test that says no number, in `make test`.
FEW = 50
#: Profiles of hypothesis, and how often they try what `make test` tries once.
PROFILES = {"few": 1, "many": 10}


def register_profiles() -> None:
    """Let pytest know `--hypothesis-profile many`; without it, few examples are tried.

    No test depends on time, nor on how busy the machine is.
    """
    for name, times in PROFILES.items():
        settings.register_profile(name, deadline=None, max_examples=FEW * times)
    settings.load_profile("few")


def examples(count: int) -> int:
    """Return the number of examples for a test that tries `count` in `make test`."""
    return count * settings().max_examples // FEW
