"""A retriever in this process: a few drawn pages, found by their words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO

from PIL import Image, ImageDraw

from scorekit.errors import RequestError, SampleError
from scorekit.retrieval.wire import IndexInfo, Page, PageHit, TextBox

WIDTH, HEIGHT = 1280, 720
#: Text, how far down, size of its letters.
Line = tuple[str, int, int]
DECK: Mapping[str, Sequence[Line]] = {
    "deck_1": [("Births in Korea", 40, 48), ("1990: 649,738", 300, 11), ("1991: 709,275", 330, 11)],
    "deck_2": [("Births in Europe", 40, 48), ("1990: 8,100,000", 300, 30)],
    "deck_3": [("Births by month in Korea", 40, 48), ("May is first", 300, 30)],
    "deck_4": [("Rainfall", 40, 48), ("July: 394 mm", 300, 30)],
}


def boxes(lines: Sequence[Line]) -> list[TextBox]:
    """Return the boxes of letters; each letter is half as wide as high."""
    return [
        TextBox(text=t, x1=80, y1=y, x2=80 + len(t) * size / 2, y2=y + size, letter_height=size)
        for t, y, size in lines
    ]


@cache
def draw_page(page_id: str, lines: tuple[Line, ...]) -> bytes:
    """Draw a page: a bar for each letter, in a color of the page's own."""
    colour = (sum(map(ord, page_id)) * 37 % 200, 60, 120)
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    for box in boxes(lines):
        for i in range(len(box.text)):
            x = box.x1 + i * box.letter_height / 2
            pen.rectangle((x, box.y1, x + box.letter_height / 4, box.y2), fill=colour)
    written = BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


class PagesHere:
    """Finds pages like `Retriever`, in this process.

    The best page is the one with most words of a query; none if it has none of them.
    requests: the queries of each request, in order.
    """

    def __init__(self, deck: Mapping[str, Sequence[Line]] = DECK) -> None:
        self.deck = deck
        self.requests: list[list[str]] = []

    def info(self) -> IndexInfo:
        return IndexInfo(
            id="here", revision="r1", pages=len(self.deck), documents=1, backend="words"
        )

    def search(self, queries: Sequence[str], top_k: int = 10) -> list[list[PageHit] | SampleError]:
        self.requests.append(list(queries))
        return [self._hits_for(query)[:top_k] for query in queries]

    def _hits_for(self, query: str) -> list[PageHit]:
        words = query.lower().split()
        scores = {
            page: sum(" ".join(text for text, _, _ in lines).lower().count(w) for w in words)
            for page, lines in self.deck.items()
        }
        best = sorted((page for page in scores if scores[page]), key=lambda p: (-scores[p], p))
        return [
            PageHit(
                page_id=page,
                document="deck.pdf",
                page=list(self.deck).index(page) + 1,
                rank=rank,
                score=float(scores[page]),
                width=WIDTH,
                height=HEIGHT,
                image=f"/v1/pages/{page}/image",
            )
            for rank, page in enumerate(best, 1)
        ]

    def page(self, page_id: str) -> Page:
        if page_id not in self.deck:
            raise RequestError("not_found", "no such page")
        return Page(
            page_id=page_id,
            document="deck.pdf",
            page=list(self.deck).index(page_id) + 1,
            width=WIDTH,
            height=HEIGHT,
            image=f"/v1/pages/{page_id}/image",
            boxes=boxes(self.deck[page_id]),
        )

    def image(self, page_id: str) -> bytes:
        self.page(page_id)
        return draw_page(page_id, tuple(self.deck[page_id]))
