"""Export a run to ATIF v1.8: a JSON file for each episode, and a folder of images.

Data without a field in the format is in `extra`: the question with its gold pages, hits and frames,
the answer, judge, NDCG and the reward's components.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from scorekit import __version__
from scorekit.errors import UserError
from trainer.search.records import TokenRecord, Trajectory, Turn
from trainer.search.trajectories.atif_schema import (
    AtifAgent,
    AtifFinalMetrics,
    AtifImage,
    AtifMetrics,
    AtifObservation,
    AtifPart,
    AtifResult,
    AtifStep,
    AtifToolCall,
    AtifTrajectory,
)
from trainer.search.trajectories.exports import NOTHING, called_tool, new_folder
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

_NOTES = (
    "Step 1 is the question. A turn's text as it was written is its extra.text. A step with "
    "llm_call_count 0 was put in the policy's place."
)
_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
#: Max bytes of a file name, without its extension.
_LONGEST = 200


def export_atif(run_dir: Path, target: Path, *, steps: Sequence[int] | None = None) -> int:
    """Write the episodes of a run (of these steps) into a folder that is new or empty; return their
    number. Raises UserError."""
    store = TrajectoryStore(run_dir / FOLDER)
    with new_folder(target) as folder:
        return _write(store, steps, folder)


def _write(store: TrajectoryStore, steps: Sequence[int] | None, folder: Path) -> int:
    (folder / "images").mkdir()
    written: set[str] = set()
    number = 0
    for number, trajectory in enumerate(store.read(steps), 1):
        for sha256 in trajectory.images:
            if sha256 not in written:
                (folder / _image_path(sha256)).write_bytes(store.read_image(sha256))
                written.add(sha256)
        name = f"{trajectory.step:06d}-{quote(trajectory.trajectory_id, safe='')}"
        if len(name) > _LONGEST:
            name = f"{trajectory.step:06d}-{number:06d}"
        content = as_atif(trajectory).model_dump_json(exclude_none=True, indent=1)
        (folder / f"{name}.json").write_text(content + "\n", encoding="utf-8")
    if not number:
        raise UserError(f"{store.folder}: {NOTHING}")
    return number


def as_atif(
    trajectory: Trajectory, image_path: Callable[[str], str] | None = None
) -> AtifTrajectory:
    """Return an episode in ATIF. image_path: SHA-256 -> path of its image; None: the paths of
    `export_atif`."""
    path_of = image_path or _image_path
    ids = list(_ids_by_turn(trajectory))
    question_step = AtifStep(step_id=1, source="user", message=trajectory.question.question)
    turns = [
        _step(turn, number, metrics, path_of)
        for number, (turn, metrics) in enumerate(zip(trajectory.turns, ids, strict=True), 2)
    ]
    tokens = [turn.tokens for turn in trajectory.turns if not turn.forced]
    return AtifTrajectory(
        session_id=trajectory.run or "run",
        trajectory_id=trajectory.trajectory_id,
        agent=AtifAgent(
            name="scorekit-search", version=__version__, model_name=trajectory.policy or None
        ),
        steps=[question_step, *turns],
        notes=_NOTES,
        final_metrics=AtifFinalMetrics(
            total_completion_tokens=None if None in tokens else sum(filter(None, tokens)),
            total_steps=1 + len(turns),
            extra=_dumped(trajectory, {"ndcg", "reward", "judged", "grounded"}),
        ),
        extra=_dumped(
            trajectory,
            {"question", "step", "group", "sample", "attempt", "index_revision", "end"}
            | {"end_detail", "answer"},
        ),
    )


def _image_path(sha256: str) -> str:
    return f"images/{sha256}.png"


def _dumped(trajectory: Trajectory, fields: set[str]) -> dict[str, Any]:
    return trajectory.model_dump(mode="json", include=fields, exclude_none=True)


def _step(
    turn: Turn, number: int, metrics: AtifMetrics | None, path_of: Callable[[str], str]
) -> AtifStep:
    thought = _THINK.match(turn.text)
    tool = called_tool(turn)
    calls = None
    if tool is not None:
        call = AtifToolCall(
            tool_call_id=tool.id, function_name=tool.function, arguments=tool.arguments
        )
        calls = [call]
    extra = {"text": turn.text, "policy_s": turn.policy_s, "reason": turn.reason}
    return AtifStep(
        step_id=number,
        source="agent",
        message=turn.text[thought.end() :] if thought else turn.text,
        reasoning_content=thought[1] if thought and not turn.forced else None,
        tool_calls=calls,
        observation=_observation(turn, calls, path_of),
        metrics=None if turn.forced else metrics,
        llm_call_count=0 if turn.forced else 1,
        extra={name: value for name, value in extra.items() if value is not None},
    )


def _observation(
    turn: Turn, calls: list[AtifToolCall] | None, path_of: Callable[[str], str]
) -> AtifObservation | None:
    if not turn.observation and not turn.views:
        return None
    parts = [AtifPart(type="text", text=turn.observation)] if turn.observation else []
    parts += [
        AtifPart(type="image", source=AtifImage(path=path_of(view.image))) for view in turn.views
    ]
    extra = turn.model_dump(
        mode="json",
        include={"hits", "views", "rank", "golden", "detail", "tool_s"},
        exclude_none=True,
    )
    source = calls[0].tool_call_id if calls else None
    return AtifObservation(results=[AtifResult(source_call_id=source, content=parts, extra=extra)])


def _ids_by_turn(trajectory: Trajectory) -> Iterator[AtifMetrics | None]:
    """Yield the tokens of each turn, with ids if the episode has them.

    The sampled ids of the n-th turn are the n-th run of 1s in the action mask.
    """
    turns = [turn for turn in trajectory.turns if not turn.forced]
    sampled_runs = _sampled(trajectory.tokens) if trajectory.tokens else []
    run_iterator = iter(sampled_runs if len(sampled_runs) == len(turns) else [])
    for turn in trajectory.turns:
        if turn.forced:
            yield None
            continue
        before, sampled = next(run_iterator, (None, None))
        yield AtifMetrics(
            completion_tokens=turn.tokens if sampled is None else len(sampled),
            prompt_token_ids=before,
            completion_token_ids=sampled,
        )


def _sampled(tokens: TokenRecord) -> list[tuple[list[int], list[int]]]:
    """Return (ids before, ids) of each run of sampled ids."""
    runs, start = [], 0
    for is_sampled, group in groupby(tokens.action_mask):
        end = start + len(list(group))
        if is_sampled:
            before = [*tokens.prompt_ids, *tokens.completion_ids[:start]]
            runs.append((before, tokens.completion_ids[start:end]))
        start = end
    return runs
