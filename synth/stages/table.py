"""The stages in order; this is the only place that defines it.

The command, the estimate, status, the views, the report and stats.json go through this table, and
ask each stage for what is its own (`synth.execution.stage.Stage`).
"""

from __future__ import annotations

from scorekit.errors import UserError
from synth.execution.stage import MapStage, Stage
from synth.stages.export import Export
from synth.stages.format_filter import FormatFilter
from synth.stages.generate_128 import Generate128
from synth.stages.prefilter_score import PrefilterScore
from synth.stages.sample_sources import SampleSources
from synth.stages.score_select_best import ScoreSelectBest
from synth.stages.select_sources import SelectSources


def in_order(*kinds: type[Stage]) -> tuple[Stage, ...]:
    """Return one stage of each class, linked to the previous one."""
    stages: list[Stage] = []
    for kind in kinds:
        stages.append(kind(stages[-1] if stages else None))
    return tuple(stages)


ORDER = in_order(
    SampleSources,
    PrefilterScore,
    SelectSources,
    Generate128,
    ScoreSelectBest,
    FormatFilter,
    Export,
)
BY_NAME = {stage.name: stage for stage in ORDER}


def map_stage(name: str) -> MapStage:
    """Return the map stage with a name."""
    stage = BY_NAME[name]
    assert isinstance(stage, MapStage), name
    return stage


def stage_names(name: str) -> tuple[str, ...]:
    """Return the names of the stages of a command: all, or one by its name or alias.

    Raises UserError for an unknown name."""
    if name == "all":
        return tuple(BY_NAME)
    matches = [stage.name for stage in ORDER if name in (stage.name, *stage.other_names)]
    if not matches:
        raise UserError(f"--stage {name}: give all, or one of {', '.join(BY_NAME)}")
    return tuple(matches)
