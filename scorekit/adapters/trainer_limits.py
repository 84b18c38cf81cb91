"""Deadline and clip range of trainers that ask for rewards over HTTP."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from scorekit.errors import UserError

Trainer = Literal["openrlhf", "slime"]
#: Seconds that each trainer waits for an answer, and those of our deadline by default.
WAITS_S: dict[str, float] = {"openrlhf": 180.0, "slime": 120.0}
DEADLINES_S: dict[str, float] = {"openrlhf": 170.0, "slime": 110.0}
#: `--reward.clip_range` of OpenRLHF 0.11.2 by default.
OPENRLHF_CLIP_RANGE = (-10.0, 10.0)


def check_deadline(seconds: float, trainer: Trainer, key: str) -> None:
    """Raise UserError unless the deadline ends before the trainer's. key: what sets it."""
    if seconds >= WAITS_S[trainer]:
        raise UserError(
            f"{key}: {seconds:g} s, but {trainer} waits {WAITS_S[trainer]:g} s for an answer. Set "
            f"{DEADLINES_S[trainer]:g}"
        )


@dataclass(frozen=True, slots=True)
class ClipCheck:
    """Holds what is certain about rewards and a clip range.

    warning: a line for the user, or None. must_count: some rewards may be outside.
    """

    warning: str | None
    must_count: bool


def check_clip_range(
    rewards: tuple[float, float], clip_range: tuple[float, float], *, is_given: bool
) -> ClipCheck:
    """Compare the rewards that are possible with OpenRLHF's clip range.

    rewards: least and greatest; infinite where it is not known. is_given: the user has named the
    range. Raises UserError if a reward that is known to be possible would be clipped.
    """
    (low, high), (clip_low, clip_high) = rewards, clip_range
    option = f"--clip-range {clip_low:g} {clip_high:g}"
    if not clip_low < clip_high:  # also where one is NaN, outside of which nothing is
        raise UserError(f"{option}: the first number must be less than the second")
    bounds = f"{_number(low)} to {_number(high)}"
    if (math.isfinite(low) and low < clip_low) or (math.isfinite(high) and high > clip_high):
        label = option if is_given else f"{option} (OpenRLHF's default)"
        needed_low = min(low, clip_low) if math.isfinite(low) else clip_low
        needed_high = max(high, clip_high) if math.isfinite(high) else clip_high
        needed = f"{needed_low:g} {needed_high:g}"
        raise UserError(
            f"{label}: rewards are {bounds}, and OpenRLHF would clip them. Start it with "
            f"--reward.clip_range {needed}, and this with --clip-range {needed}"
        )
    if not (math.isfinite(low) and math.isfinite(high)):
        return ClipCheck(
            f"rewards are {bounds}: OpenRLHF clips those outside {clip_low:g} to {clip_high:g}. "
            "`outside_clip_range` in its log and in GET /metrics counts them",
            must_count=True,
        )
    width = high - low
    if width > min(-clip_low, clip_high):
        return ClipCheck(
            f"rewards are {bounds}: if OpenRLHF subtracts a baseline, they are {-width:g} to "
            f"{width:g} before it clips. Then set --reward.clip_range {-width:g} {width:g}",
            must_count=False,
        )
    return ClipCheck(None, must_count=False)


def _number(value: float) -> str:
    return f"{value:g}" if math.isfinite(value) else "an unknown number"
