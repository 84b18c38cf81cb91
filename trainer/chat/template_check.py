"""Check that a chat template trains the model to begin and end its turns.

If the end of a turn is never a training target, the model does not stop: the loss looks good, and
every completion is truncated at its limit. Each check uses the text and the ids, not what a
template claims to do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scorekit.errors import UserError
from trainer.chat.config import ChatConfig
from trainer.chat.labels import LabeledConversation, TrainedTurns, label
from trainer.chat.markers import MarkedTemplate, candidates, has_markers
from trainer.chat.probes import probes
from trainer.chat.render import Turns, own_template, read_template, render
from trainer.chat.stops import end_ids

log = logging.getLogger(__name__)

_FIX = "scorekit template-check --fix writes one with correct markers"
#: Check -> what is right, and how to repair it.
CHECKS = {
    "template": (
        "every conversation is rendered",
        "correct these rows, or set chat.template to a template that accepts them",
    ),
    "markers": (
        "every turn of the assistant is marked",
        f"{_FIX}; where it cannot, the template writes a turn differently if others follow: "
        "train on one turn a row (turns: each)",
    ),
    "labelled text": (
        "the reply and the end of its turn are labelled",
        f"{_FIX}; chat.enable_thinking: false moves an empty block of thoughts into the prompt",
    ),
    "stop token": ("the token that ends a turn is labelled in every turn", _FIX),
    "other turns": ("nothing of the system or the user is labelled", _FIX),
    "messages": (
        "every message is in the text",
        "correct the template, which leaves them out, or remove such turns from the data",
    ),
    "generation prompt": (
        "replies are trained after the text that they are sampled after",
        "train on one turn a row (turns: each), and set chat.enable_thinking as in sampling",
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
#: Name of a made-up conversation.
PROBE = "probe"
#: Checks that a template with markers can fail by itself.
_MARKER_CHECKS = {"template", "markers", "labelled text", "stop token", "other turns", "same text"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    result: what is right or wrong.
    remedy: "" if nothing is wrong.
    """

    name: str
    ok: bool
    result: str
    remedy: str


def label_samples(
    tokenizer: Any,
    conversations: Sequence[Turns],
    chat: ChatConfig,
    trained_turns: TrainedTurns = "all",
    names: Sequence[str] = (),
) -> tuple[str, list[tuple[str, LabeledConversation]]]:
    """Return the source of the markers, and (name, labeled conversation): the conversations and
    difficult ones of their shape.

    names: locations of the conversations. For the template see `training_template`.
    Raises UserError if there is no template.
    """
    training = training_template(tokenizer, conversations, chat, trained_turns=trained_turns)
    samples = collect_conversations(tokenizer, conversations, chat)
    return training.origin, [
        (
            names[number] if number < len(names) else name,
            label(tokenizer, turns, chat, training.template, trained_turns),
        )
        for number, (name, turns) in enumerate(samples)
    ]


def refuse_errors(
    findings: Iterable[Finding], action: Literal["refuse", "warn"], hint: str
) -> None:
    """Log a warning for each failed check, and raise UserError if `action` is refuse.

    hint: a command that shows all of them, and how to continue with them.
    """
    failed = [finding for finding in findings if not finding.ok]
    for failure in failed:
        log.warning("chat template: %s: %s; %s", failure.name, failure.result, failure.remedy)
    if failed and action == "refuse":
        first = failed[0]
        raise UserError(
            f"the chat template fails its check: {first.name}: {first.result}; {first.remedy} "
            f"({hint})"
        )


def findings_of(
    tokenizer: Any,
    conversations: Iterable[tuple[str, LabeledConversation]],
    origin: str,
    generation_config: Any = None,
    max_length: int | None = None,
) -> list[Finding]:
    """Return a finding for each of `CHECKS`, from labeled conversations: (location, conversation).

    origin: the source of the markers.
    generation_config: the model's; None: sampling ends at the tokenizer's eos_token.
    max_length: in tokens; None: any.
    """
    errors: dict[str, list[str]] = {name: [] for name in CHECKS}
    stops: set[int] = set()
    longest = count = 0
    for location, conversation in conversations:
        for error in conversation.errors:
            errors[error.check].append(f"{location}, {error.message}")
        stops |= set(conversation.stops)
        length, count = len(conversation.tokens.ids), count + 1
        longest = max(longest, length)
        if max_length is not None and length > max_length and not location.startswith(PROBE):
            errors["lengths"].append(f"{location}, {length} tokens are more than {max_length}")
    errors["generation_config"] += _stop_errors(tokenizer, generation_config, stops)
    descriptions = {
        "markers": origin,
        "stop token": _names(tokenizer, sorted(stops)),
        "lengths": f"the longest of {count} has {longest} tokens",
    }
    return [
        _finding(name, check_errors, descriptions.get(name))
        for name, check_errors in errors.items()
    ]


def training_template(
    tokenizer: Any,
    conversations: Sequence[Turns],
    chat: ChatConfig,
    *,
    trained_turns: TrainedTurns = "all",
) -> MarkedTemplate:
    """Return the template for training: the config's or the tokenizer's own, with markers.

    If it has none, `repaired_template` adds them. Raises UserError if there is no template.
    """
    template = read_template(chat.template) if chat.template else own_template(tokenizer)
    if template is None:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template. Set chat.template"
        )
    if has_markers(template):
        return MarkedTemplate(template, "those of the template")
    return repaired_template(tokenizer, conversations, chat, template, trained_turns=trained_turns)


def repaired_template(
    tokenizer: Any,
    conversations: Sequence[Turns],
    chat: ChatConfig,
    template: str,
    *,
    trained_turns: TrainedTurns = "all",
) -> MarkedTemplate:
    """Return the first template with markers that renders the same text and labels the replies.

    If none does so for these conversations, return the last candidate.
    """
    samples = collect_conversations(tokenizer, conversations, chat)
    chosen = MarkedTemplate(template, "none")
    for chosen in candidates(tokenizer, template):
        if not any(
            error.check in _MARKER_CHECKS
            for _, turns in samples
            for error in label(
                tokenizer, turns, chat, chosen.template, trained_turns, like=template
            ).errors
        ):
            break
    return chosen


def collect_conversations(
    tokenizer: Any, conversations: Sequence[Turns], chat: ChatConfig
) -> list[tuple[str, Turns]]:
    """Return (name, conversation) of the rows and the probes.

    Without rows, probes with a system turn that the template refuses are left out.
    """
    samples = [(f"row {number}", turns) for number, turns in enumerate(conversations, 1)]
    for number, turns in enumerate(probes(conversations), 1):
        if not conversations and turns[0]["role"] == "system":
            try:
                render(tokenizer, turns, chat)
            except UserError:
                continue
        samples.append((f"{PROBE} {number}", turns))
    return samples


def _stop_errors(tokenizer: Any, generation_config: Any, stops: set[int]) -> list[str]:
    sampling_stops = end_ids(tokenizer, generation_config)
    unknown = sorted(stops - set(sampling_stops))
    if not unknown:
        return []
    source = "generation_config" if generation_config is not None else "the tokenizer"
    sampling_names = _names(tokenizer, sampling_stops)
    return [
        f"turns end with {_names(tokenizer, unknown)}, sampling with {sampling_names} ({source})"
    ]


def _names(tokenizer: Any, ids: Sequence[int]) -> str:
    names = [f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in ids]
    return ", ".join(names) or "none"


def _finding(name: str, errors: Sequence[str], description: str | None) -> Finding:
    right, remedy = CHECKS[name]
    if not errors:
        return Finding(name, True, f"{right}: {description}" if description else right, "")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return Finding(name, False, f"{errors[0]}{more}", remedy)
