"""Parse YAML and JSON that a user wrote: for anything wrong with it there is one error, in a line.

The parsers raise many types by themselves: PyYAML also AttributeError, IndexError and KeyError, and
both RecursionError. And PyYAML returns values that break a program later: a list that contains
itself, ten lines of aliases that stand for a billion values, a number that cannot be printed, a
text that cannot be saved.
"""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from scorekit.errors import UserError

#: Longest YAML that is read, in bytes: PyYAML takes minutes and gigabytes for more.
MAX_YAML_BYTES = 16 * 2**20
#: Deepest nesting of YAML. PyYAML takes several calls a level, and Python allows a thousand.
MAX_DEPTH = 100
#: Most values of a YAML text whose aliases (`*name`) are replaced by what they stand for.
MAX_VALUES = 100_000
#: Numbers that every library can hold.
_INTEGERS = range(-(2**63), 2**64)
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_NOT_UTF8 = "not UTF-8 text. Save the file as UTF-8"
_TOO_DEEP = "nested too deeply"


class DocumentError(ValueError):
    """The text is not valid.

    line: where, from 1; None: not known.
    """

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem if line is None else f"line {line}: {problem}")
        self.problem, self.line = problem, line


def read_yaml(path: Path, loader: type[SafeLoader] | type[FullLoader] | None = None) -> Any:
    """Return the content of a YAML file. Raises UserError with the file, the line and the problem.

    loader: default `SafeLoader`.
    """
    try:
        with path.open("rb") as file:
            # Not in one call, which takes the memory of all the bytes that it may read.
            chunks = iter(partial(file.read, 65536), b"")
            content = b"".join(islice(chunks, MAX_YAML_BYTES // 65536 + 1))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        if len(content) > MAX_YAML_BYTES:
            raise DocumentError(f"longer than {MAX_YAML_BYTES >> 20} MiB")
        return parse_yaml(content, loader)
    except DocumentError as error:
        location = "" if error.line is None else f", line {error.line}"
        raise UserError(f"{path}{location}: not YAML: {error.problem}") from None


def parse_yaml(text: str | bytes, loader: type[SafeLoader] | type[FullLoader] | None = None) -> Any:
    """Return the content of a YAML text, None of an empty one. Raises DocumentError.

    A mapping with a key twice is an error. Aliases may be used, but not to make a value that
    contains itself, nor more than `MAX_VALUES` values.
    """
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return yaml.load(decoded, Loader=loader or SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(error.problem or error.context or "not valid").split())
        raise DocumentError(problem, None if mark is None else mark.line + 1) from None
    except yaml.reader.ReaderError as error:
        line = decoded.count("\n", 0, error.position) + 1
        raise DocumentError(
            f"the character {chr(error.character)!a} is not allowed", line
        ) from None
    except UnicodeDecodeError:
        raise DocumentError(_NOT_UTF8) from None
    except RecursionError:
        raise DocumentError(_TOO_DEEP) from None
    except (yaml.YAMLError, ValueError) as error:
        raise DocumentError(" ".join(str(error).split())) from None


def parse_json(text: str | bytes) -> Any:
    """Return the content of a JSON text (bytes: UTF-8). Raises ValueError, and nothing else."""
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError:  # Python's text tells how to lift its limit
        raise ValueError("a number has more than 4,300 digits") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file. Raises UserError with the file and the problem."""
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: {_NOT_UTF8}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, not a {type(content).__name__}")
    return content


class _Limits(yaml.composer.Composer, yaml.constructor.BaseConstructor):
    """Checks of a PyYAML loader, as `parse_yaml` describes."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)  # type: ignore[call-arg]  # of the loader that it is mixed into
        self._depth = self._count = 0
        self._sizes: dict[str, int] = {}  # values of an anchor that is complete

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return a node, after checks of its depth and its aliases."""
        event = self.peek_event()  # type: ignore[attr-defined]
        mark, anchor = event.start_mark, getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if anchor in self.anchors and anchor not in self._sizes:
                raise yaml.composer.ComposerError(
                    None, None, f"the value &{anchor} contains itself (*{anchor})", mark
                )
            self._count += self._sizes.get(str(anchor), 0)
            if self._count > MAX_VALUES:
                problem = f"with its aliases it has more than {MAX_VALUES:,} values"
                raise yaml.composer.ComposerError(None, None, problem, mark)
            return super().compose_node(parent, index)
        if self._depth >= MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, _TOO_DEEP, mark)
        before = self._count
        self._count += 1
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if anchor is not None:
            self._sizes[anchor] = self._count - before
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Return the node of a mapping. Raises ComposerError if a key is there twice.

        Later its node has the keys of `<<`, too, which its own keys may replace.
        """
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    problem = f"the key {key.value!r} is there twice"
                    raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
                names.add(key.value)
        return node

    def construct_scalar(self, node: Any) -> Any:
        """Return the text of a scalar. JSON writes a character beyond U+FFFF as two escapes."""
        value = super().construct_scalar(node)
        if isinstance(value, str) and _PAIR.search(value):
            value = _PAIR.sub(
                lambda m: m[0].encode("utf-16", "surrogatepass").decode("utf-16"), value
            )
        return value

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Return the value of a node. Raises ConstructorError with its line."""
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and value not in _INTEGERS:
                raise ValueError("a whole number of more than 64 bits")
            if isinstance(value, str):
                if "\0" in value:
                    raise ValueError("a NUL character")
                value.encode()
        except yaml.YAMLError:
            raise
        except UnicodeEncodeError:
            problem = "not valid Unicode (a lone surrogate)"
        except ValueError as error:
            # Python's text tells how to lift its limit.
            is_long = "integer string conversion" in str(error)
            problem = "a number of more than 4,300 digits" if is_long else str(error)
        except (AttributeError, IndexError, KeyError, TypeError, OverflowError):
            problem = f"not a value of {node.tag.removeprefix('tag:yaml.org,2002:')!r}"
        else:
            return value
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class SafeLoader(_Limits, yaml.SafeLoader):
    """Reads plain values."""


class FullLoader(_Limits, yaml.FullLoader):
    """Reads Python's tuples, too, and runs no code."""
