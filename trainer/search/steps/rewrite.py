"""The step `rewrite`: rewrite only the thoughts of distilled rows.

A call has a few turns of a row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from pydantic import Field, model_validator

from scorekit.config import Config
from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.llm import LLMError
from scorekit.llm.wire import Choice
from scorekit.llm.wire import parse_json as parse_answer
from scorekit.net.loops import gather_or_cancel
from scorekit.paid.account import max_usage
from scorekit.text.chat_marks import split_special_tokens
from trainer.config_base import may_change
from trainer.search.answer.config import AnsweringConfig, ChatModelConfig, PriceConfig
from trainer.search.answer.models import CachedChat, PaidText, estimated_words
from trainer.search.config import SearchConfig
from trainer.search.images.views import ShownImage
from trainer.search.records import ImageView
from trainer.search.rollout.prompt import Message
from trainer.search.steps.asking import Asking, Models, object_schema
from trainer.search.steps.episodes import digest_of
from trainer.search.steps.prior import read_decisions
from trainer.search.steps.shared_config import SharedConfig
from trainer.search.steps.step import Decision, Outcome, Section, Step, Work, WorkItem
from trainer.search.steps.targets import has_tag, thoughts
from trainer.sft.curation_record import CurationRecord

if TYPE_CHECKING:  # it imports torch
    from trainer.search.steps.sft_rows import EpisodeRows, SftRowFile

REWRITER: Final = "rewriter"

_TURN: Final = object_schema(turn={"type": "integer"}, thought={"type": "string"})

SCHEMA: Final = object_schema(turns={"type": "array", "items": _TURN})

REWRITTEN, UNCHANGED, TAGGED = "rewritten", "unchanged", "a tag in the original's thought"

NOT_ASKED = "not asked: no answer was got"

_SHOWN = 20  # max examples on the page

_NEEDED = ("id", "question_id", "run", "messages", "input_ids", "action_mask")

REWRITE = """\
You edit what an agent thought while it searched document pages. You are given its question and \
some of its turns: of each a number, the action that it took, and what it thought before it.

Say each thought again in clear and fluent words of its own language, about as long as it was. \
This is editing: add no fact, no number and no name, and be no surer than the thought was. Never \
say that something is seen, shown or visible where the thought does not say so. Write no tag: \
neither of an action (search, bbox, search_complete), nor of an answer, nor of a think block.

Answer with JSON: for each turn its number and its thought."""


class RewriterConfig(ChatModelConfig):
    """The rewriting model, on any OpenAI-compatible server that supports a JSON schema."""

    api_key_env: str = may_change(
        "REWRITER_API_KEY", description="Environment variable with the server's key."
    )
    system: str = Field(REWRITE, description="Instructions.")
    max_output_tokens: int = Field(
        6000, ge=1, description="Most tokens of an answer, its thinking included."
    )


class RewriteConfig(Config):
    """The rewriting of think blocks; the actions of the policy stay unchanged."""

    rewriter: RewriterConfig = Field(default_factory=RewriterConfig, description="Who rewrites.")
    price: PriceConfig | None = may_change(None, description="Its price; null: free, or not known.")
    cap: float | None = may_change(None, gt=0, description="Most that may be spent; needs a price.")
    messages_per_call: int = Field(3, ge=1, description="Turns of an episode in one call, at most.")
    broken: Literal["original", "drop"] = Field(
        "original",
        description="A row that breaks a guarantee, or whose call failed: original: it stays as it "
        "was; drop: it goes.",
    )
    longer_at_most: float = Field(
        3.0, ge=1, description="A thought may become so many times as long, where over 200 letters."
    )

    @model_validator(mode="after")
    def _cap_needs_a_price(self) -> RewriteConfig:
        if self.cap is not None and self.price is None:
            raise ValueError("cap: needs a price: without one nothing is ever spent")
        return self


@dataclass(frozen=True, slots=True)
class OriginalThought:
    """The thought of a turn.

    turn: index of its message in the conversation.
    action: its text, for context."""

    turn: int
    action: str
    thought: str


class Distilled:
    """An output folder of `search distill`.

    record: decisions about its rows.

    Raises UserError if it is another folder or its rows are damaged.
    """

    def __init__(self, folder: Path, record: CurationRecord) -> None:
        self.folder, self.record = folder, record
        self.manifest, _ = read_decisions(folder, "distill")
        self.rows_file = folder / "rows.jsonl"
        if not self.rows_file.is_file():
            raise UserError(f"{self.rows_file}: does not exist. Run `search distill` again.")
        self._learners: dict[str, EpisodeRows] = {}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield its rows, with one in memory at a time."""
        with self.rows_file.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = parse_json(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict) or any(name not in row for name in _NEEDED):
                    raise UserError(f"{self.rows_file}, line {number}: not a row of `distill`")
                yield row

    def read_image(self, sha256: str) -> bytes:
        """Return the PNG of a hash. Raises UserError."""
        path = self.folder / "images" / f"{sha256}.png"
        try:
            return path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror or error}. Run `search distill` again."
            ) from None

    def learner(self, run: str) -> EpisodeRows:
        """Return the row builder of a run for the model to train. Raises UserError."""
        from trainer.search.steps.sft_rows import EpisodeRows

        if run not in self._learners:
            try:
                cfg = SearchConfig.model_validate(self.manifest["learner"][run])
            except (KeyError, TypeError, ValueError):
                path = self.folder / "manifest.json"
                raise UserError(f"{path}: has no entry of the run {run!r}") from None
            self._learners[run] = EpisodeRows(cfg)
        return self._learners[run]


@dataclass(frozen=True, slots=True)
class _RowOutcome:
    """The outcome of a row: the new row (None: dropped) and the reason.

    changed: thoughts before and after.
    doubted: reason -> number of rejected new thoughts, whose originals are kept.
    """

    row: dict[str, Any] | None
    reason: str
    num_requests: int = 0
    changed: Sequence[tuple[str, str]] = ()
    doubted: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewriteFiles:
    """The folder of `distill`, and the rows that are written."""

    source: Distilled
    rows: SftRowFile


class Rewrite(Step[RewriteConfig]):
    """Rewrite the thoughts of distilled rows with a model; their actions stay unchanged."""

    name = "rewrite"
    title = "Rewritten thoughts"
    config = RewriteConfig
    options = (
        *("distilled", "out", "record", "verified", "exclude", "config", "set_", "overwrite"),
        "estimate",
    )
    further = MappingProxyType(
        {
            "distilled": (
                Annotated[Path, typer.Option("--from", help="Folder that `distill` has left.")],
                ...,
            ),
            "estimate": (
                Annotated[
                    bool,
                    typer.Option("--estimate", help="Say what it asks for at most; ask nobody."),
                ],
                False,
            ),
        }
    )
    needs = "distill"
    asks = (REWRITER,)
    drops = True

    def plan(self, work: Work[RewriteConfig]) -> list[WorkItem]:
        """Return an item for each row with a thought that may be rewritten.

        Raises UserError if the folder is another one or its rows are damaged.
        """
        cfg, items = work.settings, []
        source = Distilled(work.options.further["distilled"], work.prior.record)
        for row in source.rows():
            if _drop_reason(row, source) is None:
                calls = [
                    (thoughts_prompt(_question(row), group), group)
                    for group in _groups(_thoughts_to_rewrite(row), cfg.messages_per_call)
                ]
                system = cfg.rewriter.system
                usages = [
                    max_usage(cfg.rewriter, estimated_words(system, text)) for text, _ in calls
                ]
                items.append(WorkItem(row["id"], calls, {REWRITER: usages}))
        return items

    def models(self, work: Work[RewriteConfig]) -> Models:
        """Return the rewriting model."""
        cfg = work.settings
        return Models(chats={REWRITER: (cfg.rewriter, cfg.price)}, cap=cfg.cap)

    def resources(self, work: Work[RewriteConfig]) -> AbstractContextManager[Any]:
        """Open the folder of `distill`, and the file of the rows."""
        from trainer.search.steps.sft_rows import SftRowFile

        source = Distilled(work.options.further["distilled"], work.prior.record)
        return nullcontext(RewriteFiles(source, SftRowFile()))

    async def ask(
        self, item: WorkItem, asking: Asking, work: Work[RewriteConfig]
    ) -> list[dict[int, str] | None]:
        """Return the answer of each call about a row, as `rewritten` does."""
        chat = asking.chats[REWRITER]
        return await gather_or_cancel([rewritten(chat, *call) for call in item.subject])

    def decide(self, work: Work[RewriteConfig], answers: Mapping[str, Any]) -> Outcome:
        """Put the rows with rewritten thoughts into the file and return a decision for each.

        Raises UserError if the model to train has changed, or an image is missing.
        """
        source, rows = work.resources.source, work.resources.rows
        outcome = self.outcome(work)
        outcome.inputs = {"rows.jsonl": digest_of(source.rows_file), **outcome.inputs}
        examples: list[tuple[str, str]] = []
        doubted: Counter[str] = Counter()
        for row in source.rows():
            result = _rewritten(row, source, answers.get(row["id"], ()), work.settings)
            stats = {
                "question_id": row["question_id"],
                "thoughts": result.num_requests,
                "changed": len(result.changed),
                "doubted": dict(result.doubted),
            }
            is_kept = result.row is not None
            outcome.decisions.append(
                Decision(row["id"], is_kept, result.reason, stats, [row["id"]])
            )
            if result.row is not None:
                rows.put(result.row)
            if result.reason == REWRITTEN:
                examples.extend(result.changed[: _SHOWN - len(examples)])
            doubted.update(result.doubted)
        outcome.extra = {
            "longest_row": rows.longest(outcome.kept_ids),
            "learner": source.manifest["learner"],
            "doubted": dict(sorted(doubted.items())),
            "examples": [list(pair) for pair in examples],
        }
        return outcome

    def write_rows(self, work: Work[RewriteConfig], outcome: Outcome, folder: Path) -> bool:
        """Write the rows and their images."""
        from trainer.search.steps.sft_rows import write_sft_rows

        source, rows = work.resources.source, work.resources.rows
        kept_rows = map(rows.get, outcome.kept_ids)
        write_sft_rows(folder, ((row, source.read_image) for row in kept_rows))
        return True

    def sections(self, work: Work[RewriteConfig], outcome: Outcome) -> list[Section]:
        """Return outcomes of rows, and examples of thoughts before and after."""
        counts = Counter(decision.reason for decision in outcome.decisions)
        return [
            Section("Rows", [], ["what became of them", "rows"], list(counts.items())),
            Section(
                "Thoughts in doubt",
                ["The original stays."],
                ["why the new one is doubtful", "thoughts"],
                list(outcome.extra["doubted"].items()),
            ),
            Section("Thoughts", [], ["before", "after"], outcome.extra["examples"]),
        ]

    def lines(self, work: Work[RewriteConfig], outcome: Outcome) -> list[str]:
        """Return the length of the longest row."""
        from trainer.search.steps.sft_rows import longest_lines

        return longest_lines(outcome.extra["longest_row"])

    def loop_error(self, cfg: SharedConfig, answering: AnsweringConfig) -> str | None:
        """Return why a loop must not start without a rewriter."""
        return None if cfg.rewrite.rewriter.model else "curation.rewrite.rewriter.model: not set"


def _rewritten(
    row: dict[str, Any],
    distilled: Distilled,
    answers: Sequence[dict[int, str] | None],
    cfg: RewriteConfig,
) -> _RowOutcome:
    """Return the outcome of a row.

    answers: of its calls.
    """
    if reason := _drop_reason(row, distilled):
        return _RowOutcome(None, reason)
    originals = _thoughts_to_rewrite(row)
    fallback = row if cfg.broken == "original" else None
    if any(answer is None for answer in answers):
        return _RowOutcome(fallback, NOT_ASKED, len(originals))
    new = {turn: thought for answer in answers if answer for turn, thought in answer.items()}
    if set(new) != {original.turn for original in originals}:
        return _RowOutcome(fallback, "other structure", len(originals))
    new, doubted = _without_doubtful(originals, new, cfg)
    if doubted and cfg.broken == "drop":
        return _RowOutcome(None, next(iter(doubted)), len(originals), (), doubted)
    from trainer.search.steps.fidelity import row_breach

    messages, changed = _with_thoughts(row["messages"], originals, new)
    if not changed:
        return _RowOutcome(row, next(iter(doubted), UNCHANGED), len(originals), (), doubted)
    if breach := row_breach(row["messages"], messages, cfg.longer_at_most):
        return _RowOutcome(fallback, breach, len(originals), changed, doubted)
    columns = _ids(row, messages, distilled)
    if isinstance(columns, str):
        return _RowOutcome(fallback, columns, len(originals), changed, doubted)
    new_row = {**row, "messages": messages, **columns}
    return _RowOutcome(new_row, REWRITTEN, len(originals), changed, doubted)


async def rewritten(
    chat: CachedChat, text: str, thoughts: Sequence[OriginalThought]
) -> dict[int, str] | None:
    """Return the rewritten thought of each turn.

    text: of `thoughts_prompt`.

    Empty if the answer has another form; None without an answer. Raises UserError,
    BudgetExceeded.
    """
    system = chat.cfg.system
    try:
        reply, _ = await chat.ask(
            [text, chat.settings()],
            lambda: [
                {"role": "system", "content": system},
                {"role": "user", "content": text},
            ],
            words=estimated_words(system, text),
            schema=SCHEMA,
        )
    except (LLMError, TimeoutError):
        return None
    return _read(reply, thoughts)


def _groups(thoughts: Sequence[OriginalThought], size: int) -> Iterator[Sequence[OriginalThought]]:
    """Yield groups of at most `size` thoughts."""
    return (thoughts[start : start + size] for start in range(0, len(thoughts), size))


def thoughts_prompt(question: str, thoughts: Sequence[OriginalThought]) -> str:
    """Return the user message of a call. Special tokens become text; tags of actions stay."""
    turns = [{"turn": t.turn, "action": t.action, "thought": t.thought} for t in thoughts]
    text = json.dumps({"question": question, "turns": turns}, ensure_ascii=False)
    return split_special_tokens(text)


def _read(reply: PaidText, thoughts: Sequence[OriginalThought]) -> dict[int, str]:
    """Return the thoughts of an answer; empty for an invalid one."""
    try:
        answer = parse_answer(Choice(0, reply.text or "", "stop", None), SCHEMA)
    except LLMError:
        return {}
    turns: list[Mapping[str, Any]] = answer["turns"]
    if [entry["turn"] for entry in turns] != [entry.turn for entry in thoughts]:
        return {}
    return {entry["turn"]: entry["thought"] for entry in turns}


def _drop_reason(row: Mapping[str, Any], distilled: Distilled) -> str | None:
    """Return why a row is dropped without a call (a decision, or a tag in a thought), or None."""
    if reason := distilled.record.no_example(row["question_id"], row["id"]):
        return reason
    texts = (message["content"] for message in row["messages"] if message["role"] == "assistant")
    if any(has_tag(thought) for text in texts for thought in thoughts(text, unclosed=True)):
        return TAGGED
    return None


def _without_doubtful(
    originals: Sequence[OriginalThought], new: Mapping[int, str], cfg: RewriteConfig
) -> tuple[dict[int, str], dict[str, int]]:
    """Return (turn -> new thought, or the original for an invalid one; reason -> count)."""
    from trainer.search.steps.fidelity import thought_breach

    trusted, doubted = dict(new), Counter[str]()
    for original in originals:
        thought = new[original.turn].strip()
        if thought == original.thought:
            continue
        if breach := thought_breach(original.thought, thought, cfg.longer_at_most):
            trusted[original.turn] = original.thought
            doubted[breach] += 1
    return trusted, dict(doubted)


def _thoughts_to_rewrite(row: Mapping[str, Any]) -> list[OriginalThought]:
    """Return the thoughts that are not empty of all turns with loss."""
    replies = [n for n, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    indices = [n for turn, n in enumerate(replies) if turn not in row.get("leave_out", ())]
    items = []
    for n in indices:
        text = row["messages"][n]["content"]
        action = text.rpartition("</think>")[2].strip()
        items += [
            OriginalThought(n, action, thought.strip())
            for thought in thoughts(text)
            if thought.strip()
        ]
    return items


def _question(row: Mapping[str, Any]) -> str:
    message_ = next(message for message in row["messages"] if message["role"] == "user")
    return str(message_["content"]).removeprefix("Question: ")


def _with_thoughts(
    messages: Sequence[Mapping[str, Any]],
    originals: Sequence[OriginalThought],
    new: Mapping[int, str],
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Return the messages with new thoughts, with unchanged blanks, and the changed pairs."""
    from trainer.search.steps.fidelity import with_thought

    new_messages, changed = [dict(message) for message in messages], []
    for original in originals:
        text, thought = new_messages[original.turn]["content"], new[original.turn].strip()
        if thought != original.thought:
            changed.append((original.thought, thought))
            (before,) = thoughts(text)
            new_messages[original.turn]["content"] = with_thought(
                text, before.replace(original.thought, thought, 1)
            )
    return new_messages, changed


def _ids(
    row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], distilled: Distilled
) -> dict[str, list[int]] | str:
    """Return ids and mask of a conversation, or the reason why there are none.

    They come from the code for episodes. Raises UserError if the model to train has changed.
    """
    from trainer.search.steps.sft_rows import id_columns

    episode = distilled.learner(row["run"]).joined(_read_messages(messages, row, distilled))
    if isinstance(episode, str):
        return episode
    if row["input_ids"][: len(episode.prompt_ids)] != episode.prompt_ids:
        raise UserError(
            f"{distilled.folder}: {row['id']}: the model to train, or its chat template, has "
            "changed since the row was distilled. Run `search distill` again."
        )
    return id_columns(episode)


def _read_messages(
    messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], distilled: Distilled
) -> list[Message]:
    """Return the messages in the form before `template_messages`."""
    images = iter(row.get("images", ()))
    result = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        texts = [part["text"] for part in parts if part["type"] == "text"]
        images_of_message = [
            _image(distilled.read_image(Path(next(images)).stem))
            for part in parts
            if part["type"] == "image"
        ]
        result.append(Message(message["role"], "".join(texts), tuple(images_of_message)))
    return result


def _image(png: bytes) -> ShownImage:
    """Return an image; the processor needs only its size."""
    from PIL import Image

    with Image.open(BytesIO(png)) as opened:
        width, height = opened.size
    view = ImageView(
        kind="page",
        page_id="",
        width=width,
        height=height,
        region=(0.0, 0.0, float(width), float(height)),
        page_width=width,
        page_height=height,
        image="",
    )
    return ShownImage(view, png)
