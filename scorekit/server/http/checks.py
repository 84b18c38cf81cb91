"""What a sample and its options must pass before a model sees them, served or in process."""

from __future__ import annotations

import sys
from typing import Any

from pydantic import BaseModel

from scorekit.errors import SampleError, UserError
from scorekit.schemas import ScoreOptions
from scorekit.server.backend import Description


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
        if len(value) > max_chars:
            message = f"{name}: {len(value):,} characters, at most {max_chars:,}"
            return SampleError("invalid_input", message)
        if "\0" in value:
            where = value.index("\0")
            return SampleError("invalid_input", f"{name}: NUL character at position {where}")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                return SampleError(
                    "invalid_input", f"{name}: lone surrogate at position {error.start}"
                )
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


def resolve_options(options: Any, description: Description) -> Any:
    """Options with the defaults that only the model knows. Raises UserError over its limit."""
    if not isinstance(options, ScoreOptions):  # nothing is cut to a length
        return options
    own = description.max_input_length
    asked = options.max_input_length
    if asked is not None and asked > own:
        raise UserError(f"options.max_input_length: {asked}, the model reads {own}")
    return options.model_copy(update={"max_input_length": asked or own})
