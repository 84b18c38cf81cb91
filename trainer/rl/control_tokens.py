"""Find control tokens of a model in a text, and write them so that they stay text.

A chat template puts texts between tokens such as `<|im_end|>`, and the tokenizer reads the whole
prompt at once. So a text with these characters ends its turn and begins another one. Which tokens
these are is read from the tokenizer and its template, never from a list of names:

- added tokens that are special, or have the form `<|name|>`;
- other added tokens, and marks of plain text (`[INST]`), that the template writes around turns.

Words are no control tokens, and neither are pairs such as `<think>` and `</think>` that are not
special: they enclose a part of a turn, and may be meant. Only in text from outside (a text to
translate, a page) they count, too, if the template has them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from scorekit.errors import UserError

#: A token with bars behind its brackets: <|im_end|>, <｜User｜>, <|turn>, [|endofturn|].
_BARRED = re.compile(r"[<\[]++(?:[|｜¦│].*[>\]]|.*[|｜¦│][>\]]++)", re.DOTALL)
#: Text in the form of a mark: [INST], <<SYS>>, <start_of_turn>, <|user|>.
_MARK = re.compile(r"<{1,2}[/|｜]?[^\s<>\[\]{}\"']{1,64}>{1,2}|\[[/|]?[A-Za-z][A-Z0-9_]+\|?\]")
#: A tag that may enclose a part of a turn.
_TAG = re.compile(r"</?([\w:.-]+)>")
#: Contents of the conversations that show what a template writes around turns.
_WORDS = ("w1w", "w2w", "w3w")
#: Stands for the id of a mark of plain text, which has several.
_NO_ID = -1
#: Insertions after which a token that is still found cannot be written as text.
_MAX_ROUNDS = 8
#: Who wrote a text. outside: nobody of the conversation, such as the author of a page.
Author = Literal["user", "assistant", "outside"]


@dataclass(frozen=True, slots=True, eq=False)
class ControlTokens:
    """The control tokens of a tokenizer with its chat template.

    content_by_id: the tokens.
    meant_ids: special tokens that the template looks for in the assistant's text, such as
    `</think>`.
    block_by_id: other tokens of the template that enclose a part of a turn (`<tool_call>`).
    marks: the template's marks of plain text.
    """

    tokenizer: Any
    content_by_id: Mapping[int, str]
    meant_ids: frozenset[int]
    block_by_id: Mapping[int, str]
    marks: re.Pattern[str] | None

    def find(
        self, text: str, author: Author = "user", *, allowed: Collection[str] = ()
    ) -> list[str]:
        """Return the control tokens of a text, in order.

        author: the assistant's text may have the tokens of `meant_ids`, one from outside may not
        have those of `block_by_id`.
        allowed: tokens that are meant.
        """
        return [text[begin:end].strip() for begin, end in self._spans(text, author, allowed)]

    def as_text(self, text: str, author: Author = "user", *, allowed: Collection[str] = ()) -> str:
        """Return the text with a space inside each control token, so that its ids have none.

        A text without them is returned as it is. Arguments as of `find`. Raises UserError if a
        token cannot be written as text, because it has one character.
        """
        for _ in range(_MAX_ROUNDS):
            spans = list(self._spans(text, author, allowed))
            if not spans:
                return text
            for begin, end in reversed(spans):
                position = end - len(text[begin:end].lstrip()) + 1
                text = f"{text[:position]} {text[position:]}"
        token = self.find(text, author, allowed=allowed)[0]
        raise UserError(f"the control token {token!r} cannot be written as text. Remove it")

    def _spans(
        self, text: str, author: Author, allowed: Collection[str]
    ) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of each control token, without overlaps."""
        ids = set(self.content_by_id)
        if author == "assistant":
            ids -= self.meant_ids
        elif author == "outside":
            ids |= set(self.block_by_id)
        position = 0
        for token_id, begin, end in sorted(self._read(text), key=lambda read: read[1]):
            is_control = token_id in ids or token_id == _NO_ID
            if is_control and begin >= position and text[begin:end].strip() not in allowed:
                position = end
                yield begin, end

    def _read(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield (id, begin, end) of each token that may count, and of each mark of plain text."""
        if self.marks is not None:
            yield from ((_NO_ID, *match.span()) for match in self.marks.finditer(text))
        content_by_id = {**self.content_by_id, **self.block_by_id}
        if not self.tokenizer.is_fast:
            for token_id, token in content_by_id.items():
                matches = _mark_pattern([token]).finditer(text)
                yield from ((token_id, *match.span()) for match in matches)
            return
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        unknown = self.tokenizer.unk_token_id
        for token_id, (begin, end) in zip(
            encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            content = content_by_id.get(token_id)
            # A character without a token has the id of `<unk>`, too.
            is_character = token_id == unknown and text[begin:end].strip() != content
            if content is not None and not is_character:
                yield token_id, begin, end


def control_tokens(
    tokenizer: Any, template: str | None = None, template_kwargs: Mapping[str, Any] | None = None
) -> ControlTokens:
    """Return the control tokens of a tokenizer.

    template: a chat template; default: the tokenizer's own.
    template_kwargs: its arguments, as in use.
    """
    stored_template = getattr(tokenizer, "chat_template", None)
    stored_template = (
        stored_template.get("default") if isinstance(stored_template, dict) else stored_template
    )
    kwargs = tuple(sorted((template_kwargs or {}).items()))
    return _control_tokens(tokenizer, template or stored_template, kwargs, len(tokenizer))


@lru_cache(maxsize=16)
def _control_tokens(
    tokenizer: Any, template: str | None, kwargs: tuple[tuple[str, Any], ...], size: int
) -> ControlTokens:
    """Return the control tokens; equal arguments are answered from the cache.

    size: of the tokenizer, because tokens can be added to it.
    """
    added = tokenizer.added_tokens_decoder
    special_ids = {token_id for token_id, token in added.items() if token.special}
    special_ids |= set(tokenizer.all_special_ids)
    frame_text = (
        "" if template is None else " ".join(_frame_texts(tokenizer, template, dict(kwargs)))
    )
    frame_ids = (
        set(tokenizer(frame_text, add_special_tokens=False)["input_ids"]) if frame_text else set()
    )
    content_by_id = {}
    for token_id in {*added, *special_ids}:
        content = added[token_id].content if token_id in added else None
        content = content or str(tokenizer.convert_ids_to_tokens(token_id))
        is_frame_mark = token_id in frame_ids and _MARK.fullmatch(content.strip()) is not None
        is_mark = _BARRED.fullmatch(content) is not None or (
            is_frame_mark and not _is_block(content, frame_text, tokenizer)
        )
        if (token_id in special_ids and not _is_word(content)) or is_mark:
            content_by_id[token_id] = content
    # The template looks for these in the assistant's text, which may so have them.
    allowed = {content for content in content_by_id.values() if _is_read(content, template or "")}
    allowed |= {_opening(content) for content in allowed}
    meant_ids = {token_id for token_id, content in content_by_id.items() if content in allowed}
    block_by_id = {
        token_id: token.content
        for token_id, token in added.items()
        if token_id not in content_by_id and _TAG.fullmatch(token.content) is not None
        if token.content in (template or "")
    }
    contents = set(content_by_id.values())
    marks = {
        match.group()
        for match in _MARK.finditer(frame_text)
        if match.group() not in contents and not _is_block(match.group(), frame_text, tokenizer)
    }
    pattern = _mark_pattern(marks) if marks else None
    return ControlTokens(tokenizer, content_by_id, frozenset(meant_ids), block_by_id, pattern)


def _mark_pattern(marks: Collection[str]) -> re.Pattern[str]:
    """Return a pattern of any of the marks, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


def _frame_texts(tokenizer: Any, template: str, kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a template writes around the texts of a few conversations that it accepts.

    They have a system turn if it accepts one: a template's own system text may speak of tags, such
    as <br>, which are no marks.
    """
    first, second, third = _WORDS
    user, system = {"role": "user", "content": first}, {"role": "system", "content": third}
    reply = {"role": "assistant", "content": second}
    parts = [{"type": "image"}, {"type": "text", "text": first}]
    conversations = (
        [user, reply, {"role": "user", "content": third}],
        [user],
        [user, reply],
        [{"role": "user", "content": parts}],
        [{"role": "user", "content": parts[1:]}],
    )
    for messages in conversations:
        for variant in ([system, *messages], messages):
            try:
                text = tokenizer.apply_chat_template(
                    variant,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=True,
                    **kwargs,
                )
            except Exception:  # a template is a program, which may refuse some of them in any way
                continue
            for word in _WORDS:
                text = text.replace(word, " ")
            yield text
            break


def _is_word(content: str) -> bool:
    return re.search(r"[^\w\s]|_", content) is None


def _is_block(content: str, frame_text: str, tokenizer: Any) -> bool:
    """Return whether a tag and its closing tag enclose a part of a turn."""
    tag = _TAG.fullmatch(content.strip())
    if tag is None:
        return False
    vocabulary = tokenizer.get_added_vocab()
    return all(form in frame_text or form in vocabulary for form in (f"<{tag[1]}>", f"</{tag[1]}>"))


def _opening(content: str) -> str:
    """Return the token that opens what `</name>` or `<name|>` closes; others as they are."""
    return re.sub(r"^<(?:/(.+)|([^|]+\|))>$", _open, content)


def _open(match: re.Match[str]) -> str:
    return f"<{match[1]}>" if match[1] else f"<|{match[2][:-1]}>"


def _is_read(content: str, template: str) -> bool:
    """Return whether a template looks for a token in a message's text."""
    return _reading_pattern(content).search(template) is not None


def _reading_pattern(content: str) -> re.Pattern[str]:
    quoted = rf"['\"]{re.escape(content)}['\"]"
    return re.compile(rf"{quoted}\s+(?:not\s+)?in\b|\bsplit\(\s*{quoted}")
