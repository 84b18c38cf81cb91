"""What a sample and its options must pass before a model sees them, served or in process."""

from __future__ import annotations

from typing import Any

from scorekit.errors import SampleError, UserError
from scorekit.server.backend import Description


def text_fault(sample: Any, max_chars: int | None) -> SampleError | None:
    """Why no model should read this sample's texts; None if all is well."""
    for name, value in sample:
        if name == "id" or not isinstance(value, str):
            continue
        if max_chars is not None and len(value) > max_chars:
            return SampleError(
                "invalid_input", f"{name}: {len(value):,} characters, at most {max_chars:,}"
            )
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


def resolve_options(options: Any, description: Description) -> Any:
    """Options with the defaults that only the model knows. Raises UserError over its limit."""
    own = description.max_input_length
    asked = options.max_input_length
    if asked is not None and asked > own:
        raise UserError(f"options.max_input_length: {asked}, the model reads {own}")
    return options.model_copy(update={"max_input_length": asked or own})
