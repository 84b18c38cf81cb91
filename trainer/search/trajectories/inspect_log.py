"""Export a run to logs of Inspect, which `inspect view` shows: a file for each step.

The logs are written with the API of inspect-ai, as its authors recommend; the extra `inspect`
installs it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scorekit import __version__
from scorekit.errors import UserError
from trainer.search.records import Trajectory, Turn
from trainer.search.trajectories.exports import NOTHING, called_tool, new_folder
from trainer.search.trajectories.layout import mean_stats
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSample
    from inspect_ai.model import ChatMessage, Content
    from inspect_ai.scorer import Score

_TASK = "search"
LoadImage = Callable[[str], bytes]


def export_inspect(run_dir: Path, target: Path, *, steps: Sequence[int] | None = None) -> int:
    """Write `step-NNNNNN.eval` for each step of a run (or for these) into a folder that is new or
    empty; return the number of episodes. Raises UserError."""
    try:
        from inspect_ai.log import write_eval_log
    except ImportError:
        raise UserError(
            'inspect-ai: not installed. Run `pip install -e ".[inspect]"` in the checkout, in a '
            "separate environment."
        ) from None
    store = TrajectoryStore(run_dir / FOLDER)
    number = 0
    with new_folder(target) as folder:
        for step in store.steps() if steps is None else steps:
            episodes = list(store.read([step]))
            log = as_log(store.run, step, episodes, store.read_image)
            write_eval_log(log, folder / f"step-{step:06d}.eval", format="eval")
            number += len(episodes)
        if not number:
            raise UserError(f"{store.folder}: {NOTHING}")
    return number


def as_log(run: str, step: int, episodes: Sequence[Trajectory], load_image: LoadImage) -> EvalLog:
    """Return the episodes of a step as one log. load_image: SHA-256 -> PNG."""
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSpec

    names = list(dict.fromkeys(episode.group for episode in episodes))
    return EvalLog(
        status="success",
        eval=EvalSpec(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            task=_TASK,
            task_args={"run": run, "step": step},
            model=next((e.policy for e in episodes if e.policy), "policy"),
            dataset=EvalDataset(name=run, samples=len(names), sample_ids=names),
            config=EvalConfig(epochs=1 + max((e.sample for e in episodes), default=0)),
            packages={"scorekit": __version__},
            metadata={"run": run, "step": step},
        ),
        results=_results(episodes),
        samples=[_sample(episode, load_image) for episode in episodes],
    )


def _results(episodes: Sequence[Trajectory]) -> Any:
    from inspect_ai.log import EvalMetric, EvalResults, EvalScore

    return EvalResults(
        total_samples=len(episodes),
        completed_samples=sum(episode.end not in (None, "failed") for episode in episodes),
        scores=[
            EvalScore(
                name=row.name,
                scorer=row.name,
                scored_samples=row.num_known,
                unscored_samples=row.total - row.num_known,
                metrics={"mean": EvalMetric(name="mean", value=row.mean)},
            )
            for row in mean_stats(episodes)
            if row.mean is not None and row.name != "turns"
        ],
    )


def _sample(episode: Trajectory, load_image: LoadImage) -> EvalSample:
    """Return an episode as an Inspect sample: the sample is the question, the epoch the episode."""
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ModelOutput

    answer = episode.answer.text if episode.answer else None
    fields = {"trajectory_id", "attempt", "index_revision", "end", "end_detail", "reward", "answer"}
    return EvalSample(
        id=episode.group,
        epoch=1 + episode.sample,
        input=episode.question.question,
        target=episode.question.reference_answer,
        messages=list(_messages(episode, load_image)),
        output=ModelOutput.from_content(model=episode.policy or "policy", content=answer or ""),
        scores=_scores(episode),
        metadata=episode.model_dump(mode="json", include=fields, exclude_none=True)
        | {"gold": list(episode.question.gold)},
    )


def _scores(episode: Trajectory) -> dict[str, Score]:
    """Return the scores of an episode; a missing one has no entry."""
    from inspect_ai.scorer import Score

    answer = episode.answer.text if episode.answer else None
    scores = {}
    if episode.reward is not None and episode.reward.value is not None:
        parts = dict(episode.reward.parts)
        scores["reward"] = Score(value=episode.reward.value, metadata=parts)
    for name, judged in (("judge", episode.judged), ("grounded", episode.grounded)):
        if judged is not None and judged.score is not None:
            scores[name] = Score(value=judged.score, answer=answer, explanation=judged.reason)
    if episode.ndcg is not None:
        scores["NDCG"] = Score(value=episode.ndcg)
    return scores


def _messages(episode: Trajectory, load_image: LoadImage) -> Iterator[ChatMessage]:
    """Yield the question, then each turn and its observation."""
    from inspect_ai.model import ChatMessageAssistant, ChatMessageTool, ChatMessageUser
    from inspect_ai.tool import ToolCall

    yield ChatMessageUser(content=episode.question.question)
    for turn in episode.turns:
        tool = called_tool(turn)
        call = ToolCall(*tool) if tool else None
        metadata = {"forced": turn.forced, "reason": turn.reason, "rank": turn.rank}
        yield ChatMessageAssistant(
            content=turn.text,
            tool_calls=[call] if call else None,
            metadata={name: value for name, value in metadata.items() if value},
        )
        if turn.observation or turn.views:
            content = _content(turn, load_image)
            if call is None:
                yield ChatMessageUser(content=content)
            else:
                yield ChatMessageTool(content=content, tool_call_id=call.id, function=call.function)


def _content(turn: Turn, load_image: LoadImage) -> list[Content]:
    from inspect_ai.model import ContentImage, ContentText

    content: list[Content] = [ContentText(text=turn.observation)] if turn.observation else []
    for view in turn.views:
        data = base64.b64encode(load_image(view.image)).decode()
        content.append(ContentImage(image=f"data:image/png;base64,{data}"))
    return content
