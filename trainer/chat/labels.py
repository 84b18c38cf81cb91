"""Label a conversation for training: its ids, which of them are trained on, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from scorekit.errors import UserError
from trainer.chat.config import ChatConfig
from trainer.chat.render import (
    Rendered,
    Span,
    Tokens,
    Turns,
    own_template,
    render,
    render_spans,
    tokenize,
)
from trainer.rl.control_tokens import control_tokens

#: The assistant's turns of a conversation to train on.
TrainedTurns = Literal["all", "last"]
#: Characters of a text in an error message.
_MAX_QUOTED = 40
#: Replies that show what a template writes around a reply.
_REPLIES = ("w1w", "w2w w2w")


class LabelIssue(NamedTuple):
    """An error of a template in a conversation.

    check: a key of `CHECKS` in template_check.py.
    message: the text of the error.
    """

    check: str
    message: str


class LabeledConversation(NamedTuple):
    """A labeled conversation.

    stops: the ids that end the spans to train on.
    """

    tokens: Tokens
    stops: tuple[int, ...]
    errors: tuple[LabelIssue, ...]

    @property
    def mask(self) -> list[int]:
        """Return [L]: 1 if a token is trained on."""
        return [int(owner >= 0) for owner in self.tokens.owners]


class _Reply(NamedTuple):
    """A turn to train on.

    turn_index: in the conversation.
    number: of its span.
    """

    turn_index: int
    number: int
    content: str
    span: Span

    @property
    def name(self) -> str:
        return f"turn {self.turn_index + 1}"


def label(
    tokenizer: Any,
    turns: Turns,
    chat: ChatConfig,
    template: str,
    trained_turns: TrainedTurns = "all",
    *,
    like: str | None = None,
) -> LabeledConversation:
    """Label a conversation with a template that has markers.

    like: the template for prompts when the model is used; default: the tokenizer's own.
    """
    like = like or own_template(tokenizer) or template
    try:
        rendered = render_spans(tokenizer, turns, chat, template=template)
        text_in_use = render(tokenizer, turns, chat, template=like)
    except UserError as error:
        issue = LabelIssue("template", str(error))
        return LabeledConversation(Tokens([], []), (), (issue,))
    indices = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    num_spans = len(rendered.spans)
    if trained_turns == "last":
        indices, rendered = indices[-1:], rendered._replace(spans=rendered.spans[-1:])
    errors = []
    if rendered.text != text_in_use:
        errors.append(
            LabelIssue("same text", f"in training {_differing(rendered.text, text_in_use)}")
        )
    replies = []
    if indices and len(indices) == len(rendered.spans):
        replies = [
            _Reply(index, number, "".join(_texts(turns[index])), rendered.spans[number])
            for number, index in enumerate(indices)
        ]
    else:
        message = f"{len(indices)} turns of the assistant, {num_spans} marked"
        errors.append(LabelIssue("markers", message))
    tokens = tokenize(tokenizer, rendered)
    stops = [_stop(tokenizer, tokens, reply.number) for reply in replies]
    frame = _reply_frame(tokenizer, template, tuple(chat.template_kwargs.items()))
    for reply, stop in zip(replies, stops, strict=True):
        turn = turns[reply.turn_index]
        errors += _span_errors(tokenizer, rendered, tokens, reply, stop, turn, frame)
    begin_by_turn = {reply.turn_index: reply.span[0] for reply in replies}
    for index in indices:
        prompt, differences = _prompt(tokenizer, turns[:index], chat, rendered.text, tokens, like)
        errors += [
            LabelIssue("generation prompt", f"turn {index + 1}: {message}")
            for message in differences
        ]
        if not differences and (
            trained := rendered.text[begin_by_turn.get(index, len(prompt)) : len(prompt)]
        ):
            message = f"turn {index + 1}: the prompt's {_tail(trained)} is labelled, too"
            errors.append(LabelIssue("labelled text", message))
    errors += _other_turn_errors(turns, rendered, replies)
    return LabeledConversation(tokens, tuple(s for s in stops if s is not None), tuple(errors))


def _stop(tokenizer: Any, tokens: Tokens, number: int) -> int | None:
    """Return the last token of a span that is no white space, if it is an end token."""
    ends = {*tokenizer.get_added_vocab().values(), tokenizer.eos_token_id}
    for token, owner in zip(reversed(tokens.ids), reversed(tokens.owners), strict=True):
        if owner == number and tokenizer.decode([token]).strip():
            return token if token in ends else None
    return None


def _span_errors(
    tokenizer: Any,
    rendered: Rendered,
    tokens: Tokens,
    reply: _Reply,
    stop: int | None,
    turn: dict[str, Any],
    frame: tuple[str, str],
) -> Iterator[LabelIssue]:
    """Yield errors of the labeled text: no stop, other text than the reply, or other token text.

    frame: what the template writes before and behind a reply, which is labeled with it.
    """
    begin, end = reply.span
    text = rendered.text[begin:end]
    body = text.rstrip()
    if stop is None:
        message = (
            f"labelled up to {_tail(body)}, and not what follows: {_head(rendered.text[end:])}"
        )
        yield LabelIssue("stop token", f"{reply.name}: {message}")
    else:
        body = body.removesuffix(tokenizer.decode([stop]).strip())
    if any(frame) and body.lstrip().startswith(frame[0]) and body.endswith(frame[1]):
        body = body.lstrip()[len(frame[0]) :].removesuffix(frame[1])
    if not _is_reply(body, reply.content, turn):
        message = f"labelled is {_head(body)} … {_tail(body)}, the reply is {_head(reply.content)}"
        yield LabelIssue("labelled text", f"{reply.name}: {message}")
    ids = [i for i, owner in zip(tokens.ids, tokens.owners, strict=True) if owner == reply.number]
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if decoded.strip() != text.strip():
        message = f"its tokens say {_differing(decoded, text)}"
        yield LabelIssue("labelled text", f"{reply.name}: {message}")


@lru_cache(maxsize=32)
def _reply_frame(
    tokenizer: Any, template: str, kwargs: tuple[tuple[str, Any], ...]
) -> tuple[str, str]:
    """Return what a template writes in a turn before and behind each reply, the stop token apart.

    The model writes it, too: Command R7B's `<|START_RESPONSE|>` and `<|END_RESPONSE|>`, gpt-oss'
    `<|channel|>final<|message|>`. Such text ends with a control token before the reply, and has
    only control tokens behind it; ("", "") if it has anything else, such as an empty block of
    thoughts, or the end of the turn before the stop token.
    """
    chat = ChatConfig(**dict(kwargs))
    frames = set()
    for reply in _REPLIES:
        turns = [{"role": "user", "content": "w"}, {"role": "assistant", "content": reply}]
        try:
            rendered = render_spans(tokenizer, turns, chat, template=template)
        except UserError:
            return "", ""
        if len(rendered.spans) != 1:
            return "", ""
        stop = _stop(tokenizer, tokenize(tokenizer, rendered), 0)
        text = rendered.text[slice(*rendered.spans[0])].rstrip()
        text = text if stop is None else text.removesuffix(tokenizer.decode([stop]).strip())
        before, _, behind = text.partition(reply)
        frames.add((before.lstrip(), behind))
    if len(frames) > 1:
        return "", ""
    before, behind = frames.pop()
    controls = control_tokens(tokenizer, template, dict(kwargs))
    tokens_before, tokens_behind = controls.find(before), controls.find(behind)
    is_header = not before or (tokens_before and before.endswith(tokens_before[-1]))
    is_end = behind == "".join(tokens_behind) and tokenizer.eos_token not in tokens_behind
    return (before, behind) if is_header and is_end else ("", "")


def _is_reply(body: str, content: str, turn: dict[str, Any]) -> bool:
    """Return whether a labeled text is the reply, apart from white space around it.

    Thoughts and calls have a format of the template; then the text has to contain the reply.
    """
    if body.strip() == content.strip():
        return True
    if turn.get("reasoning_content") or turn.get("tool_calls") or "</think>" in content:
        answer = content.rpartition("</think>")[2]
        return "".join(answer.split()) in "".join(body.split())
    return False


def _prompt(
    tokenizer: Any, before: Turns, chat: ChatConfig, text: str, tokens: Tokens, like: str
) -> tuple[str, list[str]]:
    """Return the prompt of a reply in sampling, and how its text or ids differ from training."""
    try:
        prompt = render(tokenizer, before, chat, template=like, generation_prompt=True)
    except UserError as error:
        return "", [str(error)]
    if not text.startswith(prompt):
        return prompt, [f"sampled after {_differing(prompt, text)} in training"]
    ids = tokenize(tokenizer, Rendered(prompt, ())).ids
    if tokens.ids[: len(ids)] != ids:
        return prompt, [f"the prompt's end {_tail(prompt)} has other tokens when a reply follows"]
    return prompt, []


def _other_turn_errors(
    turns: Turns, rendered: Rendered, replies: list[_Reply]
) -> Iterator[LabelIssue]:
    """Yield errors of the system's and the user's turns: labeled, or left out."""
    text, position = rendered.text, 0
    for index, turn in enumerate(turns):
        if turn["role"] not in ("system", "user"):
            continue
        behind = [reply.span[1] for reply in replies if reply.turn_index < index]
        before = [reply.span[0] for reply in replies if reply.turn_index > index]
        position = max([position, *behind])
        end = min([len(text), *before])
        name = f"turn {index + 1} ({turn['role']})"
        for part in filter(None, (part.strip() for part in _texts(turn))):
            start = text.find(part, position, end)
            is_labeled = start < 0 and any(
                part in text[begin:end_of_span] for begin, end_of_span in rendered.spans
            )
            if start >= 0:
                position = start + len(part)
                is_labeled = any(
                    begin < position and start < end_of_span
                    for begin, end_of_span in rendered.spans
                )
            if is_labeled:
                yield LabelIssue("other turns", f"{name}: {_head(part)} is labelled")
            elif start < 0:
                yield LabelIssue("messages", f"{name}: {_head(part)} is not in the text")


def _texts(turn: dict[str, Any]) -> list[str]:
    """Return the texts of a turn, which may be a list of parts."""
    content = turn.get("content") or ""
    if isinstance(content, str):
        return [content]
    return [str(part.get("text") or "") for part in content if isinstance(part, dict)]


def _differing(first: str, second: str) -> str:
    """Return where two texts begin to differ, for error messages."""
    pairs = zip(first, second, strict=False)
    equal = min(len(first), len(second))
    index = next((n for n, (a, b) in enumerate(pairs) if a != b), equal)
    start = max(0, index - _MAX_QUOTED // 2)
    return f"{first[start : index + _MAX_QUOTED]!r}, but {second[start : index + _MAX_QUOTED]!r}"


def _head(text: str) -> str:
    """Return the beginning of a text, in quotes."""
    return repr(text[:_MAX_QUOTED])


def _tail(text: str) -> str:
    """Return the end of a text, in quotes."""
    return repr(text[-_MAX_QUOTED // 2 :])
