"""Markdown of one documented thing: a config key, an option, a field of the wire."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_CODE = re.compile(r"((?<!`)`[^`]+`(?!`))")
_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}
_NAMES |= {NoneType: "null", SecretStr: "secret text", Any: "any value"}
_BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}
_BOUNDS |= {"min_length": "length ≥ {}", "max_length": "length ≤ {}", "pattern": "matches `{}`"}


def escape(text: str) -> str:
    """Return text in which only code spans are Markdown, since docstrings are plain text."""
    parts = _CODE.split(" ".join(text.split()))
    parts[::2] = [re.sub(r"([\\`*_\[\]{}>#|])", r"\\\1", part) for part in parts[::2]]
    # Markdown has no backslash for this one.
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)


def paragraphs(text: str) -> str:
    """Return each paragraph of a docstring, escaped."""
    return "\n\n".join(escape(part) for part in text.split("\n\n") if part.strip())


def anchor(path: str) -> str:
    """Return the id of a key's heading: `rl.kl_coef` has `rl-kl_coef`."""
    return re.sub(r"[^\w-]+", "-", path).strip("-")


def entry(name: str, facts: Sequence[str], text: str, *, id: str = "", level: int = 3) -> str:
    """Return a heading with an id of its own, a line of facts, and the meaning."""
    line = " · ".join(fact for fact in facts if fact)
    heading = f"{'#' * level} `{name}` {{ #{id or anchor(name)} .key }}"
    return f"{heading}\n\n{line}\n{{ .key-facts }}\n\n{text}\n"


def type_text(annotation: Any) -> str:
    """Return the words for a type. Raises TypeError for one without words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _alternatives([f"`{value}`" for value in args])
    if origin in (Union, UnionType):
        return _alternatives(list(dict.fromkeys(map(type_text, args))))
    if origin in (list, tuple, set, frozenset):
        return f"list of {type_text(args[0])}"
    if origin in (dict, Mapping):
        return f"mapping of {type_text(args[0])} to {type_text(args[1])}"
    if args and hasattr(annotation, "__metadata__"):
        return type_text(args[0])
    if annotation in _NAMES:
        return _NAMES[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _alternatives([f"`{member.value}`" for member in annotation])
    raise TypeError(f"no words for the type {annotation!r}: add them to {__name__}")


def _alternatives(words: list[str]) -> str:
    return ", ".join(words[:-1]) + (" or " if len(words) > 1 else "") + words[-1]


def default_text(field: FieldInfo) -> str:
    """Return the default of a field, as a config file would have it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    return f"default {_literal(value)}"


def _literal(value: Any) -> str:
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    text = ""
    if isinstance(value, str | Path):
        text = " ".join(str(value).split())  # a blank line would end the code span
    text = text or json.dumps(value, ensure_ascii=False, default=str)
    return f"`{text}`" if "`" not in text else f"`` {text} ``"


def bounds_text(field: FieldInfo) -> str:
    """Return the bounds of a field's value."""
    texts = []
    for item in field.metadata:
        for name, form in _BOUNDS.items():
            value = getattr(item, name, None)
            if value is not None:
                texts.append(form.format(f"{value:,}" if isinstance(value, int) else value))
    return ", ".join(texts)
