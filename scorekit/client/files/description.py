"""OUT.meta.json, which says what an output of `scorekit score` was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.rows.read import Format

#: Formats of an input that have another name there: older versions read a TSV as unquoted.
_NAMES: dict[str, str] = {"tsv": "tsv, quoted", "tsv-unquoted": "tsv"}


def described_format(format: str) -> str:
    """Return the name of an input's format in a description."""
    return _NAMES.get(format, format)


def format_of(name: str) -> Format:
    """Return the format that has this name in a description."""
    formats = {name: format for format, name in _NAMES.items()}
    return cast(Format, formats.get(name, name))


def read_description(out: Path) -> dict[str, Any] | None:
    """Return what an output was made from (OUT.meta.json), or None if it is not known."""
    try:
        return dict(json.loads(_path(out).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def write_description(out: Path, description: Mapping[str, Any]) -> None:
    """Write OUT.meta.json."""
    content = json.dumps(description, indent=1, ensure_ascii=False)
    write_atomic(_path(out), content, alone=True)


def check_description(out: Path, description: Mapping[str, Any], remedy: str) -> None:
    """Raise UserError with the remedy if an output was made from something else."""
    earlier = read_description(out)
    if earlier is None:
        name = _path(out).name
        raise UserError(f"{out} exists, but {name} does not say what it was made from: {remedy}")
    names = dict.fromkeys((*description, *earlier))
    changed = [name for name in names if earlier.get(name) != description.get(name)]
    if changed:
        raise UserError(f"{out} was made from something else ({', '.join(changed)}): {remedy}")


def _path(out: Path) -> Path:
    return out.with_name(f"{out.name}.meta.json")
