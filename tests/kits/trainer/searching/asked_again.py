"""Real servers for commands that request answers again: a generator that knows each page's
content, and a judge by rules.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.openai_server import Body, FakeOpenAI
from testing.servers import running_app
from tests.kits.retrieval.stand_in import StandInRetriever, picture_of
from tests.kits.trainer.search_answers import serving
from tests.kits.trainer.searching.finished import png_of

NOT_SHOWN = "The pictures do not show it."


@dataclass(slots=True)
class Knowing:
    """Servers with known answers.

    says: question -> page id -> what the generator reads on that page; "": its answer without a
    page.
    """

    fake: FakeOpenAI
    settings: list[str]
    retriever: StandInRetriever
    says: dict[str, dict[str, str]]

    def served(self) -> Counter[tuple[str, tuple[str, ...]]]:
        """Return (question, pages) -> how often the generator has answered it."""
        return Counter(
            _question_and_pages(request.body, self.retriever.pages)
            for request in self.fake.requests
            if request.status == 200
        )


@contextmanager
def knowing(pages: Mapping[str, str], says: dict[str, dict[str, str]]) -> Iterator[Knowing]:
    """Start all servers.

    pages: id -> text; `picture_of` and `png_of` make an id's images.
    """

    def answer(body: Body, seed: int | None) -> str:
        question, page_ids = _question_and_pages(body, pages)
        known_answers = says.get(question, {})
        answers = [known_answers[page] for page in page_ids or ("",) if page in known_answers]
        return " and ".join(answers) or NOT_SHOWN

    retriever = StandInRetriever(dict(pages))
    with serving(answer) as (fake, config), running_app(retriever.app) as url:
        settings = [
            f"--set=answering.generator.base_url={config['generator']['base_url']}",
            "--set=answering.generator.model=generator",
            "--set=answering.generator.max_attempts=1",
            "--set=answering.generator.max_requests=3",
            f"--set=answering.judge.url={config['judge']['url']}",
            f"--set=retriever.url={url}",
        ]
        yield Knowing(fake, settings, retriever, says)


def _question_and_pages(body: Body, pages: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the question, and the pages of the images."""
    names = {render(page): page for page in pages for render in (picture_of, png_of)}
    text, *parts = body["messages"][1]["content"]
    urls = (part["image_url"]["url"] for part in parts)
    page_ids = tuple(names[base64.b64decode(url.partition(",")[2])] for url in urls)
    return text["text"], page_ids


def flags(out: Path, **options: Any) -> list[str]:
    """Return the flags of a command: its output folder, and config keys (`data.train` as
    data_train).
    """
    settings = [f"--set={name.replace('__', '.')}={value}" for name, value in options.items()]
    return ["--out", str(out), *settings]
