"""Test what is refused because a trainer would clip a reward, or not wait for it."""

from __future__ import annotations

import math

import pytest

from scorekit.adapters.openrlhf import ClipCheck, check_clip_range, check_deadline
from scorekit.errors import UserError

DEFAULT = (-10.0, 10.0)


def test_rewards_that_no_baseline_takes_out_of_the_range_pass():
    assert check_clip_range((0.0, 1.0), DEFAULT, is_given=False) == ClipCheck(None, False)
    assert check_clip_range((-20.0, 5.0), (-25.0, 25.0), is_given=True) == ClipCheck(None, False)


@pytest.mark.parametrize(
    ("rewards", "clip_range", "needed"),
    [
        ((-20.0, 5.0), DEFAULT, "-20 10"),
        ((0.0, 100.0), DEFAULT, "-10 100"),
        ((-math.inf, 30.0), DEFAULT, "-10 30"),
        ((-12.0, math.inf), (-11.0, 3.0), "-12 3"),
    ],
)
def test_a_reward_that_would_be_clipped_is_refused(rewards, clip_range, needed):
    with pytest.raises(UserError) as error_info:
        check_clip_range(rewards, clip_range, is_given=False)
    message = str(error_info.value)
    assert f"--reward.clip_range {needed}, and this with --clip-range {needed}" in message
    assert "inf" not in message and "\n" not in message


@pytest.mark.parametrize("clip_range", [(10.0, -10.0), (math.nan, math.nan), (-30.0, math.nan)])
def test_a_clip_range_that_is_none_is_refused(clip_range):
    with pytest.raises(UserError, match="the first number must be less than the second"):
        check_clip_range((-20.0, 5.0), clip_range, is_given=True)


def test_a_difference_of_rewards_that_would_be_clipped_is_told():
    check = check_clip_range((-20.0, 5.0), (-20.0, 10.0), is_given=True)
    assert not check.must_count and "set --reward.clip_range -25 25" in (check.warning or "")


@pytest.mark.parametrize("rewards", [(-math.inf, 5.0), (0.0, math.inf), (-math.inf, math.inf)])
def test_rewards_whose_range_is_not_known_are_counted(rewards):
    check = check_clip_range(rewards, DEFAULT, is_given=False)
    assert check.must_count and "an unknown number" in (check.warning or "")


@pytest.mark.parametrize(("trainer", "waits"), [("openrlhf", 180.0), ("slime", 120.0)])
def test_a_deadline_ends_before_the_trainer_s(trainer, waits):
    check_deadline(waits - 1, trainer, "--deadline")
    with pytest.raises(UserError, match=f"file: deadline_s: {waits:g} s, but {trainer} waits"):
        check_deadline(waits, trainer, "file: deadline_s")
