"""Rows for `trainer sft`: of a run's episodes (a cold start), and of `distill` and `rewrite`.

A row has the same ids as in RL training: the same code joins them from the same prompts, and the
loss is on the policy's tokens. So fine-tuning uses the contexts of later sampling, whatever the
chat template does to earlier turns. The messages are for people and other trainers.

OUT/
    rows.jsonl       ids, action mask, messages, images by their hash
    rows.parquet     the same rows; `messages` as JSON text
    train1.parquet   uid, format_version, messages: for trainers that read only chats
    images/HASH.png  the images of the rows, each once
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, Literal

from scorekit.errors import UserError
from scorekit.numeric import below
from trainer.rl.sampler import SampledCompletion
from trainer.search.config import EpisodeConfig, SearchConfig
from trainer.search.records import Trajectory
from trainer.search.rollout.actions import TAGS
from trainer.search.rollout.episode_tokens import EpisodeTokens, TurnTokenizer
from trainer.search.rollout.prompt import Message, conversation, template_messages
from trainer.search.rollout.sampled import inspect_policy
from trainer.search.trajectories.exports import NOTHING, new_folder
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

#: Name of the rows in the folder.
ROWS = "rows.jsonl.gz"


#: Which episodes to export: only those that the policy ended, or also truncated ones.
Ended = Literal["complete", "any"]

_AT_ONCE = 200  # rows in a row group of Parquet
_FORMAT = "v1"


@dataclass(slots=True)
class SftExport:
    """The counts of an export.

    left_out: reason -> episodes.
    turns: in the rows.
    invalid: turns without loss.
    longest: max ids of a row."""

    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    invalid: int = 0
    longest: int = 0

    def count(self, row: Mapping[str, Any]) -> None:
        """Count a written row."""
        self.rows += 1
        self.turns += sum(message["role"] == "assistant" for message in row["messages"])
        self.invalid += len(row.get("leave_out", ()))
        self.longest = max(self.longest, len(row["input_ids"]))

    def lines(self) -> list[str]:
        """Return the counts as lines of text."""
        texts = [
            f"turns: {self.turns}, {self.invalid} of them invalid (in the context, without loss)"
        ]
        texts += [
            f"left out: {count} episodes: {reason}" for reason, count in self.left_out.items()
        ]
        return [*texts, f"the longest row has {self.longest} ids: --max_length {self.longest}"]


def export_sft(
    run_dir: Path,
    target: Path,
    cfg: SearchConfig,
    *,
    steps: Sequence[int] | None = None,
    end_filter: Ended = "complete",
    min_reward: float | None = None,
) -> SftExport:
    """Write the episodes of a run (of these steps) as rows for the model in `policy.path`, into a
    folder that is new or empty: `rows.jsonl.gz` and their images.

    cfg: of the run, with the settings of the model to train (policy, chat).
    end_filter: `any` also exports episodes that were forced, given up, or out of context, without
    the forced turn; failed ones never.
    min_reward: of an episode; None: any, also without a reward.
    Raises UserError.
    """
    store = TrajectoryStore(run_dir / FOLDER)
    rows = EpisodeRows(cfg)
    export = SftExport()
    with new_folder(target) as folder:
        with gzip.open(folder / ROWS, "wt", encoding="utf-8") as file:
            for trajectory in store.read(steps):
                reason = _skip_reason(trajectory, end_filter, min_reward)
                row = reason or rows.row(trajectory, store.read_image)
                if isinstance(row, str):
                    export.left_out[row] += 1
                    continue
                save_images(folder, row, store.read_image)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                export.count(row)
        if not export.rows:
            reasons = "; ".join(
                f"{count} left out: {reason}" for reason, count in export.left_out.items()
            )
            raise UserError(f"{store.folder}: {reasons or NOTHING}")
    return export


def as_sampled(
    trajectory: Trajectory, from_text: EpisodeTokens, ids: TurnTokenizer
) -> EpisodeTokens:
    """Return the episode with the sampled ids of its record, if they match this template.

    Otherwise return `from_text`. Sampled tokens may differ from the tokens of their
    text, and a truncated turn has no end id.
    """
    record = trajectory.tokens
    turns = [turn for turn in trajectory.turns if not turn.forced]
    if record is None or record.prompt_ids != from_text.prompt_ids:
        return from_text
    marked = zip(record.completion_ids, record.action_mask, strict=True)
    runs = [
        (action, [token for token, _ in run])
        for action, run in groupby(marked, lambda pair: pair[1])
    ]
    sampled = [run for action, run in runs if action]
    if len(sampled) != len(turns):
        return from_text
    episode = EpisodeTokens(from_text.prompt_ids)
    gaps = _gaps(from_text)
    for run, turn, gap in zip_longest(sampled, turns, gaps):
        if ids.text(run) != turn.text:
            return from_text
        episode.add_turn(SampledCompletion(run, None))
        if gap is not None:
            episode.add_observation(gap)
    same = (episode.completion_ids, episode.action_mask)
    return episode if same == (record.completion_ids, record.action_mask) else from_text


def _gaps(from_text: EpisodeTokens) -> list[list[int]]:
    """Return the ids between turns, each with the end id of the turn before."""
    gaps, last = [], 0
    marked = zip(from_text.completion_ids, from_text.action_mask, strict=True)
    for action, run in groupby(marked, lambda pair: pair[1]):
        tokens = [token for token, _ in run]
        if not action:
            gaps.append([last, *tokens])
        last = tokens[-1]
    return gaps


class EpisodeRows:
    """Build rows from episodes for the model in `policy.path`. Raises UserError."""

    def __init__(self, cfg: SearchConfig) -> None:
        if cfg.policy.path is None:
            raise UserError("policy.path: not set. Name the model to train (--model).")
        policy_inputs = inspect_policy(cfg)
        self.ids, self._context = policy_inputs.ids(cfg, policy_inputs.stops), policy_inputs.context
        self._cfg: EpisodeConfig = cfg.episode

    def row(
        self,
        trajectory: Trajectory,
        load_image: Callable[[str], bytes],
        masked_turns: Sequence[int] = (),
    ) -> dict[str, Any] | str:
        """Return a row, or the reason why there is none.

        load_image: SHA-256 -> PNG.
        masked_turns: the policy's turns, from 0, that get no loss, in addition to the invalid ones.
        """
        turns = [turn for turn in trajectory.turns if not turn.forced]
        invalid = {n for n, turn in enumerate(turns) if turn.action == "invalid"}
        left_out = sorted(invalid.union(masked_turns))
        if len(invalid) == len(turns):
            return "no turn is valid"
        has_images = self._cfg.observation == "image"
        messages = conversation(
            trajectory, self._cfg, load_image if has_images else lambda sha256: b""
        )
        episode = self.joined(messages)
        if isinstance(episode, str):
            return episode
        return _as_row(trajectory, messages, as_sampled(trajectory, episode, self.ids), left_out)

    def joined(self, messages: Sequence[Message]) -> EpisodeTokens | str:
        """Return the ids of a conversation as in RL training, each turn tokenized from its text.

        A str is the reason why there are none.
        """
        ids = self.ids
        end = ids.observation(Message("user", "-"))[0]
        added = ids.tokenizer.added_tokens_decoder.items()
        special = {i for i, token in added if token.special and token.content not in TAGS}
        first = next(n for n, message in enumerate(messages) if message.role == "assistant")
        episode = EpisodeTokens(ids.prompt(messages[:first]))
        for message in messages[first:]:
            if message.role != "assistant":
                episode.add_observation(ids.observation(message))
                continue
            text = ids.unopened(message.text)
            if text is None:
                return "a turn does not begin with the think block that the template opens"
            token_ids = ids.tokenizer(text, add_special_tokens=False)["input_ids"]
            if special & set(token_ids):
                return "a turn has a special token of the model in it"
            episode.add_turn(SampledCompletion([*token_ids, end], None))
        if len(episode.ids) > self._context:
            return f"more than the {self._context} ids that the model reads"
        return episode


def _as_row(
    trajectory: Trajectory, messages: Sequence[Message], episode: EpisodeTokens, left_out: list[int]
) -> dict[str, Any]:
    chat = template_messages(messages)
    replies = [message for message in chat if message["role"] == "assistant"]
    for number in left_out:
        replies[number]["weight"] = 0
    row = {
        "id": trajectory.trajectory_id,
        "reward": trajectory.reward_value,
        "messages": chat,
        **id_columns(episode),
    }
    images = [_image_path(image.view.image) for message in messages for image in message.images]
    return (
        row | ({"leave_out": left_out} if left_out else {}) | ({"images": images} if images else {})
    )


def id_columns(episode: EpisodeTokens) -> dict[str, list[int]]:
    """Return `input_ids` and `action_mask` of a row; the mask is 1 for the policy's tokens."""
    mask = [0] * len(episode.prompt_ids) + [int(action) for action in episode.action_mask]
    return {"input_ids": episode.ids, "action_mask": mask}


def _skip_reason(trajectory: Trajectory, end_filter: Ended, min_reward: float | None) -> str | None:
    """Return the reason why an episode is not exported; None: it is."""
    if trajectory.end == "failed" or (end_filter == "complete" and trajectory.end != "complete"):
        return f"ended as {trajectory.end}"
    if min_reward is None:
        return None
    if trajectory.reward_value is None:
        return "no reward"
    is_below = below(trajectory.reward_value, min_reward)
    return f"a reward below {min_reward:g}" if is_below else None


def save_images(folder: Path, row: Mapping[str, Any], load_image: Callable[[str], bytes]) -> None:
    """Write the images of a row into the folder, each once.

    load_image: SHA-256 -> PNG.
    """
    for name in row.get("images", ()):
        path = folder / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(load_image(path.stem))


def _image_path(sha256: str) -> str:
    return f"images/{sha256}.png"


class SftRowFile:
    """Rows by their id in an unnamed temporary file (TMPDIR), which are written in another order.

    One row is in memory at a time. Raises UserError if the disk is full.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as this)
        self._positions: dict[str, tuple[int, int]] = {}
        self._lengths: dict[str, int] = {}

    def put(self, row: Mapping[str, Any]) -> None:
        """Store a row."""
        line = zlib.compress(json.dumps(row).encode(), 1)
        start = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"no space for temporary files ({error}). Name another folder with TMPDIR=FOLDER."
            ) from None
        self._positions[row["id"]] = start, len(line)
        self._lengths[row["id"]] = len(row["input_ids"])

    def longest(self, ids: Iterable[str]) -> int:
        """Return the max number of `input_ids` of these rows; 0 without rows."""
        return max((self._lengths[id] for id in ids), default=0)

    def get(self, id: str) -> dict[str, Any]:
        """Return a row."""
        start, length = self._positions[id]
        self._file.seek(start)
        row: dict[str, Any] = json.loads(zlib.decompress(self._file.read(length)))
        return row


def write_sft_rows(
    folder: Path, rows: Iterable[tuple[Mapping[str, Any], Callable[[str], bytes]]]
) -> None:
    """Write rows in their order and their images, with one row in memory at a time.

    rows: (row, function SHA-256 -> PNG). train1.parquet has no mask, so its readers train on all
    turns of the assistant. Therefore rows with masked turns are not in it.
    """
    import pyarrow as pa

    ints = pa.list_(pa.int32())
    columns = [("id", pa.string()), ("question_id", pa.string()), ("run", pa.string())]
    columns += [(name, pa.float64()) for name in ("reward", "judge", "ndcg", "rate")]
    columns += [("messages", pa.string()), ("images", pa.list_(pa.string()))]
    columns += [(name, ints) for name in ("input_ids", "action_mask", "leave_out")]
    train1 = pa.schema([(name, pa.string()) for name in ("uid", "format_version", "messages")])
    with ExitStack() as open_files:
        lines = open_files.enter_context((folder / "rows.jsonl").open("w", encoding="utf-8"))
        table = open_files.enter_context(_parquet(folder / "rows.parquet", pa.schema(columns)))
        chats = open_files.enter_context(_parquet(folder / "train1.parquet", train1))
        for number, (row, load_image) in enumerate(rows):
            save_images(folder, row, load_image)
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            table({**row, "messages": json.dumps(row["messages"], ensure_ascii=False)})
            if not row.get("leave_out"):
                chats(train1_row(row, number))


def train1_row(row: Mapping[str, Any], number: int) -> dict[str, str]:
    """Return a row of train1.parquet.

    Images are parts `{"image": path}` of the user's turns, with paths relative to the file; text
    beside an image is a part `{"text": ...}`.
    """
    images = iter(row.get("images", ()))
    messages = [
        {"role": message["role"], "content": _parts(message["content"], images)}
        for message in row["messages"]
    ]
    return {
        "uid": f"{row['question_id']}__s{number}__{row['run']}",
        "format_version": _FORMAT,
        "messages": json.dumps(messages, ensure_ascii=False, separators=(",", ":")),
    }


def _parts(content: Any, images: Iterator[str]) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"image": next(images)} if part["type"] == "image" else {"text": part["text"]}
        for part in content
    ]


@contextmanager
def _parquet(path: Path, schema: Any) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Open a Parquet file and yield a function that writes a row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffered: list[Mapping[str, Any]] = []
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:

        def flush() -> None:
            writer.write_table(pa.Table.from_pylist(buffered, schema=schema))
            buffered.clear()

        def write(row: Mapping[str, Any]) -> None:
            buffered.append(row)
            if len(buffered) == _AT_ONCE:
                flush()

        yield write
        flush()


def longest_lines(ids: int) -> list[str]:
    """Return a line about the longest row; none without rows."""
    return [f"the longest row has {ids} ids: scorekit sft --max_length {ids}"] if ids else []
