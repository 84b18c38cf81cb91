"""The episodes whose evidence the generator is shown: gold pages, and those of a searcher."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from io import BytesIO
from pathlib import Path

from PIL import Image

from demo.search.policy import NAME as SEARCHER
from demo.search.reading import WIDTH, Reader, Sight
from scorekit.llm import LLMClient, Sampling
from trainer.search.config import EpisodeConfig
from trainer.search.images.views import ShownImage, page_view
from trainer.search.records import Question, Trajectory, Turn
from trainer.search.rollout.episode import run_episodes
from trainer.search.rollout.policies import ChatPolicy
from trainer.search.rollout.tools import PageSource

#: SHA-256 -> PNG.
Images = dict[str, bytes]


class PlacingReader(Reader):
    """A reader that is told which part of which page an image shows.

    The demo's generator finds it from the pixels, which takes most of the time of a request.
    """

    def __init__(self, *corpora: Path) -> None:
        super().__init__(*corpora)
        self._sights: dict[bytes, Sight] = {}

    def note_places(self, episodes: Iterable[Trajectory], images: Images) -> None:
        """Note the places of all images of episodes."""
        for view in (view for t in episodes for turn in t.turns for view in turn.views):
            points = WIDTH / view.page_width
            region = tuple(side * points for side in view.region)
            for sha256 in (view.image, view.original or view.image):
                with Image.open(BytesIO(images[sha256])) as image:
                    scale = image.height / (region[3] - region[1])
                sight = Sight(self.pages[view.page_id], region, scale)  # type: ignore[arg-type]
                self._sights[bytes.fromhex(sha256)] = sight

    def locate(self, image: bytes) -> Sight | None:
        """Return the place that was noted, else the one that the pixels tell."""
        return self._sights.get(hashlib.sha256(image).digest()) or super().locate(image)


def gold_episodes(
    questions: Iterable[Question], pages: PageSource, max_pixels: int, images: Images
) -> list[Trajectory]:
    """Return an episode of each question that was shown its gold pages.

    max_pixels: of the originals.
    images: gets all images.
    """
    sight = EpisodeConfig().sight
    image_by_page: dict[str, ShownImage] = {}
    episodes = []
    for question in questions:
        for page in question.gold:
            if page not in image_by_page:
                image = page_view(page, pages.image(page), sight, max_pixels)
                images[image.view.image] = image.png
                if image.original is not None and image.view.original is not None:
                    images[image.view.original] = image.original
                image_by_page[page] = image
        views = [image_by_page[page].view for page in question.gold]
        turn = Turn(number=1, text="", action="search", views=views)
        episodes.append(_episode(question, [turn]))
    return episodes


def _episode(question: Question, turns: Sequence[Turn]) -> Trajectory:
    return Trajectory(
        trajectory_id=question.id,
        run="bench",
        step=1,
        group=question.id,
        question=question,
        turns=list(turns),
        end="complete",
    )


def searched_episodes(
    questions: Sequence[Question],
    pages: PageSource,
    policy_url: str,
    max_pixels: int,
    images: Images,
    seed: int,
) -> list[Trajectory]:
    """Return an episode of each question by the demo's searcher, which crops small print."""
    client = partial(LLMClient, f"{policy_url}/v1", SEARCHER, max_concurrency=32)
    sampling = Sampling(max_tokens=1024, temperature=1.0, seed=seed)
    with closing(ChatPolicy(client, sampling)) as policy:
        policy.check()
        return run_episodes(
            questions,
            policy,
            pages,
            EpisodeConfig(),
            new_id=lambda question, sample: f"{seed}-{question.id}",
            on_done=lambda trajectory: None,
            save_image=images.__setitem__,
            original_pixels=max_pixels,
        )
