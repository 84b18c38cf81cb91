"""Show the `name: meaning` lines of a docstring as a list. mkdocstrings loads this by its path."""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Function, GriffeLoader, Object

#: Code: a span, or an example, which is indented.
_CODE = re.compile(r"(`+[^`]+`+|^ {4}.*$)", re.MULTILINE)
_FIELD = re.compile(r"(\w+(?:, \w+)*): ")
_SENTENCE = re.compile(r"(?<=[.;]) (?=(\w+(?:, \w+)*): )")


class Fields(Extension):  # type: ignore[misc]
    """Turns a paragraph of fields into a list, one field an item."""

    def on_object(self, *, obj: Object, loader: GriffeLoader, **kwargs: Any) -> None:
        """Change the docstring of an object when its package is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = as_list(without_html(obj.docstring.value), _names(obj))


def _names(obj: Object) -> set[str]:
    """Return the names that a docstring may explain: parameters and attributes."""
    names = set(obj.members) if isinstance(obj, Class) else set()
    for function in (obj, obj.members.get("__init__")):
        if isinstance(function, Function):
            names |= {parameter.name for parameter in function.parameters}
    return names


def without_html(text: str) -> str:
    """Return a docstring whose `<` is shown as it is: in Markdown it would begin a tag of HTML."""
    parts = _CODE.split(text)
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)


def as_list(text: str, names: set[str]) -> str:
    """Return a docstring whose paragraphs about `names` are lists."""

    def is_known(text: str) -> bool:
        return all(name in names for name in text.split(", "))

    parts = []
    for part in text.split("\n\n"):
        line = " ".join(part.split())
        match = _FIELD.match(line)
        if match and is_known(match[1]):
            line = _SENTENCE.sub(lambda m: "\n- " if is_known(m[1]) else " ", f"- {line}")
            part = re.sub(r"^- (\w+(?:, \w+)*):", r"- `\1`:", line, flags=re.MULTILINE)
        parts.append(part)
    return "\n\n".join(parts)
