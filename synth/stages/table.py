"""The stages in their order: the one place where it stands.

The command, the estimate, status, the views, the report and stats.json go through this table, and
ask each stage for what is its own (`synth.context.Stage`).
"""

from __future__ import annotations

from scorekit.errors import UserError
from synth.context import Stage
from synth.drive.kinds import MapStage
from synth.stages.export import Export
from synth.stages.format_filter import FormatFilter
from synth.stages.generate_128 import Generate128
from synth.stages.prefilter_score import PrefilterScore
from synth.stages.sample_sources import SampleSources
from synth.stages.score_select_best import ScoreSelectBest
from synth.stages.select_sources import SelectSources


def in_order(*kinds: type[Stage]) -> tuple[Stage, ...]:
    """One stage of each kind, which knows the one before it."""
    made: list[Stage] = []
    for kind in kinds:
        made.append(kind(made[-1] if made else None))
    return tuple(made)


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
    """One of a record at a time, for a process that was told its name."""
    stage = BY_NAME[name]
    assert isinstance(stage, MapStage), name
    return stage


def named(name: str) -> tuple[str, ...]:
    """The names of the stages that a command means: all, or one, also by another name that it has.
    Raises UserError for none."""
    if name == "all":
        return tuple(BY_NAME)
    found = [stage.name for stage in ORDER if name in (stage.name, *stage.other_names)]
    if not found:
        raise UserError(f"--stage {name}: give all, or one of {', '.join(BY_NAME)}")
    return tuple(found)
