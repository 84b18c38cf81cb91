"""Check which prompts are verified."""

from __future__ import annotations

import pytest

from tests.kits.trainer.searching.curated import prompt_of
from trainer.search.steps.config import CurationConfig
from trainer.search.steps.verify import VerifyConfig, skip_reason
from trainer.sft.curation_record import CurationRecord


@pytest.mark.parametrize(
    ("judge", "ndcg", "reason"),
    [
        ([0.2, 0.4] * 4, [0.5] * 8, None),
        ([0.2, 0.4] * 3 + [0.2, 0.401], [0.5] * 8, "scores above max_score"),
        ([0.0] * 8, [0.1] * 8, None),
        ([0.0] * 8, [0.1] * 7 + [0.099], "NDCG below min_ndcg"),
        ([0.0] * 3, [0.1, 0.0, 0.2], None),
    ],
)
def test_a_mean_on_a_border_is_verified_however_many_are_summed(judge, ndcg, reason):
    min_ndcg = 0.5 if ndcg[0] == 0.5 else 0.1
    cfg = CurationConfig(verify=VerifyConfig(max_score=0.3, min_ndcg=min_ndcg))
    assert skip_reason(prompt_of(judge=judge, ndcg=ndcg), cfg, 5, CurationRecord()) == reason
