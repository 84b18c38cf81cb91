"""Shared by the sections of run configs: fields that may change when a run is resumed."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


def may_change(default: Any = ..., **options: Any) -> Any:
    """Return a field, or section, that may change when a run is resumed (--resume).

    A change is logged. Other fields must stay, because they would change the results. The contents
    of paths and URLs are compared with those of the run in any case.
    """
    return Field(default, json_schema_extra={"may_change": True}, **options)


def changeable(config: type[BaseModel], prefix: str = "") -> set[str]:
    """Return the keys of fields and sections that are declared by `may_change`."""
    keys: set[str] = set()
    for name, field in config.model_fields.items():
        key, kind = f"{prefix}{name}", field.annotation
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("may_change"):
            keys.add(key)
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            keys |= changeable(kind, f"{key}.")
    return keys
