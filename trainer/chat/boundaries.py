"""Whether a chat template lets a model learn where its turns begin and end.

A model that was never shown the end of its turn as something to learn goes on writing: the loss
looks healthy, and every completion is cut by its limit. Each check is of the text and the ids
themselves, not of what a template says that it does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scorekit.errors import UserError
from trainer.chat.config import ChatConfig
from trainer.chat.labelling import Labelled, Learned, label
from trainer.chat.markers import MarkedTemplate, candidates, has_markers
from trainer.chat.probes import probes
from trainer.chat.render import Turns, own_template, read_template, render
from trainer.chat.stops import end_ids

log = logging.getLogger(__name__)

_FIX = "python -m trainer template-check --fix writes one with the markers in their place"
#: Check -> what is right, and what mends it.
CHECKS = {
    "template": (
        "every conversation is rendered",
        "mend these rows, or name a template that takes them in chat.template",
    ),
    "markers": (
        "every turn of the assistant is marked",
        f"{_FIX}; where it cannot, the template writes a turn in another way once others follow: "
        "learn one turn a row (turns: each)",
    ),
    "labelled text": (
        "what is labelled is the reply and the end of its turn",
        f"{_FIX}; an empty block of thoughts becomes the prompt's by chat.enable_thinking: false",
    ),
    "stop token": ("the token that ends a turn is learned in every turn", _FIX),
    "other turns": ("nothing of the system or the user is labelled", _FIX),
    "messages": (
        "every message is in the text",
        "mend the template, which leaves them out, or remove such turns from the data",
    ),
    "generation prompt": (
        "replies are trained behind the text that they are sampled after",
        "learn one turn a row (turns: each), and set chat.enable_thinking as it will be used",
    ),
    "same text": (
        "the template of training and the model's own render the same text",
        f"{_FIX}, made of the model's own; to change the form on purpose, put the new template "
        "into the model's folder",
    ),
    "generation_config": (
        "sampling ends at that token",
        "add its id to eos_token_id in the model's generation_config.json (--fix writes one)",
    ),
    "lengths": ("every conversation fits", "raise max_length, or remove the longest rows"),
}
#: What a made-up conversation is called.
PROBE = "probe"
#: What a template with markers can be wrong in by itself.
_OF_MARKERS = {"template", "markers", "labelled text", "stop token", "other turns", "same text"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. remedy: "" where all is right."""

    name: str
    ok: bool
    found: str
    remedy: str


def check_template(
    tokenizer: Any,
    conversations: Sequence[Turns],
    chat: ChatConfig,
    generation_config: Any = None,
    max_length: int | None = None,
    *,
    learned: Learned = "all",
    names: Sequence[str] = (),
) -> list[Finding]:
    """A finding for each of `CHECKS`, of the conversations and of hard ones in their shape.

    The template of training is `chat.template`, else the tokenizer's own, with markers put in where
    it has none; it is held against the tokenizer's own. generation_config: the model's; None:
    sampling ends at the tokenizer's eos_token. max_length: in tokens; None: any. learned: of a
    conversation. names: where they stand. Raises UserError if there is no template at all.
    """
    training = training_template(tokenizer, conversations, chat, learned=learned)
    looked = [
        (
            names[number] if number < len(names) else where,
            label(tokenizer, turns, chat, training.template, learned),
        )
        for number, (where, turns) in enumerate(looked_at(tokenizer, conversations, chat))
    ]
    return findings_of(tokenizer, looked, training.how, generation_config, max_length)


def refuse_faults(findings: Iterable[Finding], fault: Literal["refuse", "warn"], hint: str) -> None:
    """Warn of each fault, and raise UserError where a fault is to be refused. hint: what shows all
    of them, and what goes on with them."""
    faults = [finding for finding in findings if not finding.ok]
    for one in faults:
        log.warning("chat template: %s: %s; %s", one.name, one.found, one.remedy)
    if faults and fault == "refuse":
        first = faults[0]
        raise UserError(
            f"the chat template fails its check: {first.name}: {first.found}; {first.remedy} "
            f"({hint})"
        )


def findings_of(
    tokenizer: Any,
    looked: Iterable[tuple[str, Labelled]],
    how: str,
    generation_config: Any = None,
    max_length: int | None = None,
) -> list[Finding]:
    """The same of conversations that are labeled: (where they stand, what they are). how: where
    the markers come from."""
    faults: dict[str, list[str]] = {name: [] for name in CHECKS}
    stops: set[int] = set()
    longest = count = 0
    for where, labelled in looked:
        for fault in labelled.faults:
            faults[fault.check].append(f"{where}, {fault.what}")
        stops |= set(labelled.stops)
        length, count = len(labelled.tokens.ids), count + 1
        longest = max(longest, length)
        if max_length is not None and length > max_length and not where.startswith(PROBE):
            faults["lengths"].append(f"{where}, {length} tokens are more than {max_length}")
    faults["generation_config"] += _stop_faults(tokenizer, generation_config, stops)
    told = {
        "markers": how,
        "stop token": _names(tokenizer, sorted(stops)),
        "lengths": f"the longest of {count} has {longest} tokens",
    }
    return [_finding(name, found, told.get(name)) for name, found in faults.items()]


def training_template(
    tokenizer: Any, conversations: Sequence[Turns], chat: ChatConfig, *, learned: Learned = "all"
) -> MarkedTemplate:
    """The template that a model is trained with: the config's or the tokenizer's own, and where
    that has no markers, what `mended` makes of it. Raises UserError if there is none."""
    template = read_template(chat.template) if chat.template else own_template(tokenizer)
    if template is None:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template: name one in "
            "chat.template"
        )
    if has_markers(template):
        return MarkedTemplate(template, "the template's own")
    return mended(tokenizer, conversations, chat, template, learned=learned)


def mended(
    tokenizer: Any,
    conversations: Sequence[Turns],
    chat: ChatConfig,
    template: str,
    *,
    learned: Learned = "all",
) -> MarkedTemplate:
    """The first template with markers made of `template` that renders its text and labels the
    replies in these conversations; where none does, the last one made."""
    looked = looked_at(tokenizer, conversations, chat)
    chosen = MarkedTemplate(template, "none")
    for chosen in candidates(tokenizer, template):
        if not any(
            fault.check in _OF_MARKERS
            for _, turns in looked
            for fault in label(
                tokenizer, turns, chat, chosen.template, learned, like=template
            ).faults
        ):
            break
    return chosen


def looked_at(
    tokenizer: Any, conversations: Sequence[Turns], chat: ChatConfig
) -> list[tuple[str, Turns]]:
    """(where it stands, conversation): the rows, and the probes; where no row asks for it, none
    with a system turn that the template refuses."""
    found = [(f"row {number}", turns) for number, turns in enumerate(conversations, 1)]
    for number, turns in enumerate(probes(conversations), 1):
        if not conversations and turns[0]["role"] == "system":
            try:
                render(tokenizer, turns, chat)
            except UserError:
                continue
        found.append((f"{PROBE} {number}", turns))
    return found


def unknown_stops(
    tokenizer: Any,
    conversations: Sequence[Turns],
    chat: ChatConfig,
    generation_config: Any,
    *,
    learned: Learned = "all",
) -> list[int]:
    """The ids that end turns in training, and do not end sampling."""
    template = training_template(tokenizer, conversations, chat, learned=learned).template
    stops = {
        stop
        for _, turns in looked_at(tokenizer, conversations, chat)
        for stop in label(tokenizer, turns, chat, template, learned).stops
    }
    return sorted(stops - set(end_ids(tokenizer, generation_config)))


def _stop_faults(tokenizer: Any, generation_config: Any, stops: set[int]) -> list[str]:
    known = end_ids(tokenizer, generation_config)
    unknown = sorted(stops - set(known))
    if not unknown:
        return []
    of = "generation_config" if generation_config is not None else "the tokenizer"
    ends = _names(tokenizer, known)
    return [f"turns end with {_names(tokenizer, unknown)}, sampling with {ends} ({of})"]


def _names(tokenizer: Any, ids: Sequence[int]) -> str:
    named = [f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in ids]
    return ", ".join(named) or "none"


def _finding(name: str, faults: Sequence[str], told: str | None) -> Finding:
    right, remedy = CHECKS[name]
    if not faults:
        return Finding(name, True, f"{right}: {told}" if told else right, "")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return Finding(name, False, f"{faults[0]}{more}", remedy)
