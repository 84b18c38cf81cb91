"""The stages in their order."""

from __future__ import annotations

from typing import Any

from synth.stages.export import Export
from synth.stages.format_filter import FormatFilter
from synth.stages.generate_128 import Generate128
from synth.stages.prefilter_score import PrefilterScore
from synth.stages.sample_sources import SampleSources
from synth.stages.score_select_best import ScoreSelectBest
from synth.stages.select_sources import SelectSources

ORDER = (
    SampleSources(),
    PrefilterScore(),
    SelectSources(),
    Generate128(),
    ScoreSelectBest(),
    FormatFilter(),
    Export(),
)
BY_NAME: dict[str, Any] = {stage.name: stage for stage in ORDER}
