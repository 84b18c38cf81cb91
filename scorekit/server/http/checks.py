"""Checks of texts before a model reads them, in a service or in process."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from pydantic import BaseModel

from scorekit.errors import SampleError


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
