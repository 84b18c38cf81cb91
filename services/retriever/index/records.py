"""What an index says of itself and of its pages, as it stands on the disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from scorekit.retrieval.wire import TextBox

#: Told how many more files or pages are done.
Step = Callable[[int], None]
#: Raise it when older services could not read what is written, or would read it wrongly.
INDEX_SCHEMA = 1


def no_step(more: int) -> None:
    """For whoever shows no progress."""


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class PageContent(_Stored):
    """What was read of a page. width, height: of its picture in pixels. picture: SHA-256 of the
    PNG, which is stored under it. boxes: its text in reading order."""

    width: int
    height: int
    picture: str
    boxes: list[TextBox] = Field(default_factory=list)


class PageRecord(PageContent):
    """A page of an index. page_id: `{document}_{page}`; the first page is 1."""

    page_id: str
    document: str
    page: int

    @property
    def text(self) -> str:
        """Its lines."""
        return "\n".join(box.text for box in self.boxes)


class Skipped(_Stored):
    """What is not in the index, and why. source: name of the file. page: None: all of it."""

    source: str
    page: int | None = None
    reason: str


class Manifest(_Stored):
    """The state of an index: the file whose replacement makes a new state the current one.

    revision: digest of the pages and of what the back ends keep; name of the folder in which they
    are. textless: ids of pages without any text. backends: name -> its settings.
    """

    schema_version: int = INDEX_SCHEMA
    id: str
    revision: str
    pages: int
    documents: int
    skipped: list[Skipped] = Field(default_factory=list)
    textless: list[str] = Field(default_factory=list)
    backends: dict[str, dict[str, Any]] = Field(default_factory=dict)
