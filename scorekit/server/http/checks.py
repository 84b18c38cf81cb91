"""Checks of JSON bodies, and of texts before a model reads them, in a service or in process."""

from __future__ import annotations

import re
import sys
from functools import cache
from itertools import islice
from typing import Any

from pydantic import BaseModel

from scorekit.errors import RequestError, SampleError

#: Bodies of at most so many bytes are parsed without counting their values.
LARGE = 256 * 1024
#: Values and names that a sample may have on average in a large body: several times those of any
#: rubric.
VALUES_A_SAMPLE = 32
#: What some writers of UTF-8 put before a text (Windows, .NET).
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: A separator and one value: a string, the start of an object or a list, a number or a word. It
#: matches everywhere and never backtracks, so the whole body is scanned once.
_VALUE = re.compile(
    rb'[\s,:\]}]*+(?:"(?:[^"\\]++|(?:\\.)++)*+"?|[\[{]|[^\s"\[\]{},:]++|\Z)', re.DOTALL
)
#: Characters of a sender's name that an error shows.
_SHOWN_CHARACTERS = 40
_DUPLICATE = 'Detected duplicate key "'


def without_mark(body: bytes) -> bytes:
    """Return a body without a byte order mark before it."""
    return body.removeprefix(_BYTE_ORDER_MARK)


def parse_json(body: bytes, max_samples: int) -> Any:
    """Return the value of a JSON body, which has no byte order mark.

    Raises RequestError if it is no JSON, if a large body has too many values, or if an object has a
    name twice: parsers would use the last value in silence.
    """
    import jiter

    if len(body) > LARGE:
        # A body of megabytes may have millions of values. Parsing them takes a hundred times its
        # bytes and holds the GIL for seconds; counting does neither.
        max_values = VALUES_A_SAMPLE * max_samples + 1000
        if next(islice(_VALUE.finditer(body), max_values, None), None) is not None:
            raise RequestError("too_large", f"body: more than {max_values} values, names included")
    try:
        return jiter.from_json(body, catch_duplicate_keys=True, cache_mode="keys")
    except ValueError as error:
        problem = f"Invalid JSON: {error}"
        if str(error).startswith(_DUPLICATE):
            name, _, position = str(error).removeprefix(_DUPLICATE).rpartition('" at ')
            problem = f"the name {shown_name(name)} stands twice in an object, at {position}. "
            problem += "Give it once"
        raise RequestError("invalid_request", f"body: {problem}") from None


def shown_name(name: str) -> str:
    """Return a name that the sender chose for an error: escaped, in quotes, and cut."""
    return repr(name if len(name) <= _SHOWN_CHARACTERS else name[:_SHOWN_CHARACTERS] + "...")


def text_error(sample: Any, max_chars: int = sys.maxsize) -> SampleError | None:
    """Return the error if a model must not read a text of this sample; None if all are valid.

    max_chars: max characters (code points) of a text.
    """
    values = sample.__dict__
    sample_type: type[BaseModel] = type(sample)
    names = _text_fields(sample_type)
    if sample.model_extra:  # texts defined by a rubric
        values = values | sample.model_extra
        names += tuple(sample.model_extra)
    for field in names:
        value = values[field]
        problem = find_text_problem(value, max_chars) if value else None
        if problem is not None:
            # The name of another field may be any text.
            is_own_field = field in sample_type.model_fields
            return SampleError("invalid_input", f"{field if is_own_field else 'a text'}: {problem}")
    return None


def find_text_problem(text: str, max_chars: int) -> str | None:
    """Return the reason why a model must not read this text; None if it is valid."""
    if len(text) > max_chars:
        return f"{len(text):,} characters, at most {max_chars:,}"
    if "\0" in text:
        return f"NUL character at position {text.index(chr(0))}"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return f"lone surrogate at position {error.start}"
    return None


@cache
def _text_fields(sample_type: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of the fields that hold text for the model."""
    return tuple(
        name
        for name, field in sample_type.model_fields.items()
        if name != "id" and field.annotation in (str, str | None)
    )
