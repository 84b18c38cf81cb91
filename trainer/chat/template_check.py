"""Check that a chat template trains the model to begin and end its turns.

If the end of a turn is never a training target, the model does not stop: the loss looks good, and
every completion is truncated at its limit. Each check uses the text and the ids, not what a
template claims to do. Below: the template of training, which gets markers if it has none or wrong
ones, and repaired files for the model's folder.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from difflib import unified_diff
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple

from scorekit.documents import read_json
from scorekit.errors import UserError
from scorekit.files import write_atomic
from trainer.chat.config import ChatConfig
from trainer.chat.labels import LabeledConversation, TrainedTurns, label
from trainer.chat.render import Turns, end_ids, own_template, read_template, render

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


# -- the template of training ----------------------------------------------------------------------


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


#: The last characters matter: a mask that ends one token too early loses their bytes.
_TEXTS = (
    "안녕하세요? 오늘은 어디까지 가세요 🙂",
    '민수는 잠시 웃었다.\n"그래, 같이 가자."',
    "저 뷁! 쌰… 됬어요 👩‍👩‍👧‍👦",
    "  spaces in front, and a line end behind\n\nok",
    "끝말이 한글입니다 뷁",
    "1 + 1 = 2\n\n그리고 <b>태그</b>",
)
#: Shapes of conversations without data.
SHAPES = (("user", "assistant"), ("system", "user", "assistant", "user", "assistant"))
_MAX_SHAPES = 4


def probes(conversations: Sequence[Turns]) -> list[Turns]:
    """Return a conversation that is difficult to mark for each order of roles in the data, the
    longest few.

    The texts have Korean that a tokenizer splits within a character, emoji of several code points,
    line ends, and quotes. Other roles than system, user and assistant are left out: their content
    has a special format.
    """
    shapes = {tuple(str(turn["role"]) for turn in turns) for turns in conversations}
    simple_shapes = [shape for shape in shapes if set(shape) <= {"system", "user", "assistant"}]
    chosen = sorted(simple_shapes, key=len)[-_MAX_SHAPES:] if conversations else SHAPES
    return [_with_texts(shape) for shape in chosen]


def _with_texts(roles: Sequence[str]) -> list[dict[str, Any]]:
    texts = cycle(_TEXTS)
    return [
        {"role": role, "content": f"{number} {next(texts)}"} for number, role in enumerate(roles)
    ]


# -- markers ---------------------------------------------------------------------------------------


_BEGIN = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
#: The full template becomes a macro. The assistant's turn is the text between the prompt (with the
#: generation prompt) and the text with that turn. `{%+` and the line end preserve the spaces of the
#: template at the ends of a file.
_MARKED = """\
{#- The text is that of the template within the macro, character for character. Around it: each
    turn of the assistant, found as what the template adds to the generation prompt, is marked for
    the training of assistant turns only. An EOS that ends the whole text behind the end of its
    last turn is not part of that turn. -#}
{%%- macro chat_text(messages, add_generation_prompt) %%}
%s{%%+ endmacro %%}
{%%- set whole = chat_text(messages, add_generation_prompt) %%}
{%%- set done = namespace(place=0) %%}
{%%- for message in messages %%}
    {%%- if message.role == 'assistant' and not loop.first %%}
        {%%- set prompt = chat_text(messages[:loop.index0], true) %%}
        {%%- set turn = chat_text(messages[:loop.index], false).rstrip() %%}
        {%%- if eos_token and turn.endswith(eos_token)
                and not chat_text(messages[:loop.index], true).startswith(turn) %%}
            {%%- set bare = turn[:turn|length - eos_token|length].rstrip() %%}
            {%%- if not bare.endswith((message.content or '')|string|trim) %%}
                {%%- set turn = bare %%}
            {%%- endif %%}
        {%%- endif %%}
        {%%- if whole.startswith(prompt) and whole.startswith(turn) %%}
            {{- whole[done.place:prompt|length] }}
            {%%- generation %%}
                {{- whole[prompt|length:turn|length] }}
            {%%- endgeneration %%}
            {%%- set done.place = turn|length %%}
        {%%- endif %%}
    {%%- endif %%}
{%%- endfor %%}
{{- whole[done.place:] }}"""


class MarkedTemplate(NamedTuple):
    """A template with markers.

    origin: the source of the markers, for messages.
    """

    template: str
    origin: str


def has_markers(template: str) -> bool:
    """Return whether a template marks the assistant's text, also in the forms that trim spaces."""
    return _BEGIN.search(_without_comments(template)) is not None


def _without_comments(template: str) -> str:
    parts, position = [], 0
    while 0 <= (begin := template.find("{#", position)) < (end := template.find("#}", begin)):
        parts.append(template[position:begin])
        position = end + 2
    return "".join([*parts, template[position:]])


def without_markers(template: str) -> str:
    """Return the template without markers.

    Each becomes a condition that is true, with the same trimming of the spaces around it.
    """
    return _END.sub(r"{%\1 endif \2%}", _BEGIN.sub(r"{%\1 if true \2%}", template))


def mark_texts(template: str) -> str:
    """Return a template that renders the same text, with markers around the assistant's turns.

    A turn is marked if it begins after its generation prompt, and later turns do not change it.
    """
    return _MARKED % without_markers(template.removesuffix("\n"))  # Jinja drops a last line end


def candidates(tokenizer: Any, template: str) -> Iterator[MarkedTemplate]:
    """Yield templates with markers for one without, the most readable first.

    They are TRL's for this exact text, if there is one, and ours for any. The caller checks them.
    """
    from trl.chat_template_utils import get_training_chat_template

    tokenizer_copy = copy(tokenizer)
    tokenizer_copy.chat_template = template
    try:
        trl_template = get_training_chat_template(tokenizer_copy)
    except Exception:  # TRL does not have this text, or its probes with tools are refused
        trl_template = None
    if trl_template is not None:
        yield MarkedTemplate(trl_template, "added as TRL does for this template")
    yield MarkedTemplate(mark_texts(template), "added around the text after each generation prompt")


# -- the repaired files of a model -----------------------------------------------------------------


def fixed_template(
    tokenizer: Any, conversations: Sequence[Turns], chat: ChatConfig, trained_turns: TrainedTurns
) -> tuple[MarkedTemplate, str]:
    """Return a template with markers that renders the same text, and its diff.

    It is made from the model's own (else the config's); the diff is from that of training now.
    """
    configured = read_template(chat.template) if chat.template else None
    base = own_template(tokenizer) or configured
    if base is None:
        raise UserError("there is no chat template to repair. Name one with --template")
    repaired = repaired_template(tokenizer, conversations, chat, base, trained_turns=trained_turns)
    before = (configured or base).splitlines()
    lines = unified_diff(
        before, repaired.template.splitlines(), "before", "after", lineterm="", n=1
    )
    return repaired, "\n".join(lines)


def fixed_generation_config(folder: Path, ids: Sequence[int]) -> str:
    """Return the folder's generation_config.json, changed so that sampling also ends at `ids`."""
    path = folder / "generation_config.json"
    config = read_json(path) if path.is_file() else {}
    value = config.get("eos_token_id")
    ends = value if isinstance(value, list) else [] if value is None else [value]
    config["eos_token_id"] = [*ends, *(i for i in ids if i not in ends)]
    return json.dumps(config, ensure_ascii=False, indent=2) + "\n"


def write_beside(path: Path, text: str) -> None:
    """Write a new file. Raises UserError if it exists with other text."""
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        raise UserError(f"{path} exists and is not replaced. Name another (--to), or remove it")
    write_atomic(path, text)
