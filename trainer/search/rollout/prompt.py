"""Render the messages of the policy in one way for training, fine-tuning and chat servers.

A message is a text and the images before it. `template_messages` returns the form of chat
templates, `chat_messages` that of OpenAI's servers. Text from outside (a question, a page) is
escaped first, so no tokenizer reads a special token in it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scorekit.text.chat_marks import neutral
from trainer.search.config import EpisodeConfig, LinePart, SightConfig
from trainer.search.images.views import ShownImage
from trainer.search.records import ImageView, Question, Trajectory
from trainer.search.rollout.actions import BBOX, COMPLETE, SEARCH, SPELLING

_SYSTEM = """\
You search document pages for the evidence that a question needs. You do not answer it: another \
model does, which sees nothing but what you were shown.

Each turn is a think block and, on a new line behind it, exactly one action:
<think>what you know by now and what is missing</think>
{search} finds pages by what is on them, and shows {pages} that you have not seen yet.
{bbox} shows a part of the picture last shown, enlarged. {boxes}
{complete} ends the search: what you were shown is enough to answer.

Write nothing before the think block, and no action's tag inside it. Vary your queries by what you \
have seen; never repeat one. You have {turns}.{sight}"""
_TOOLS_SYSTEM = """\
You search document pages for the evidence that a question needs. You do not answer it: another \
model does, which sees nothing but what you were shown.

Call exactly one tool each turn:
search finds pages by what is on them, and shows {pages} that you have not seen yet.
crop shows a part of the picture last shown, enlarged. {boxes}
search_complete ends the search: what you were shown is enough to answer.

Vary your queries by what you have seen; never repeat one. You have {turns}.{sight}"""
#: How a policy writes its actions: as tags in its text, or as calls of tools.
ActionForm = Literal["tags", "tools"]
_TEXT_SIGHT = """

You are shown a picture as the lines of it that are large enough to read, each behind its box; \
what is too small to read is told by its box alone, and can be read when that part is shown \
enlarged."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation.

    images: come before the text.
    """

    role: Literal["system", "user", "assistant"]
    text: str
    images: tuple[ShownImage, ...] = ()


def opening(question: Question, cfg: EpisodeConfig, form: ActionForm = "tags") -> list[Message]:
    """Return the messages before the first turn."""
    turns = question.max_turns or cfg.max_turns
    if cfg.instructions is None:
        system = _instructions(turns, cfg, form)
    else:
        system = cfg.instructions.replace("{turns}", _turns_text(turns))
    return [Message("system", system), Message("user", f"Question: {neutral(question.question)}")]


def _instructions(turns: int, cfg: EpisodeConfig, form: ActionForm) -> str:
    several = cfg.pages_per_search > 1
    template = _SYSTEM if form == "tags" else _TOOLS_SYSTEM
    return template.format(
        search=SPELLING[SEARCH],
        bbox=SPELLING[BBOX],
        complete=SPELLING[COMPLETE],
        pages=f"the first {cfg.pages_per_search}" if several else "the first one",
        boxes=_convention(cfg.sight),
        turns=_turns_text(turns),
        sight=_TEXT_SIGHT if cfg.observation == "text" else "",
    )


def conversation(
    trajectory: Trajectory, cfg: EpisodeConfig, load_image: Callable[[str], bytes]
) -> list[Message]:
    """Return the conversation of an episode, for fine-tuning.

    The last observation, which the policy did not read, and a forced end, which it did not write,
    are left out.
    load_image: SHA-256 -> PNG.
    """
    messages = opening(trajectory.question, cfg)
    for turn in trajectory.turns:
        if not turn.forced:
            messages.append(Message("assistant", turn.text))
            images = [ShownImage(view, load_image(view.image)) for view in turn.views]
            messages.append(observation_message(turn.observation, images, cfg))
    return messages[:-1] if len(messages) > 2 else messages


def observation_message(text: str, images: Sequence[ShownImage], cfg: EpisodeConfig) -> Message:
    """Return the message of an observation."""
    return Message("user", text, tuple(images) if cfg.observation == "image" else ())


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form of chat templates, with one mark for each image."""
    return [_in_parts(message, lambda image: {"type": "image"}) for message in messages]


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form of OpenAI's chat completions."""
    return [_in_parts(message, _data_url) for message in messages]


def _in_parts(message: Message, part: Callable[[ShownImage], dict[str, Any]]) -> dict[str, Any]:
    if not message.images:
        return {"role": message.role, "content": message.text}
    parts = [part(image) for image in message.images]
    if message.text:
        parts.append({"type": "text", "text": message.text})
    return {"role": message.role, "content": parts}


def _data_url(image: ShownImage) -> dict[str, Any]:
    url = f"data:image/png;base64,{b64encode(image.png).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def page_line(view: ImageView, rank: int, hits: int, cfg: EpisodeConfig) -> str:
    """Return the line about a visible page; "" if the config asks for no part of it."""
    parts: dict[LinePart, str] = {"page": f"page {neutral(view.page_id)}"}
    return _line(parts | {"rank": f"rank {rank} of {hits}"}, view, cfg)


def crop_line(view: ImageView, cfg: EpisodeConfig) -> str:
    """Return the line about a visible crop."""
    return _line({"page": f"a part of page {neutral(view.page_id)}"}, view, cfg)


def _line(parts: dict[LinePart, str], view: ImageView, cfg: EpisodeConfig) -> str:
    _, width, height = _frame(view, cfg.sight)
    parts = parts | {"frame": f"{width} wide and {height} high"}
    line = ", ".join(text for part, text in parts.items() if part in cfg.observation_line)
    return f"{line[:1].upper()}{line[1:]}." if line else ""


def nothing_found(hits: int) -> str:
    """Return the text for a search without new pages.

    hits: number of its known pages.
    """
    if not hits:
        return "No page was found for this query. Search with other words."
    if hits == 1:
        return "The one page found for this query was shown before. Search with other words."
    return f"The {hits} pages found for this query were all shown before. Search with other words."


def correction(
    detail: str,
    view: ImageView | None,
    sight: SightConfig,
    *,
    box: bool,
    form: ActionForm = "tags",
) -> str:
    """Return the text for a turn without a valid action.

    detail: the problem.
    view: the last view.
    box: the action was a box; then the text has its frame.
    """
    spellings = ", ".join(SPELLING.values())
    advice = {
        "tags": f"Write <think>...</think>, and on a new line exactly one of {spellings}.",
        "tools": "Call exactly one of search, crop, search_complete.",
    }
    lines = [f"No action was taken: {detail}.", advice[form]]
    if box:
        nothing = "Nothing was shown yet: search first."
        lines.append(nothing if view is None else frame_rule(view, sight))
    return "\n".join(lines)


def frame_rule(view: ImageView, sight: SightConfig) -> str:
    """Return the rule for boxes of a view."""
    unit, width, height = _frame(view, sight)
    return (
        f"Boxes are in {unit} of the picture last shown, from its top left: 0 <= x1 < x2 <= "
        f"{width} and 0 <= y1 < y2 <= {height}."
    )


def turns_left(left: int, cfg: EpisodeConfig) -> str:
    """Return the last line of an observation."""
    return f"{_turns_text(left)} left." if "turns_left" in cfg.observation_line else ""


def _turns_text(turns: int) -> str:
    return "1 turn" if turns == 1 else f"{turns} turns"


def _frame(view: ImageView, sight: SightConfig) -> tuple[str, int, int]:
    """Return the unit of a box's numbers, and their max in x and in y."""
    if sight.box_convention == "pixel":
        return "pixels", view.width, view.height
    if sight.box_convention == "thousand":
        return "thousandths of the sides", 1000, 1000
    return "shares of the sides", 1, 1


def _convention(sight: SightConfig) -> str:
    """Return the rule for boxes in the instructions, before any view."""
    numbers = {
        "pixel": "The numbers are pixels of that picture, as wide and high as it is told to be",
        "thousand": "The numbers are thousandths of its sides, from 0 to 1000",
        "unit": "The numbers are shares of its sides, from 0 to 1",
    }[sight.box_convention]
    return f"{numbers}; from the top left, x1 < x2 and y1 < y2."
