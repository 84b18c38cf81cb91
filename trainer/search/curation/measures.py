"""The names of measures and rules in the config."""

from __future__ import annotations

from typing import Literal

#: The value of an episode, from 0 to 1. both: the mean of judge and NDCG.
Measure = Literal["ndcg", "judge", "both", "reward"]
#: Which of a prompt's episodes count.
Combine = Literal["all", "last_step", "last_run"]
#: Why a row is in the next round's data.
Rule = Literal["hard_a", "bucket_0", "last_round", "unscored", "all"]
