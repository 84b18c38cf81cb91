"""Read YAML and command-line overrides into a checked pydantic config.

An unknown key is an error. Each run saves a copy of its resolved config.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from scorekit.documents import DocumentError, parse_yaml, read_yaml
from scorekit.errors import UserError
from scorekit.files import write_atomic


class Config(BaseModel):
    """Base of all config sections: unknown keys are errors, defaults are checked too, and no number
    may be NaN or infinite."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


C = TypeVar("C", bound=BaseModel)
#: Errors of a validation in a message.
MAX_ERRORS = 10


def split_commas(value: Any) -> Any:
    """Return the parts of a comma-separated text, stripped; any other value as it is."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def load_config(
    config_type: type[C], path: str | Path | None = None, overrides: list[str] | None = None
) -> C:
    """Read `path` (YAML), apply `overrides` ("section.key=value", the value in YAML), check.

    Raises UserError that names the file, each wrong key and its problem.
    """
    return check_config(config_type, read_config(path, overrides), path or "config")


def read_config(
    path: str | Path | None = None, overrides: list[str] | None = None
) -> dict[str, Any]:
    """Return the content of `path` (YAML) and `overrides`, not yet checked against a config."""
    data = {} if path is None else _read_yaml(Path(path))
    for override in overrides or []:
        _apply_override(data, override)
    return data


def check_config(config_type: type[C], data: Mapping[str, Any], label: str | Path) -> C:
    """Return the data as a config. Raises UserError that names `label` and each wrong key."""
    try:
        return config_type.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{label}: {describe_with_nearest(config_type, error)}") from None


def save_config(config: BaseModel, path: str | Path) -> None:
    """Write the resolved config as YAML."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    write_atomic(Path(path), text)


def refuse_password(value: str, label: str, instead: str) -> None:
    """Raise UserError if a command-line value is a URL with a password in it."""
    try:
        has_password = urlsplit(value.strip("'\" ")).password is not None
    except ValueError:  # no address
        return
    if has_password:
        raise UserError(
            f"{label}: a password on the command line can be read in `ps` and in the shell's "
            f"history; {instead}"
        )


def describe_validation_error(error: ValidationError, label: str = "config") -> str:
    """Return the errors of a validation as `a.b: problem`, without the input's own text.

    label: the name of what was checked, for an error that belongs to no single field.
    """
    errors = error.errors(include_input=False, include_url=False, include_context=False)
    return describe_errors(errors, label)


def describe_errors(errors: Sequence[ErrorDetails], label: str) -> str:
    """Return a list of errors in the same form; those that differ in an index alone, once."""
    counts: dict[tuple[Any, ...], int] = {}
    first_errors: list[tuple[ErrorDetails, tuple[Any, ...]]] = []
    for error in errors:
        # The same error of the next item in a list has another index in it.
        kind = (*("" if isinstance(part, int) else part for part in error["loc"]), error["msg"])
        if kind not in counts:
            first_errors.append((error, kind))
        counts[kind] = counts.get(kind, 0) + 1
    descriptions = [
        f"{'.'.join(map(_key_in_line, error['loc'])) or label}: "
        f"{error['msg'].removeprefix('Value error, ')}"  # pydantic's prefix
        + (f" (and {counts[kind] - 1:,} more like this)" if counts[kind] > 1 else "")
        for error, kind in first_errors[:MAX_ERRORS]
    ]
    return "; ".join(descriptions) + ("; and more" if len(first_errors) > MAX_ERRORS else "")


def _key_in_line(part: int | str) -> str:
    """Return a part of a key for an error line. A user's own key may have a line end."""
    return "".join(char if char.isprintable() else " " for char in str(part)[:40])


def describe_with_nearest(config_type: type[BaseModel], validation_error: ValidationError) -> str:
    """Return `describe_validation_error` with a suggestion for each unknown key."""
    errors = validation_error.errors(include_input=False, include_url=False, include_context=False)
    valid_keys = list(_paths(config_type))
    for error in errors:
        if error["type"] == "extra_forbidden":
            *section, key = map(str, error["loc"])
            section_keys = {
                name: ".".join([*section, name]) for name in _section(config_type, section)
            }
            other_keys = {name.rpartition(".")[2]: name for name in reversed(valid_keys)}
            suggestion = nearest(key, section_keys) or nearest(key, other_keys)
            error["msg"] += f" (did you mean {suggestion}?)" if suggestion else ""
    return describe_errors(errors, "config")


def nearest(key: str, names: Mapping[str, str]) -> str | None:
    """Return the value in `names` whose key is spelled like `key`; None if none is close."""
    close = get_close_matches(key, names, n=1, cutoff=0.7)
    return names[close[0]] if close else None


def _section(config_type: type[BaseModel], parts: Iterable[str]) -> Iterable[str]:
    """Return the keys of a section, also of one in a list or under a name that the user chose."""
    for part in parts:
        field = config_type.model_fields.get(part)
        if field is not None:
            config_type = next(_sections_in(field.annotation), BaseModel)
    return config_type.model_fields


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)


def _paths(config_type: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a config, sections included."""
    for name, field in config_type.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type):
            for section in _sections_in(field.annotation):
                yield from _paths(section, f"{prefix}{name}.")


def _read_yaml(path: Path) -> dict[str, Any]:
    data = read_yaml(path)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{path}: a config is a mapping of keys, not a {type(data).__name__}")
    return data


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r}: expected section.key=value")
    refuse_password(text, f"--set {key}", "write it into the config file")
    *sections, last = key.split(".")
    for section in sections:
        if data.get(section) is None:  # absent or blank
            data[section] = {}
        data = data[section]
        if not isinstance(data, dict):
            raise UserError(f"override {override!r}: {section} is a value, not a section")
    try:
        data[last] = parse_yaml(text)
    except DocumentError as error:
        raise UserError(
            f"override {override!r:.200}: {text!r:.80} is not a YAML value: {error.problem}"
        ) from None
