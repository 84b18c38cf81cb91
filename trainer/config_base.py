"""What the sections of a run's config share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


def may_change(default: Any = ..., **told: Any) -> Any:
    """A field, or section, that a run may change when it goes on (--resume); that is said in its
    log. All others stay, since they would change the mathematics. What stands behind paths and URLs
    is held against the run's own all the same."""
    return Field(default, json_schema_extra={"may_change": True}, **told)


def changeable(config: type[BaseModel], prefix: str = "") -> set[str]:
    """The keys of fields and sections that are declared by `may_change`."""
    found: set[str] = set()
    for name, field in config.model_fields.items():
        key, kind = f"{prefix}{name}", field.annotation
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("may_change"):
            found.add(key)
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= changeable(kind, f"{key}.")
    return found
