"""Export the episodes of a search run to ATIF v1.8, or to logs that `inspect view` shows.

    python examples/export_trajectories.py runs/search atif
    python examples/export_trajectories.py runs/search logs --format inspect

ATIF (the Agent Trajectory Interchange Format of Harbor, RFC 0001): a JSON file for each episode,
and a folder of images. Data without a field in the format is in `extra`: the question with its gold
pages, hits and frames, the answer, judge, NDCG and the reward's components.

Inspect: a log for each step, written with the API of inspect-ai, as its authors recommend. The
extra `inspect` installs it, in an environment of its own.

For rows of `scorekit sft`, use `scorekit search export`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from urllib.parse import quote

import typer
from pydantic_core import to_json

from scorekit import __version__
from scorekit.command import clean_exit
from scorekit.errors import UserError
from trainer.search.records import Question, TokenRecord, Trajectory, Turn
from trainer.search.trajectories.exports import NOTHING, new_folder
from trainer.search.trajectories.layout import mean_stats
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSample
    from inspect_ai.model import ChatMessage, Content
    from inspect_ai.scorer import Score

NOTES = (
    "Step 1 is the question. A turn's text as it was written is its extra.text. A step with "
    "llm_call_count 0 was put in the policy's place."
)
THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
FUNCTIONS = {"search": "search", "crop": "crop", "complete": "search_complete"}
#: Max bytes of a file name, without its extension.
MAX_NAME_BYTES = 200

LoadImage = Callable[[str], bytes]


class CalledTool(NamedTuple):
    """An action as a tool call.

    id: unique in its episode.
    """

    id: str
    function: str
    arguments: dict[str, Any]


def called_tool(turn: Turn) -> CalledTool | None:
    """Return the tool call of a turn; None for an invalid action."""
    if turn.action not in FUNCTIONS:
        return None
    arguments: dict[str, Any] = {}
    if turn.action == "search":
        arguments = {"query": turn.query}
    elif turn.action == "crop":
        arguments = {"box": list(turn.box or ()), "convention": turn.convention}
    return CalledTool(f"call-{turn.number}", FUNCTIONS[turn.action], arguments)


# -- ATIF -----------------------------------------------------------------------------------------


def export_atif(run_dir: Path, target: Path, steps: Sequence[int] | None = None) -> int:
    """Write the episodes of a run (of these steps) into a folder that is new or empty; return their
    number. Raises UserError."""
    store = TrajectoryStore(run_dir / FOLDER)
    number = 0
    with new_folder(target) as folder:
        (folder / "images").mkdir()
        written: set[str] = set()
        for number, trajectory in enumerate(store.read(steps), 1):
            for sha256 in trajectory.images:
                if sha256 not in written:
                    (folder / _image_path(sha256)).write_bytes(store.read_image(sha256))
                    written.add(sha256)
            name = f"{trajectory.step:06d}-{quote(trajectory.trajectory_id, safe='')}"
            if len(name) > MAX_NAME_BYTES:
                name = f"{trajectory.step:06d}-{number:06d}"
            content = to_json(as_atif(trajectory), indent=1)
            (folder / f"{name}.json").write_bytes(content + b"\n")
        if not number:
            raise UserError(f"{store.folder}: {NOTHING}")
    return number


def as_atif(trajectory: Trajectory) -> dict[str, Any]:
    """Return an episode in ATIF."""
    question = {"step_id": 1, "source": "user", "message": trajectory.question.question}
    all_metrics = list(_metrics_by_turn(trajectory))
    turns = [
        _step(turn, number, metrics)
        for number, (turn, metrics) in enumerate(zip(trajectory.turns, all_metrics, strict=True), 2)
    ]
    tokens = [turn.tokens for turn in trajectory.turns if not turn.forced]
    fields = {"question", "step", "group", "sample", "attempt", "index_revision", "end"}
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": trajectory.run or "run",
        "trajectory_id": trajectory.trajectory_id,
        "agent": _present(
            name="scorekit-search", version=__version__, model_name=trajectory.policy or None
        ),
        "steps": [question, *turns],
        "notes": NOTES,
        "final_metrics": _present(
            total_completion_tokens=None if None in tokens else sum(filter(None, tokens)),
            total_steps=1 + len(turns),
            extra=_dumped(trajectory, {"ndcg", "reward", "judged", "grounded"}),
        ),
        "extra": _dumped(trajectory, fields | {"end_detail", "answer"}),
    }


def _present(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _image_path(sha256: str) -> str:
    return f"images/{sha256}.png"


def _dumped(record: Trajectory | Turn, fields: set[str]) -> dict[str, Any]:
    return record.model_dump(mode="json", include=fields, exclude_none=True)


def _step(turn: Turn, number: int, metrics: dict[str, Any] | None) -> dict[str, Any]:
    """Return a turn. Its llm_call_count is 0 if it was forced."""
    thought = THINK.match(turn.text)
    tool = called_tool(turn)
    call = None
    if tool is not None:
        call = {
            "tool_call_id": tool.id,
            "function_name": tool.function,
            "arguments": tool.arguments,
        }
    return _present(
        step_id=number,
        source="agent",
        message=turn.text[thought.end() :] if thought else turn.text,
        reasoning_content=thought[1] if thought and not turn.forced else None,
        tool_calls=None if call is None else [call],
        observation=_observation(turn, tool),
        metrics=metrics,
        llm_call_count=0 if turn.forced else 1,
        extra=_present(text=turn.text, policy_s=turn.policy_s, reason=turn.reason),
    )


def _observation(turn: Turn, tool: CalledTool | None) -> dict[str, Any] | None:
    if not turn.observation and not turn.views:
        return None
    parts: list[dict[str, Any]] = []
    if turn.observation:
        parts.append({"type": "text", "text": turn.observation})
    for view in turn.views:
        source = {"media_type": "image/png", "path": _image_path(view.image)}
        parts.append({"type": "image", "source": source})
    extra = _dumped(turn, {"hits", "views", "rank", "golden", "detail", "tool_s"})
    source_id = tool.id if tool else None
    return {"results": [_present(source_call_id=source_id, content=parts, extra=extra)]}


def _metrics_by_turn(trajectory: Trajectory) -> Iterator[dict[str, Any] | None]:
    """Yield the tokens of each turn, with ids if the episode has them; None for a forced turn.

    The sampled ids of the n-th turn are the n-th run of 1s in the action mask.
    """
    turns = [turn for turn in trajectory.turns if not turn.forced]
    sampled_runs = _sampled_runs(trajectory.tokens) if trajectory.tokens else []
    run_iterator = iter(sampled_runs if len(sampled_runs) == len(turns) else [])
    for turn in trajectory.turns:
        if turn.forced:
            yield None
            continue
        before, sampled = next(run_iterator, (None, None))
        yield _present(
            completion_tokens=turn.tokens if sampled is None else len(sampled),
            prompt_token_ids=before,
            completion_token_ids=sampled,
        )


def _sampled_runs(tokens: TokenRecord) -> list[tuple[list[int], list[int]]]:
    """Return (ids before, ids) of each run of sampled ids."""
    runs, start = [], 0
    for is_sampled, group in groupby(tokens.action_mask):
        end = start + len(list(group))
        if is_sampled:
            before = [*tokens.prompt_ids, *tokens.completion_ids[:start]]
            runs.append((before, tokens.completion_ids[start:end]))
        start = end
    return runs


# -- Inspect --------------------------------------------------------------------------------------


def export_inspect(run_dir: Path, target: Path, steps: Sequence[int] | None = None) -> int:
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
    """Return the episodes of a step as one log.

    load_image: SHA-256 -> PNG.
    """
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSpec

    names = list(dict.fromkeys(episode.group for episode in episodes))
    return EvalLog(
        status="success",
        eval=EvalSpec(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            task="search",
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
        target=_target(episode.question),
        messages=list(_messages(episode, load_image)),
        output=ModelOutput.from_content(model=episode.policy or "policy", content=answer or ""),
        scores=_scores(episode),
        metadata=episode.model_dump(mode="json", include=fields, exclude_none=True)
        | {"gold": list(episode.question.gold)},
    )


def _target(question: Question) -> str | list[str]:
    """Return the right answer, or all of them if there are several."""
    has_several = bool(question.other_answers)
    return list(question.reference_answers) if has_several else question.reference_answer


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


# -- the command ----------------------------------------------------------------------------------


def main(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")],
    target: Annotated[Path, typer.Argument(help="New folder.")],
    form: Annotated[
        Literal["atif", "inspect"],
        typer.Option("--format", help="ATIF v1.8, or logs for `inspect view`."),
    ] = "atif",
    step: Annotated[
        list[int] | None, typer.Option(help="Of this step; several may be. Default: all.")
    ] = None,
) -> None:
    """Export a run's trajectories, with their images, for other tools."""
    with clean_exit(stdout="log"):
        export = export_atif if form == "atif" else export_inspect
        typer.echo(f"episodes: {export(run_dir, target, step)} in {target}")


if __name__ == "__main__":
    typer.run(main)
