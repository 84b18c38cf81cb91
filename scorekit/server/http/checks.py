"""What texts must pass before a model sees them, served or in process."""

from __future__ import annotations

import sys
from typing import Any

from pydantic import BaseModel

from scorekit.errors import SampleError


def text_fault(sample: Any, max_chars: int = sys.maxsize) -> SampleError | None:
    """Why no model should read this sample's texts; None if all is well.

    max_chars: most characters (code points) of one text.
    """
    values = sample.__dict__
    names = _TEXT_FIELDS.get(type(sample)) or _find_text_fields(type(sample))
    if sample.model_extra:  # texts that only a rubric knows
        values = values | sample.model_extra
        names += tuple(sample.model_extra)
    for field in names:
        value = values[field]
        if not value:
            continue
        name = field if field in type(sample).model_fields else "a text"  # its name is a text, too
        fault = fault_in(name, value, max_chars)
        if fault is not None:
            return fault
    return None


def fault_in(name: str, text: str, max_chars: int) -> SampleError | None:
    """Why no model should read this text, which the fault calls `name`; None if all is well."""
    if len(text) > max_chars:
        message = f"{name}: {len(text):,} characters, at most {max_chars:,}"
        return SampleError("invalid_input", message)
    if "\0" in text:
        where = text.index("\0")
        return SampleError("invalid_input", f"{name}: NUL character at position {where}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return SampleError("invalid_input", f"{name}: lone surrogate at position {error.start}")
    return None


#: Names of the fields that hold text for the model, by type of sample.
_TEXT_FIELDS: dict[type[BaseModel], tuple[str, ...]] = {}


def _find_text_fields(sample_type: type[BaseModel]) -> tuple[str, ...]:
    names = tuple(
        name
        for name, field in sample_type.model_fields.items()
        if name != "id" and field.annotation in (str, str | None)
    )
    return _TEXT_FIELDS.setdefault(sample_type, names)
