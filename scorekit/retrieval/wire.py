"""Wire types of the retriever and its callers (docs/reference/protocol.md)."""

from __future__ import annotations

from pydantic import Field

from scorekit.schemas import WireAnswer

#: Header of answers about pages, whose bodies do not name the index.
REVISION_HEADER = "x-index-revision"


class PageHit(WireAnswer):
    """A page that a query has found. rank: 1 is the best. score: higher is better, of its back end
    alone. width, height: of its picture in pixels. image: path of the picture on the same service.
    """

    page_id: str
    document: str
    page: int = Field(description="Number of the page in its document; the first is 1.")
    rank: int
    score: float
    width: int
    height: int
    image: str


class TextBox(WireAnswer):
    """A line of a page's text layer, in pixels of its picture, origin top left. letter_height: of
    its letters (the font's size on the page), in the same pixels."""

    text: str
    x1: float
    y1: float
    x2: float
    y2: float
    letter_height: float


class Page(WireAnswer):
    """A page of the index: the answer to `GET /v1/pages/{page_id}`.

    boxes: its text layer in reading order; empty for a scanned page.
    """

    page_id: str
    document: str
    page: int
    width: int
    height: int
    image: str
    boxes: list[TextBox]


class IndexInfo(WireAnswer):
    """The index that answers. revision: digest of all that an answer depends on (pages, images,
    vectors, back end and its settings)."""

    id: str
    revision: str
    pages: int
    documents: int
    backend: str
