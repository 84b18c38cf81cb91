"""Records of an index and its pages on the disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from scorekit.retrieval.wire import TextBox

if TYPE_CHECKING:
    from PIL.Image import Image

#: Called with the number of newly finished files or pages.
Step = Callable[[int], None]
#: Increase it when older services cannot read the format correctly.
INDEX_SCHEMA = 1
#: Number of pages from which late interaction is approximate unless the user says otherwise.
APPROXIMATE_FROM = 10_000


def no_step(more: int) -> None:
    """Do nothing: the default without a progress bar."""


class FilePage(NamedTuple):
    """A page as it was read from a file, before it is stored.

    boxes: of its text layer.
    annotations: what annotations and form fields of a PDF show."""

    image: Image
    boxes: list[TextBox]
    annotations: list[TextBox]


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class PageContent(_Stored):
    """The content of a page.

    width, height: of its image in pixels.
    picture: SHA-256 of the PNG, which is also its name.
    boxes: its text in reading order."""

    width: int
    height: int
    picture: str
    boxes: list[TextBox] = Field(default_factory=list)


class PageRecord(PageContent):
    """A page of an index.

    page_id: `{document}_{page}`; the first page is 1.
    """

    page_id: str
    document: str
    page: int

    @property
    def text(self) -> str:
        """Return the page's text, one line for each box."""
        return "\n".join(box.text for box in self.boxes)


class Skipped(_Stored):
    """A file, or a part of one, that is not in the index, with the reason.

    source: name of the file or folder.
    page: None: all of it, or what the reason names."""

    source: str
    page: int | None = None
    reason: str


class Manifest(_Stored):
    """The state of an index: the file whose replacement makes a new state the current one.

    revision: digest of the pages and of the backends' files, and the name of their folder.
    other_files: number of files of other kinds in the folders, by their ending.
    textless: ids of pages without any letter or number.
    backends: name -> settings.
    """

    schema_version: int = INDEX_SCHEMA
    id: str
    revision: str
    pages: int
    documents: int
    skipped: list[Skipped] = Field(default_factory=list)
    other_files: dict[str, int] = Field(default_factory=dict)
    textless: list[str] = Field(default_factory=list)
    backends: dict[str, dict[str, Any]] = Field(default_factory=dict)
