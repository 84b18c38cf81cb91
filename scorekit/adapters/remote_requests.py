"""Read what OpenRLHF and slime send to a remote reward model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json

from scorekit.errors import RequestError, UserError

#: Largest body of a request, and the seconds until it has arrived, as for our services.
MAX_BODY_BYTES, RECEIVE_TIMEOUT_S = 16 * 2**20, 30.0
#: Tokens that models put at the end of a turn; they are not part of the translation.
END_MARKS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<eos>", "</s>", "<pad>")


class RewardRequest(BaseModel):
    """A request of OpenRLHF; labels may be null."""

    query: list[str]
    prompts: list[str]
    labels: list[Any] | None = None


class SlimeRequest(BaseModel):
    """A request of slime; the prompt may be chat messages, the label null."""

    prompt: str | list[dict[str, Any]]
    response: str
    label: Any = None


def without_end_marks(text: str, end_marks: Sequence[str]) -> str:
    """Return the text without the marks at its end and the white space around them."""
    while True:
        bare = text.rstrip()
        mark = next((mark for mark in end_marks if mark and bare.endswith(mark)), None)
        if mark is None:
            return text
        text = bare.removesuffix(mark)


def completion_of(
    query: str, prompt: str, end_marks: Sequence[str] = END_MARKS, turn_mark: str | None = None
) -> str:
    """Return the completion: the query after its prompt, without the marks at its end.

    turn_mark: the text that begins the model's turn. If it is set, the query need not contain the
    prompt unchanged: the completion begins after as many of these marks as the prompt has.

    Raises UserError if the start of the completion cannot be found.
    """
    if turn_mark is not None:
        turns = prompt.count(turn_mark)
        segments = query.split(turn_mark, turns)
        if not turns or len(segments) <= turns:
            raise UserError(f"{turn_mark!r} does not stand in prompt and query")
        text = segments[-1]
    elif prompt in query:
        text = query[query.index(prompt) + len(prompt) :]
    else:
        raise UserError(
            "the prompt does not stand in the query letter by letter (cut, or changed by the "
            "tokenizer): say --turn-mark"
        )
    return without_end_marks(text, end_marks)


def fields_of(label: Any) -> dict[str, Any]:
    """Return the fields of a label: those of its JSON object, and the full label as `label`."""
    fields: dict[str, Any] = {}
    if isinstance(label, str) and label.lstrip().startswith("{"):
        try:
            fields = from_json(label)
        except ValueError:
            fields = {}
    elif isinstance(label, dict):
        fields = label
    return {**fields, "label": label}


async def read_body(request: Any) -> bytes:
    """Return the body of a request of starlette. Raises RequestError if it is too large or slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(RECEIVE_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise RequestError("too_large", f"a body of more than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise RequestError("slow_request", f"no body within {RECEIVE_TIMEOUT_S:g} s") from None
    return bytes(body)
