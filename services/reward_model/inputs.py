"""Texts to ids, exactly as transformers makes them of one sample.

- A conversation becomes one text by the model's own chat template, which is given what the caller
  sent and nothing else: no system turn is added, nor one removed. The template has written the
  special tokens, so the tokenizer adds none: a second beginning-of-sequence token changes a score.
- One text or two get the special tokens that the tokenizer adds to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scorekit.errors import SampleError, UserError
from scorekit.server.tokenizers import BoundedTokenizer, TokenizedText
from services.reward_model.prompts import Form

#: Characters of a template's own words in an error.
_MAX_WORDS = 120
_NO_TEMPLATE = "messages: the model has no chat template; send text, or start with --chat-template"
_NO_PAIRS = "pair: this model reads one text, and has no mark between two; send messages or text"


@dataclass(slots=True)
class ModelInput:
    """The ids that a model reads, with the type of each where the model has types.

    tokens: number of ids before they were cut.
    truncated, mt_covered: as in an answer."""

    ids: list[int]
    type_ids: list[int] | None
    tokens: int
    truncated: dict[str, bool]
    mt_covered: int


@dataclass(slots=True)
class _Segment:
    """Ids of special tokens, or the position of a text (`text` is its number)."""

    ids: list[int]
    type_id: int
    text: int | None = None


class InputMaker:
    """Makes the inputs of one model.

    tokenizer: of transformers.
    template: instead of its own.

    max_length: most ids. Raises UserError if the tokenizer is not one that can be used here.
    """

    def __init__(self, tokenizer: Any, max_length: int, template: str | None) -> None:
        if not tokenizer.is_fast:
            raise UserError("the model has no fast tokenizer (tokenizer.json)")
        self._tokenizer = tokenizer
        self.max_length = max_length
        self.template = template or _template_of(tokenizer)
        backend = tokenizer.backend_tokenizer
        self._ids = BoundedTokenizer(backend)
        self._single = _segments(backend.encode("a"))
        self._double = _segments(backend.encode("a", "b"))
        self._has_types = "token_type_ids" in tokenizer.model_input_names
        self.takes_pairs = _separates(self._double, tokenizer)

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Return the text of a conversation. Raises SampleError where the template refuses it, and
        for a turn that it drops."""
        if self.template is None:
            raise SampleError("invalid_input", _NO_TEMPLATE)
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, chat_template=self.template
            )
        except Exception as error:  # a template may raise anything
            reason = (str(error).splitlines() or [type(error).__name__])[0][:_MAX_WORDS]
            problem = f"messages: the chat template refuses them: {reason}"
            raise SampleError("invalid_input", problem) from None
        for index, message in enumerate(messages):
            # A template may leave out the thinking of earlier turns.
            if message["content"].strip() not in text and "</think>" not in message["content"]:
                problem = f"messages.{index}: the chat template drops or changes its text"
                raise SampleError("invalid_input", problem)
        return str(text)

    def make(self, forms: Sequence[Form], *, may_cut: bool) -> list[ModelInput | SampleError]:
        """Return the inputs in order, or the error of a sample.

        may_cut: cut what is too long, as the tokenizer does for one sample; else it is an error."""
        texts: list[str] = []
        positions: list[SampleError | tuple[int, int]] = []
        for form in forms:
            try:
                form_texts = self._texts(form)
            except SampleError as refusal:
                positions.append(refusal)
            else:
                positions.append((len(texts), len(texts) + len(form_texts)))
                texts += form_texts
        read = list(self._ids.read(texts, self.max_length, count=not may_cut))
        results: list[ModelInput | SampleError] = []
        for form, position in zip(forms, positions, strict=True):
            if isinstance(position, SampleError):
                results.append(position)
                continue
            parts = read[position[0] : position[1]]
            if error := next((part for part in parts if isinstance(part, Exception)), None):
                raise error
            form_texts = texts[position[0] : position[1]]
            results.append(self._assemble(form, form_texts, parts, may_cut))  # type: ignore[arg-type]
        return results

    def _texts(self, form: Form) -> list[str]:
        if form.messages is not None:
            return [self.render(form.messages)]
        if form.pair is None:
            return [form.text]
        if not self.takes_pairs:
            raise SampleError("invalid_input", _NO_PAIRS)
        return [form.text, form.pair]

    def _assemble(
        self, form: Form, texts: list[str], parts: list[TokenizedText], may_cut: bool
    ) -> ModelInput | SampleError:
        segments = self._single if len(parts) == 1 else self._double
        if form.messages is not None:
            segments = [_Segment([], 0, text=0)]
        added = sum(len(segment.ids) for segment in segments)
        total = added + sum(part.total for part in parts)
        if total > self.max_length and not may_cut:
            message = f"{total} tokens, the limit is {self.max_length}"
            return SampleError("overlong", message)
        counts = _fitting([min(p.total, self.max_length) for p in parts], self.max_length - added)
        ids: list[int] = []
        types: list[int] = []
        for segment in segments:
            segment_ids = segment.ids
            if segment.text is not None:
                segment_ids = parts[segment.text].ids[: counts[segment.text]]
            ids += segment_ids
            types += [segment.type_id] * len(segment_ids)
        if not ids:
            return SampleError("invalid_input", "the sample has no token")
        read = [
            len(text) if count >= part.total else _covered(part, count)
            for text, part, count in zip(texts, parts, counts, strict=True)
        ]
        truncated, covered = _coverage(form, texts, read)
        return ModelInput(ids, types if self._has_types else None, len(ids), truncated, covered)


def _template_of(tokenizer: Any) -> str | None:
    """Return the chat template; None if there is none, or none by default among several."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template or None


def _segments(encoding: Any) -> list[_Segment]:
    """Return what the tokenizer puts around the texts of an encoding."""
    segments: list[_Segment] = []
    for id, type_id, text in zip(
        encoding.ids, encoding.type_ids, encoding.sequence_ids, strict=True
    ):
        last = segments[-1] if segments else None
        if last is None or last.text != text or last.type_id != type_id:
            segments.append(_Segment([], type_id, text))
        if text is None:
            segments[-1].ids.append(id)
    return segments


def _separates(segments: Sequence[_Segment], tokenizer: Any) -> bool:
    """Return True if the tokenizer sets a mark between two texts: more than a second beginning."""
    positions = [index for index, segment in enumerate(segments) if segment.text is not None]
    between = [id for segment in segments[positions[0] : positions[-1]] for id in segment.ids]
    return any(id != tokenizer.bos_token_id or id == tokenizer.sep_token_id for id in between)


def _fitting(lengths: list[int], budget: int) -> list[int]:
    """Return how many ids of each text fit: as tokenizers does with `longest_first`."""
    budget = max(0, budget)
    if len(lengths) == 1:
        return [min(lengths[0], budget)]
    first, second = lengths
    if first + second <= budget:
        return lengths
    shorter = min(first, second)
    longer = shorter if shorter > budget else max(shorter, budget - shorter)
    if shorter + longer > budget:
        shorter = budget // 2
        longer = shorter + budget % 2
    return [shorter, longer] if first <= second else [longer, shorter]


def _covered(part: TokenizedText, count: int) -> int:
    """Return the characters of a text whose ids are all among its first `count`."""
    if count == 0:
        return 0
    if count >= len(part.ids):
        return part.covered
    return min(part.own_offsets[count][0], part.own_offsets[count - 1][1])


def _coverage(form: Form, texts: list[str], read: list[int]) -> tuple[dict[str, bool], int]:
    """Return `truncated` and `mt_covered`.

    read: characters of each text that the model reads.
    """
    if all(count == len(text) for count, text in zip(read, texts, strict=True)):
        return {"src": False, "mt": False, "ref": False}, len(form.last)
    start = texts[-1].rfind(form.last)
    if start < 0:  # the template strips it
        start = max(0, texts[-1].rfind(form.last.strip()))
    covered = max(0, min(len(form.last), read[-1] - start))
    before = read[0] < len(texts[0]) if len(texts) > 1 else read[-1] < start
    return {"src": before, "mt": covered < len(form.last), "ref": False}, covered
