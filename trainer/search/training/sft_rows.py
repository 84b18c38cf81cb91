"""Export of a run's episodes as rows for `trainer sft`: the cold start of a policy.

A row has the ids that reinforcement makes of the episode, joined by the same code from the same
prompts, and learns where the policy wrote: so the policy is tuned behind the very contexts that it
is sampled in, whatever the chat template does to earlier turns. The messages stand beside, for eyes
and other trainers.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, Literal

from scorekit.errors import UserError
from scorekit.numeric.thresholds import below
from trainer.rl.sampler import Sampled
from trainer.search.actions import TAGS
from trainer.search.config import SearchConfig
from trainer.search.local import look_at_policy
from trainer.search.records import Trajectory
from trainer.search.trajectories.exports import NOTHING, new_folder
from trainer.search.trajectories.store import FOLDER, TrajectoryStore
from trainer.search.turns.config import EpisodeConfig
from trainer.search.turns.joined import JoinedEpisode, TurnIds
from trainer.search.turns.prompt import Message, conversation, template_messages

#: Name of the rows in the folder.
ROWS = "rows.jsonl.gz"
#: Which episodes: those whose policy ended the search, or also those that were cut short.
Ended = Literal["complete", "any"]


@dataclass(slots=True)
class SftExport:
    """What was written. left_out: why -> episodes. turns, invalid: in the rows; those that are
    read and not learned. longest: ids of a row."""

    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    invalid: int = 0
    longest: int = 0

    def count(self, row: Mapping[str, Any]) -> None:
        """A row that was written."""
        self.rows += 1
        self.turns += sum(message["role"] == "assistant" for message in row["messages"])
        self.invalid += len(row.get("leave_out", ()))
        self.longest = max(self.longest, len(row["input_ids"]))

    def lines(self) -> list[str]:
        """For the command."""
        told = [f"turns: {self.turns}, of which {self.invalid} are invalid: read, and not learned"]
        told += [f"left out: {count} episodes: {why}" for why, count in self.left_out.items()]
        return [*told, f"the longest row has {self.longest} ids: --max_length {self.longest}"]


def export_sft(
    run_dir: Path,
    target: Path,
    cfg: SearchConfig,
    *,
    steps: Sequence[int] | None = None,
    ended: Ended = "complete",
    least_reward: float | None = None,
) -> SftExport:
    """Write the episodes of a run (of these steps) as rows for the model in `policy.path`, into a
    folder that is new or empty: `rows.jsonl.gz` and their pictures.

    cfg: of the run, with what the model that learns has otherwise (policy, chat). ended: `any` also
    takes episodes that were forced, given up, or out of context, without the forced turn; failed
    ones never. least_reward: of an episode; None: any, also none. Raises UserError.
    """
    store = TrajectoryStore(run_dir / FOLDER)
    rows = EpisodeRows(cfg)
    done = SftExport()
    with new_folder(target) as folder:
        with gzip.open(folder / ROWS, "wt", encoding="utf-8") as file:
            for trajectory in store.read(steps):
                why = _unwanted(trajectory, ended, least_reward)
                row = why or rows.row(trajectory, store.picture)
                if isinstance(row, str):
                    done.left_out[row] += 1
                    continue
                keep_pictures(folder, row, store.picture)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                done.count(row)
        if not done.rows:
            told = "; ".join(f"{count} left out: {why}" for why, count in done.left_out.items())
            raise UserError(f"{store.folder}: {told or NOTHING}")
    return done


def joined(messages: Sequence[Message], ids: TurnIds) -> JoinedEpisode | str:
    """A conversation in the ids that reinforcement would have, were each turn sampled as its text
    is tokenised; or why it has none."""
    end = ids.observation(Message("user", "-"))[0]
    added = ids.tokenizer.added_tokens_decoder.items()
    special = {i for i, token in added if token.special and token.content not in TAGS}
    first = next(n for n, message in enumerate(messages) if message.role == "assistant")
    episode = JoinedEpisode(ids.prompt(messages[:first]))
    for message in messages[first:]:
        if message.role != "assistant":
            episode.add_observation(ids.observation(message))
            continue
        text = ids.unopened(message.text)
        if text is None:
            return "a turn does not begin with the think block that the template opens"
        read = ids.tokenizer(text, add_special_tokens=False)["input_ids"]
        if special & set(read):
            return "a turn has a special token of the model in it"
        episode.add_turn(Sampled([*read, end], None))
    return episode


def as_sampled(trajectory: Trajectory, made: JoinedEpisode, ids: TurnIds) -> JoinedEpisode:
    """The episode in the ids that its policy sampled, where they stand in its record and are of
    this template; else as it was made from texts. A text may be sampled in other tokens than it is
    tokenised into, and a turn that was cut off has no end of its own."""
    record = trajectory.tokens
    turns = [turn for turn in trajectory.turns if not turn.forced]
    if record is None or record.prompt_ids != made.prompt_ids:
        return made
    marked = zip(record.completion_ids, record.action_mask, strict=True)
    runs = [
        (action, [token for token, _ in run]) for action, run in groupby(marked, lambda one: one[1])
    ]
    sampled = [run for action, run in runs if action]
    if len(sampled) != len(turns):
        return made
    episode = JoinedEpisode(made.prompt_ids)
    gaps = _gaps(made)
    for run, turn, gap in zip_longest(sampled, turns, gaps):
        if ids.text(run) != turn.text:
            return made
        episode.add_turn(Sampled(run, None))
        if gap is not None:
            episode.add_observation(gap)
    same = (episode.completion_ids, episode.action_mask)
    return episode if same == (record.completion_ids, record.action_mask) else made


def _gaps(made: JoinedEpisode) -> list[list[int]]:
    """What stands between its turns, from the id that ends one on."""
    found, last = [], 0
    marked = zip(made.completion_ids, made.action_mask, strict=True)
    for action, run in groupby(marked, lambda one: one[1]):
        tokens = [token for token, _ in run]
        if not action:
            found.append([last, *tokens])
        last = tokens[-1]
    return found


class EpisodeRows:
    """Episodes -> rows, for the model in `policy.path`. Raises UserError."""

    def __init__(self, cfg: SearchConfig) -> None:
        if cfg.policy.path is None:
            raise UserError("policy.path is not set: name the model that is to learn (--model)")
        reads = look_at_policy(cfg)
        self.ids, self._context = reads.ids(cfg, reads.stops), reads.context
        self._cfg: EpisodeConfig = cfg.episode

    def row(
        self,
        trajectory: Trajectory,
        picture: Callable[[str], bytes],
        unlearned: Sequence[int] = (),
    ) -> dict[str, Any] | str:
        """A row; or why there is none. picture: PNG by its hash. unlearned: the policy's turns,
        counted from 0, that are read and not learned, beside the invalid ones."""
        turns = [turn for turn in trajectory.turns if not turn.forced]
        invalid = {n for n, turn in enumerate(turns) if turn.action == "invalid"}
        left_out = sorted(invalid.union(unlearned))
        if len(invalid) == len(turns):
            return "no turn is valid"
        sees = self._cfg.observation == "image"
        messages = conversation(trajectory, self._cfg, picture if sees else lambda sha256: b"")
        episode = self.joined(messages)
        if isinstance(episode, str):
            return episode
        return _as_row(trajectory, messages, as_sampled(trajectory, episode, self.ids), left_out)

    def joined(self, messages: Sequence[Message]) -> JoinedEpisode | str:
        """A conversation in ids, each turn as its text is tokenised; or why it has none."""
        episode = joined(messages, self.ids)
        if not isinstance(episode, str) and len(episode.ids) > self._context:
            return f"more than the {self._context} ids that the model reads"
        return episode


def _as_row(
    trajectory: Trajectory, messages: Sequence[Message], episode: JoinedEpisode, left_out: list[int]
) -> dict[str, Any]:
    told = template_messages(messages)
    replies = [message for message in told if message["role"] == "assistant"]
    for number in left_out:
        replies[number]["weight"] = 0
    reward = trajectory.reward.value if trajectory.reward else None
    row = {
        "id": trajectory.trajectory_id,
        "reward": reward,
        "messages": told,
        **id_columns(episode),
    }
    images = [_picture(shown.view.image) for message in messages for shown in message.images]
    return (
        row | ({"leave_out": left_out} if left_out else {}) | ({"images": images} if images else {})
    )


def id_columns(episode: JoinedEpisode) -> dict[str, list[int]]:
    """`input_ids` and `action_mask` of a row: 1 where the policy wrote."""
    mask = [0] * len(episode.prompt_ids) + [int(action) for action in episode.action_mask]
    return {"input_ids": episode.ids, "action_mask": mask}


def _unwanted(trajectory: Trajectory, ended: Ended, least_reward: float | None) -> str | None:
    """Why an episode is no row; None: it may be one."""
    if trajectory.end == "failed" or (ended == "complete" and trajectory.end != "complete"):
        return f"ended as {trajectory.end}"
    if least_reward is None:
        return None
    reward = trajectory.reward.value if trajectory.reward else None
    if reward is None:
        return "no reward"
    return f"a reward below {least_reward:g}" if below(reward, least_reward) else None


def keep_pictures(folder: Path, row: Mapping[str, Any], picture: Callable[[str], bytes]) -> None:
    """Write the pictures of a row beside the rows, each once. picture: PNG by its hash."""
    for name in row.get("images", ()):
        path = folder / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(picture(path.stem))


def _picture(sha256: str) -> str:
    return f"images/{sha256}.png"
