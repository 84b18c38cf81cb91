"""The words in which an episode's worth is asked for."""

from __future__ import annotations

from typing import Literal

#: What an episode is worth here: a number of 0 to 1, or none. both: the mean of judge and NDCG.
Measure = Literal["ndcg", "judge", "both", "reward"]
#: Which of a prompt's episodes count.
Combine = Literal["all", "last_step", "last_run"]
#: Why a row is in the next round's data.
Rule = Literal["hard_a", "bucket_0", "last_round", "unscored", "all"]
