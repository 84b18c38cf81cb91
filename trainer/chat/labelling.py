"""A conversation as it is learned: its ids, whose they are, and what is wrong with that."""

from __future__ import annotations

from collections.abc import Iterator
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
    tokenise,
)

#: Which turns of the assistant are learned of a conversation.
Learned = Literal["all", "last"]
#: Characters of a text that a fault shows.
_SHOWN = 40


class Fault(NamedTuple):
    """What is wrong. check: a key of `CHECKS` in boundaries.py."""

    check: str
    what: str


class Labelled(NamedTuple):
    """rendered: with the spans that are learned. stops: the ids that end them."""

    rendered: Rendered
    tokens: Tokens
    stops: tuple[int, ...]
    faults: tuple[Fault, ...]

    @property
    def mask(self) -> list[int]:
        """[L]: 1 where a token is learned."""
        return [int(owner >= 0) for owner in self.tokens.owners]


class _Reply(NamedTuple):
    """A turn that is learned. place: in the conversation. number: of its span."""

    place: int
    number: int
    content: str
    span: Span

    @property
    def name(self) -> str:
        return f"turn {self.place + 1}"


def label(
    tokenizer: Any,
    turns: Turns,
    chat: ChatConfig,
    template: str,
    learned: Learned = "all",
    *,
    like: str | None = None,
) -> Labelled:
    """A conversation by a template with markers.

    like: the template that prompts are made by when a model is used; default: the tokenizer's own.
    """
    like = like or own_template(tokenizer) or template
    try:
        rendered = render_spans(tokenizer, turns, chat, template=template)
        used = render(tokenizer, turns, chat, template=like)
    except UserError as error:
        fault = Fault("template", str(error))
        return Labelled(Rendered("", ()), Tokens([], []), (), (fault,))
    places = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    marked = len(rendered.spans)
    if learned == "last":
        places, rendered = places[-1:], rendered._replace(spans=rendered.spans[-1:])
    faults = []
    if rendered.text != used:
        faults.append(Fault("same text", f"in training {_differing(rendered.text, used)}"))
    replies = []
    if places and len(places) == len(rendered.spans):
        replies = [
            _Reply(place, number, "".join(_texts(turns[place])), rendered.spans[number])
            for number, place in enumerate(places)
        ]
    else:
        what = f"{len(places)} turns of the assistant, {marked} marked"
        faults.append(Fault("markers", what))
    tokens = tokenise(tokenizer, rendered)
    stops = [_stop(tokenizer, tokens, reply.number) for reply in replies]
    for reply, stop in zip(replies, stops, strict=True):
        faults += _faults_of_span(tokenizer, rendered, tokens, reply, stop, turns[reply.place])
    begins = {reply.place: reply.span[0] for reply in replies}
    for place in places:
        prompt, found = _prompt(tokenizer, turns[:place], chat, rendered.text, tokens, like)
        faults += [Fault("generation prompt", f"turn {place + 1}: {what}") for what in found]
        if not found and (labelled := rendered.text[begins.get(place, len(prompt)) : len(prompt)]):
            what = f"turn {place + 1}: the prompt's {_tail(labelled)} is labelled, too"
            faults.append(Fault("labelled text", what))
    faults += _faults_of_others(turns, rendered, replies)
    return Labelled(rendered, tokens, tuple(s for s in stops if s is not None), tuple(faults))


def _stop(tokenizer: Any, tokens: Tokens, number: int) -> int | None:
    """The token that ends a span: its last one that is no white space, where that is of no text."""
    ends = {*tokenizer.get_added_vocab().values(), tokenizer.eos_token_id}
    for token, owner in zip(reversed(tokens.ids), reversed(tokens.owners), strict=True):
        if owner == number and tokenizer.decode([token]).strip():
            return token if token in ends else None
    return None


def _faults_of_span(
    tokenizer: Any,
    rendered: Rendered,
    tokens: Tokens,
    reply: _Reply,
    stop: int | None,
    turn: dict[str, Any],
) -> Iterator[Fault]:
    """Of the labeled text: no stop, other text than the reply, tokens that say something else."""
    begin, end = reply.span
    text = rendered.text[begin:end]
    body = text.rstrip()
    if stop is None:
        what = f"labelled up to {_tail(body)}, and not what follows: {_head(rendered.text[end:])}"
        yield Fault("stop token", f"{reply.name}: {what}")
    else:
        body = body.removesuffix(tokenizer.decode([stop]).strip())
    if not _is_reply(body, reply.content, turn):
        what = f"labelled is {_head(body)} … {_tail(body)}, the reply is {_head(reply.content)}"
        yield Fault("labelled text", f"{reply.name}: {what}")
    ids = [i for i, owner in zip(tokens.ids, tokens.owners, strict=True) if owner == reply.number]
    said = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if said.strip() != text.strip():
        what = f"its tokens say {_differing(said, text)}"
        yield Fault("labelled text", f"{reply.name}: {what}")


def _is_reply(body: str, content: str, turn: dict[str, Any]) -> bool:
    """Whether a labeled text is the reply, but for the spaces around it, which templates trim.
    Thoughts and calls have a form of the template's own: of those the reply itself must be there.
    """
    if body.strip() == content.strip():
        return True
    if turn.get("reasoning_content") or turn.get("tool_calls") or "</think>" in content:
        said = content.rpartition("</think>")[2]
        return "".join(said.split()) in "".join(body.split())
    return False


def _prompt(
    tokenizer: Any, before: Turns, chat: ChatConfig, text: str, tokens: Tokens, like: str
) -> tuple[str, list[str]]:
    """What a reply is sampled after, and what differs from what it is trained behind: the text, or
    its ids."""
    try:
        prompt = render(tokenizer, before, chat, template=like, generation_prompt=True)
    except UserError as error:
        return "", [str(error)]
    if not text.startswith(prompt):
        return prompt, [f"sampled after {_differing(prompt, text)} in training"]
    ids = tokenise(tokenizer, Rendered(prompt, ())).ids
    if tokens.ids[: len(ids)] != ids:
        return prompt, [f"the prompt's end {_tail(prompt)} has other tokens when a reply follows"]
    return prompt, []


def _faults_of_others(turns: Turns, rendered: Rendered, replies: list[_Reply]) -> Iterator[Fault]:
    """Of the system's and the user's turns: labeled, or left out."""
    text, at = rendered.text, 0
    for place, turn in enumerate(turns):
        if turn["role"] not in ("system", "user"):
            continue
        behind = [reply.span[1] for reply in replies if reply.place < place]
        before = [reply.span[0] for reply in replies if reply.place > place]
        at = max([at, *behind])
        end = min([len(text), *before])
        name = f"turn {place + 1} ({turn['role']})"
        for part in filter(None, (part.strip() for part in _texts(turn))):
            found = text.find(part, at, end)
            labelled = found < 0 and any(part in text[begin:to] for begin, to in rendered.spans)
            if found >= 0:
                at = found + len(part)
                labelled = any(begin < at and found < to for begin, to in rendered.spans)
            if labelled:
                yield Fault("other turns", f"{name}: {_head(part)} is labelled")
            elif found < 0:
                yield Fault("messages", f"{name}: {_head(part)} is not in the text")


def _texts(turn: dict[str, Any]) -> list[str]:
    """The texts of a turn, which may be a list of parts."""
    content = turn.get("content") or ""
    if isinstance(content, str):
        return [content]
    return [str(part.get("text") or "") for part in content if isinstance(part, dict)]


def _differing(one: str, other: str) -> str:
    """Where two texts part, for eyes."""
    pairs = zip(one, other, strict=False)
    equal = min(len(one), len(other))
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), equal)
    start = max(0, place - _SHOWN // 2)
    return f"{one[start : place + _SHOWN]!r}, but {other[start : place + _SHOWN]!r}"


def _head(text: str) -> str:
    return repr(text[:_SHOWN])


def _tail(text: str) -> str:
    return repr(text[-_SHOWN // 2 :])
